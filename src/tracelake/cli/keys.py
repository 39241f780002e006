"""``tracelake keys``: lists and rotates the keys that sign task tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.show import print_json, print_table
from tracelake.cli.stack import DEFAULT_HOME, JsonOption
from tracelake.domain.errors import NotFound

if TYPE_CHECKING:
    from tracelake.tokens.signing import PemKeyring

keys_app = typer.Typer(help="The keys that sign task tokens, in a home.", no_args_is_help=True)

KeysHome = Annotated[Path, typer.Option("--home", readable=False, help="The home with the keys.")]


@keys_app.command("list")
def list_keys(home: KeysHome = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """List the published keys, oldest first.

    Examples:

        tracelake keys list --home ./home

        tracelake keys list --json
    """
    found = _keyring(home).keys(datetime.now(UTC))
    if as_json:
        print_json(found)
        return
    print_table(
        ("KEY", "STATE", "SIGNS FROM", "PUBLISHED UNTIL"),
        [(key.kid, key.state, _moment(key.signs_from), _moment(key.published_until)) for key in found],
    )


@keys_app.command()
def rotate(home: KeysHome = DEFAULT_HOME, as_json: JsonOption = False) -> None:
    """Publish a new key now; it signs once every verifier knows it, and the old one retires by itself.

    A running Dispatcher notices. Repeating it while a new key is pending changes nothing.

    Examples:

        tracelake keys rotate --home ./home
    """
    now = datetime.now(UTC)
    keyring = _keyring(home)
    kid = keyring.rotate(now)
    key = next(each for each in keyring.keys(now) if each.kid == kid)
    if as_json:
        print_json(key)
    else:
        typer.echo(f"key {kid} is published and signs from {_moment(key.signs_from):%Y-%m-%d %H:%M:%SZ}")


def _keyring(home: Path) -> PemKeyring:
    from tracelake.tokens.signing import PemKeyring

    folder = home.absolute() / "keys"
    # A keyring makes its first key itself, which a mistyped --home must not cause.
    if not folder.is_dir():
        raise NotFound("NoKeys", f"{home} has no keys yet: the first start of a stack makes them")
    return PemKeyring(folder)


def _moment(seconds: int | None) -> datetime | None:
    """None also for the first key, which has always been signing."""
    return datetime.fromtimestamp(seconds, UTC) if seconds else None
