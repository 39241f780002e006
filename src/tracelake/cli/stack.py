"""Which stack a command speaks to, and the options that say so.

What is given on the command line comes first, then ``TRACELAKE_URL`` and ``TRACELAKE_TOKEN``, then the home
in the current folder. A home's token is only ever sent to the address that stands beside it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.domain.errors import Unavailable

if TYPE_CHECKING:
    from tracelake.client import Client

DEFAULT_HOME = Path(".tracelake")
NOT_RUNNING = "StackNotRunning"

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


def connect(url: str | None, token: str | None, home: Path | None) -> Client:
    address, secret = find_stack(url, token, home)
    from tracelake.client import Client

    return Client(address, secret)


def find_stack(url: str | None, token: str | None, home: Path | None) -> tuple[str, str]:
    """The address and the token; raises when there is nothing to find."""
    from_environment = url is None and home is None
    if from_environment:
        url = os.environ.get("TRACELAKE_URL") or None
    if url is None:
        found_url, found_token = _of_home(home or DEFAULT_HOME)
        return found_url, token or found_token
    token = token or os.environ.get("TRACELAKE_TOKEN") or None
    if token is None:
        raise typer.BadParameter("--url needs a token: give --token or set TRACELAKE_TOKEN")
    return url, token


def _of_home(home: Path) -> tuple[str, str]:
    from tracelake.dev.handle import DEV_FILE, DISPATCHER_FILE, DevHandle, DispatcherHandle, read_handle

    handle = read_handle(home / DEV_FILE, DevHandle) or read_handle(home / DISPATCHER_FILE, DispatcherHandle)
    if handle is None:
        raise Unavailable(
            NOT_RUNNING,
            f"no stack runs on the home {home}: start one with `{start_command(home)}`, "
            "or say where it is with --home or --url",
        )
    return handle.user_url, handle.user_token


def start_command(home: Path | None) -> str:
    from shlex import quote

    return f"tracelake dev --home {quote(str(home or DEFAULT_HOME))}"
