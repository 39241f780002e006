"""The ``tracelake`` command."""

from __future__ import annotations

import sys

import typer

from tracelake import __version__
from tracelake.cli.dispatcher_command import dispatcher
from tracelake.domain.errors import InvalidDag, TracelakeError

app = typer.Typer(
    help="Tracelake: events in, leased tasks out, every output committed once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(dispatcher)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"tracelake {__version__}")
        raise typer.Exit


def main() -> None:
    """Errors that the platform raises on purpose are one line, not a traceback."""
    try:
        app()
    except InvalidDag as error:
        for problem in error.problems:
            typer.echo(f"line {problem.line}: {problem.field}: {problem.message}", err=True)
        sys.exit(2)
    except TracelakeError as error:
        typer.echo(f"error: {error.message}", err=True)
        sys.exit(1)
