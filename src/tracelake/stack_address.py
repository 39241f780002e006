"""Where a running stack is: what is given comes first, then the environment, then a home on this machine.

    url and token      as given; the token may come from TRACELAKE_TOKEN
    home               the stack that runs on that home, by its handle file
    TRACELAKE_URL      with TRACELAKE_TOKEN, or the token that is given
    .tracelake         the home in the current folder

A home's token is only ever sent to the address that stands beside it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from tracelake.domain.errors import BadRequest, Invalid, Unavailable

DEFAULT_HOME = Path(".tracelake")
DEV_FILE = "dev.json"
DISPATCHER_FILE = "dispatcher.json"
USER_PORT = 8600
INTERNAL_PORT = 8601
NOT_RUNNING = "StackNotRunning"
UNOPENED = "TokenMissing"


class StackAddress(NamedTuple):
    """The user port and what opens it."""

    user_url: str
    user_token: str

    def __repr__(self) -> str:
        return f"StackAddress({self.user_url}, …)"


def find_stack(
    url: str | None = None, token: str | None = None, home: str | Path | None = None
) -> StackAddress:
    """Raises when there is nothing to find."""
    if url is None and home is None:
        url = os.environ.get("TRACELAKE_URL") or None
    if url is None:
        found = _of_home(Path(home) if home is not None else DEFAULT_HOME)
        return StackAddress(found.user_url, token or found.user_token)
    token = token or os.environ.get("TRACELAKE_TOKEN") or None
    if token is None:
        raise BadRequest(UNOPENED, "a URL needs a token: give one or set TRACELAKE_TOKEN")
    return StackAddress(url, token)


def _of_home(home: Path) -> StackAddress:
    handle = _read(home / DEV_FILE) or _read(home / DISPATCHER_FILE)
    if handle is None:
        raise Unavailable(
            NOT_RUNNING,
            f"no stack runs on the home {home}: start one with `{start_command(home)}`, "
            "or say where it is with --home or --url",
        )
    return handle


def _read(path: Path) -> StackAddress | None:
    """The part of a handle file that a user of the stack needs."""
    try:
        handle = json.loads(path.read_bytes())
        return StackAddress(str(handle["user_url"]), str(handle["user_token"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Unavailable("HandleUnreadable", f"can't read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise Invalid("HandleDamaged", f"{path} isn't a stack's handle: {error}") from None


def start_command(home: Path | None) -> str:
    from shlex import quote

    return f"tracelake dev --home {quote(str(home or DEFAULT_HOME))}"
