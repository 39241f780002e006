"""The options by which commands find a stack, and the clients that they open with them.

``connect`` finds the stack by ``tracelake.stack_connection``: options first, then ``TRACELAKE_URL`` and
``TRACELAKE_TOKEN``, then the home in the current folder. ``PatientClient`` is for commands that wait for a long
time: it survives a restart of the stack, also when that comes back on another port.

Commands that serve a stack don't use the user port (``cli/service.py``). ``stack_on`` returns the handle of the
stack that runs on a home, with all of its addresses and logins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self, TypeVar

import typer

from tracelake.domain.errors import BadRequest, Unavailable
from tracelake.stack_connection import (
    DEFAULT_HOME,
    NO_CREDENTIALS,
    NOT_RUNNING,
    StackConnection,
    not_running,
    start_command,
)

if TYPE_CHECKING:
    from tracelake.client import Client
    from tracelake.dev.handle import DevHandle

UrlOption = Annotated[
    str | None, typer.Option("--url", help="The stack's user port.  [env: TRACELAKE_URL]", show_default=False)
]
TokenOption = Annotated[
    str | None,
    typer.Option("--token", help="A user's token (prefer the variable).  [env: TRACELAKE_TOKEN]"),
]
HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home", readable=False, help="The home of a stack on this machine.  [default: .tracelake]"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

# The largest numbers that people may type, where no other part declares them; --help shows each.
HIGHEST_ID = 2**63 - 1
HIGHEST_VERSION = 2**31 - 1
HIGHEST_ATTEMPT = 2**31 - 1
MOST_LINES = 10_000_000
MOST_ROWS = 2**31 - 1
MAX_CHUNK = 1_000_000_000
LONGEST_SECONDS = 365 * 24 * 3600
PATIENCE = 120.0
"""Seconds that ``PatientClient`` waits for a stack to come back."""
_PAUSE = 0.5
T = TypeVar("T")


__all__ = [
    "DEFAULT_HOME",
    "NOT_RUNNING",
    "HomeOption",
    "JsonOption",
    "TokenOption",
    "UrlOption",
    "connect",
    "stack_on",
    "start_command",
]


def connect(url: str | None, token: str | None, home: Path | None) -> Client:
    """A client of the stack that the options name; raises when there is none."""
    try:
        connection = StackConnection.from_env_or_home(url, token, home)
    except BadRequest as error:
        if error.reason != NO_CREDENTIALS:
            raise
        raise typer.BadParameter("--url needs a token: give --token or set TRACELAKE_TOKEN") from None
    # Imported only now: an option that is wrong is reported without waiting for httpx.
    from tracelake.client import Client

    return Client(*connection)


def stack_on(home: Path, missing: Iterable[str]) -> DevHandle:
    """The handle of the stack that runs on a home. ``missing`` are the variables that could be set instead."""
    from tracelake.dev.handle import DevHandle
    from tracelake.stack_connection import DEV_FILE, read_handle

    handle = read_handle(home / DEV_FILE, DevHandle)
    if handle is None:
        raise not_running(home, ", ".join(missing))
    return handle


class PatientClient:
    """Repeats a request until the stack answers, so it is only for requests that may be sent twice."""

    def __init__(self, url: str | None, token: str | None, home: Path | None) -> None:
        self._where = (url, token, home)
        self._client: Client | None = connect(*self._where)
        self._answered = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hang_up()

    def ask(self, question: Callable[[Client], T]) -> T:
        """The first request must be answered at once: a stack that was never there isn't waited for."""
        give_up = time.monotonic() + PATIENCE
        reported = False
        while True:
            try:
                if self._client is None:
                    self._client = connect(*self._where)
                answer = question(self._client)
                self._answered = True
                return answer
            except Unavailable as error:
                if not self._answered or time.monotonic() > give_up:
                    raise
                if not reported:
                    typer.echo(f"{error.message}; waiting for it to come back", err=True)
                reported = True
            # A stack that comes back may have another address, which is read again from its home.
            self._hang_up()
            time.sleep(_PAUSE)

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.__exit__(None, None, None)
            self._client = None
