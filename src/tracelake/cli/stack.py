"""Which stack a command speaks to, and the options that say so.

What is given on the command line comes first, then ``TRACELAKE_URL`` and ``TRACELAKE_TOKEN``, then the home
in the current folder. A home's token is only ever sent to the address that stands beside it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake import stack_address
from tracelake.domain.errors import BadRequest
from tracelake.stack_address import DEFAULT_HOME, NOT_RUNNING, UNOPENED, start_command

if TYPE_CHECKING:
    from tracelake.client import Client

__all__ = [
    "DEFAULT_HOME",
    "NOT_RUNNING",
    "HomeOption",
    "JsonOption",
    "TokenOption",
    "UrlOption",
    "connect",
    "find_stack",
    "start_command",
]

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
    try:
        return stack_address.find_stack(url, token, home)
    except BadRequest as error:
        if error.reason != UNOPENED:
            raise
        raise typer.BadParameter("--url needs a token: give --token or set TRACELAKE_TOKEN") from None
