"""``tracelake buffers``: what waits for buffered datasets, and their dead letters."""

from __future__ import annotations

from typing import Annotated

import typer

from tracelake.cli.bounds import HIGHEST_ID
from tracelake.cli.buffer_detail import print_buffer, print_buffers, print_dead_letter, print_dead_letters
from tracelake.cli.show import counted, print_json
from tracelake.cli.stack import HomeOption, JsonOption, TokenOption, UrlOption, connect

buffers_app = typer.Typer(help="Buffered datasets: what waits for them, dead letters.", no_args_is_help=True)

NameArgument = Annotated[str, typer.Argument(help="The dataset's name, or its uuid.", metavar="DATASET")]


@buffers_app.command("list")
def list_buffers(
    url: UrlOption = None, token: TokenOption = None, home: HomeOption = None, as_json: JsonOption = False
) -> None:
    """List buffered datasets: how many messages wait, for how long, and how many were given up.

    Examples:

        tracelake buffers list

        tracelake buffers list --json
    """
    with connect(url, token, home) as client:
        page = client.buffers()
    if as_json:
        print_json(page)
    elif not page.buffers:
        typer.echo("no buffered datasets")
    else:
        print_buffers(page.buffers)


@buffers_app.command()
def show(
    dataset: NameArgument,
    letter: Annotated[
        int | None,
        typer.Option(min=1, max=HIGHEST_ID, help="This dead letter, with its records.", metavar="ID"),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many dead letters.")] = 20,
    after: Annotated[str | None, typer.Option(help="Go on after a page's `next`.")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a buffered dataset and its dead letters with their reasons, or one of them whole.

    Examples:

        tracelake buffers show alert_events

        tracelake buffers show alert_events --letter 17
    """
    with connect(url, token, home) as client:
        buffer = client.buffer(dataset)
        if letter is not None:
            found = client.dead_letter(letter)
            if found.dataset_uuid != buffer.dataset_uuid:
                typer.echo(f"dead letter {letter} is one of {found.dataset or found.dataset_uuid}", err=True)
                raise typer.Exit(1)
            print_json(found) if as_json else print_dead_letter(found)
            return
        page = client.dead_letters(str(buffer.dataset_uuid), limit=limit, after=after)
    if as_json:
        print_json({"buffer": buffer, "dead_letters": page.dead_letters, "next": page.next})
        return
    print_buffer(buffer)
    print_dead_letters(page)


IdsArgument = Annotated[
    list[int] | None, typer.Argument(min=1, max=HIGHEST_ID, help="Only these.", metavar="[ID]...")
]


@buffers_app.command()
def replay(
    dataset: NameArgument,
    ids: IdsArgument = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send dead letters to the sink again, all of the dataset's or some.

    What still can't be written comes back as a new dead letter.

    Examples:

        tracelake buffers replay alert_events

        tracelake buffers replay alert_events 17 18
    """
    with connect(url, token, home) as client:
        done = client.replay_dead_letters(dataset, ids or ())
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{counted(done.replayed, 'dead letter')} sent again")


@buffers_app.command()
def drop(
    dataset: NameArgument,
    ids: IdsArgument = None,
    everything: Annotated[bool, typer.Option("--all", help="All of the dataset's.")] = False,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget dead letters for good. Their rows are lost: there is no way back.

    Examples:

        tracelake buffers drop alert_events 17

        tracelake buffers drop alert_events --all
    """
    if bool(ids) == everything:
        raise typer.BadParameter("name dead letters, or say --all", param_hint="ID")
    with connect(url, token, home) as client:
        done = client.drop_dead_letters(dataset, ids or (), everything=everything)
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{counted(done.dropped, 'dead letter')} dropped")
