"""``tracelake outbox``: lists deliveries that were given up, and replays them."""

from __future__ import annotations

from typing import Annotated

import typer

from tracelake.cli.show import print_json, print_table
from tracelake.cli.stack import HIGHEST_ID, HomeOption, JsonOption, TokenOption, UrlOption, connect

outbox_app = typer.Typer(help="Deliveries to queues and functions that were given up.", no_args_is_help=True)


@outbox_app.command()
def failed(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of deliveries.")] = 100,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """List failed deliveries, oldest first, with the last error.

    Examples:

        tracelake outbox failed

        tracelake outbox failed --limit 1000 --json
    """
    with connect(url, token, home) as client:
        found = client.failed_deliveries(limit=limit)
    if as_json:
        print_json(found)
        return
    if not found.failed:
        typer.echo("nothing was given up")
        return
    print_table(
        ("ID", "KIND", "RUNTIME", "TASK", "TRIES", "GIVEN UP", "ERROR"),
        [
            (e.outbox_id, e.kind, e.runtime, e.task_id, e.tries, e.failed_at, e.last_error)
            for e in found.failed
        ],
    )


@outbox_app.command()
def replay(
    ids: Annotated[
        list[int] | None,
        typer.Argument(min=1, max=HIGHEST_ID, help="Only these; all if none is given.", metavar="[ID]..."),
    ] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Retry deliveries that were given up.

    Examples:

        tracelake outbox replay

        tracelake outbox replay 17 18
    """
    with connect(url, token, home) as client:
        done = client.replay(ids or ())
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{done.replayed} tried again")
