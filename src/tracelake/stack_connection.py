"""``StackConnection``: how the users of a stack find it, on the command line, in scripts and in notebooks.

Arguments come first, then the environment, then a home on this machine:

    url and token      as given; the token may come from TRACELAKE_TOKEN
    home               the stack that runs on that home, by its handle file
    TRACELAKE_URL      with TRACELAKE_TOKEN, or the token that is given
    .tracelake         the home in the current folder

A home's token is only ever sent to the address in the same handle file, so that a variable which was left set can't
make a client send it elsewhere. ``read_handle`` is the one reader of such files. This module imports the standard
library alone: the command line loads it always.
"""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import NamedTuple, Self, TypedDict, TypeVar

from tracelake.domain.errors import BadRequest, Invalid, Unavailable

DEFAULT_HOME = Path(".tracelake")
DEV_FILE = "dev.json"
DISPATCHER_FILE = "dispatcher.json"
USER_PORT = 8600
INTERNAL_PORT = 8601
QUERY_PORT = 8602
NOT_RUNNING = "StackNotRunning"
NO_CREDENTIALS = "TokenMissing"
Handle = TypeVar("Handle")


class StackConnection(NamedTuple):
    """The address of a stack's user port, and a token for it."""

    user_url: str
    user_token: str

    def __repr__(self) -> str:
        return f"StackConnection({self.user_url}, …)"

    @classmethod
    def from_env_or_home(
        cls, url: str | None = None, token: str | None = None, home: str | Path | None = None
    ) -> Self:
        """Find the stack; raises ``Unavailable`` when none runs and ``BadRequest`` for a URL without a token."""
        if url is None and home is None:
            url = os.environ.get("TRACELAKE_URL") or None
        if url is None:
            found = cls._of_home(Path(home) if home is not None else DEFAULT_HOME)
            return cls(found.user_url, token or found.user_token)
        token = token or os.environ.get("TRACELAKE_TOKEN") or None
        if token is None:
            raise BadRequest(NO_CREDENTIALS, "a URL needs a token: give one or set TRACELAKE_TOKEN")
        return cls(url, token)

    @classmethod
    def _of_home(cls, home: Path) -> Self:
        # A stack's own file comes first: a Dispatcher that was started beside it knows less.
        handle = read_handle(home / DEV_FILE, _UserHandle) or read_handle(home / DISPATCHER_FILE, _UserHandle)
        if handle is None:
            raise not_running(home, "--home or --url")
        return cls(handle["user_url"], handle["user_token"])


class _UserHandle(TypedDict):
    """The two fields of a handle file that a user of the stack needs."""

    user_url: str
    user_token: str


def read_handle(path: Path, kind: type[Handle]) -> Handle | None:
    """The handle file as ``kind``, which may have only some of its fields; None when there is no such file."""
    # Not above: most commands find their stack without a handle file, or not at all.
    import msgspec

    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unavailable("HandleUnreadable", f"can't read {path}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise Invalid("HandleDamaged", f"{path} isn't a stack's handle: {error}") from None


def not_running(home: Path, alternative: str) -> Unavailable:
    """The error for a home on which no stack runs. ``alternative`` names the options or variables that would do."""
    return Unavailable(
        NOT_RUNNING,
        f"no stack runs on the home {home}: start one with `{start_command(home)}`, "
        f"or give its address with {alternative}",
    )


def start_command(home: Path | None) -> str:
    """The command that starts a stack on the home, to be copied into a shell."""
    return f"tracelake dev --home {quote(str(home or DEFAULT_HOME))}"
