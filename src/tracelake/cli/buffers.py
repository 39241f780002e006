"""``tracelake buffers``: lists buffered datasets with their waiting messages, and handles their dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from tracelake.cli.show import cell, counted, print_fields, print_heading, print_json, print_table, scope
from tracelake.cli.stack import HIGHEST_ID, HomeOption, JsonOption, TokenOption, UrlOption, connect

if TYPE_CHECKING:
    from tracelake.contracts.buffers import BufferDetail, BufferSummary, DeadLetterDetail, DeadLetterPage

NameArgument = Annotated[str, typer.Argument(help="The dataset's name, or its uuid.", metavar="DATASET")]
IdsArgument = Annotated[
    list[int] | None, typer.Argument(min=1, max=HIGHEST_ID, help="Only these.", metavar="[ID]...")
]


buffers_app = typer.Typer(help="Buffered datasets: waiting messages, dead letters.", no_args_is_help=True)


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
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of dead letters.")] = 20,
    after: Annotated[str | None, typer.Option(help="Go on after a page's `next`.")] = None,
    url: UrlOption = None,
    token: TokenOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a buffered dataset and its dead letters with their reasons, or one dead letter in full.

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

    A batch that still can't be written becomes a new dead letter.

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
    """Delete dead letters for good. Their rows are lost and can't be restored.

    Examples:

        tracelake buffers drop alert_events 17

        tracelake buffers drop alert_events --all
    """
    # Dropping is final, so leaving the ids out doesn't mean all.
    if bool(ids) == everything:
        raise typer.BadParameter("name dead letters, or give --all", param_hint="ID")
    with connect(url, token, home) as client:
        done = client.drop_dead_letters(dataset, ids or (), everything=everything)
    if as_json:
        print_json(done)
    else:
        typer.echo(f"{counted(done.dropped, 'dead letter')} dropped")


def print_buffers(buffers: Sequence[BufferSummary]) -> None:
    print_table(
        ("DATASET", "DAG", "WAITING", "OLDEST", "DEAD", "POSITION", "SINK"),
        [
            (
                each.dataset if each.published else f"{each.dataset} (not published)",
                each.dag_name,
                _waiting(each),
                _age(each),
                each.dead_letters,
                each.position,
                each.sink_status,
            )
            for each in buffers
        ],
    )


def print_buffer(buffer: BufferDetail) -> None:
    print_fields(
        [
            ("dataset", buffer.dataset if buffer.published else f"{buffer.dataset} (not published)"),
            ("uuid", buffer.dataset_uuid),
            ("dag", buffer.dag_name),
            ("schema", buffer.schema_hash),
            ("columns", ", ".join(f"{column.name} {column.type}" for column in buffer.schema.columns)),
            ("unique", ", ".join(buffer.schema.unique)),
            ("written by", ", ".join(buffer.writers) or None),
            ("waiting", _waiting(buffer)),
            ("oldest", _age(buffer)),
            ("position", buffer.position),
            ("sink", f"{buffer.sink_status} (task {buffer.sink_task_id})" if buffer.sink_task_id else None),
            ("dead letters", buffer.dead_letters),
        ]
    )


def print_dead_letters(page: DeadLetterPage) -> None:
    if not page.dead_letters:
        return
    print_heading("Dead letters")
    print_table(
        ("ID", "GIVEN UP", "PRODUCER", "ROWS", "TRIES", "REASON"),
        [
            (each.dead_letter_id, each.created_at, each.producer, each.row_count, each.tries, each.reason)
            for each in page.dead_letters
        ],
    )
    if page.next is not None:
        typer.echo(f"more: --after {page.next}", err=True)


def print_dead_letter(letter: DeadLetterDetail) -> None:
    message = letter.message
    print_fields(
        [
            ("dead letter", letter.dead_letter_id),
            ("dataset", letter.dataset or letter.dataset_uuid),
            ("reason", letter.reason),
            ("tries", letter.tries),
            ("given up", letter.created_at),
            ("kind", letter.kind),
            ("producer", letter.producer),
            ("task", f"{message.get('task_id')} attempt {message.get('attempt')}"),
            ("blocks", scope(message.get("scope_start"), message.get("scope_end"))),
            ("revision", message.get("revision")),
            ("rows", letter.row_count),
            ("records in", message.get("artifact")),
        ]
    )
    if records := message.get("records"):
        print_heading("Records")
        typer.echo(cell(records))


def _waiting(buffer: BufferSummary) -> str | int:
    """Messages that aren't written yet, wherever they are."""
    if buffer.waiting is None:
        return f"{buffer.undelivered} + ?"
    return buffer.undelivered + buffer.waiting + (buffer.in_flight or 0)


def _age(buffer: BufferSummary) -> str | None:
    return None if not buffer.oldest_age_seconds else f"{buffer.oldest_age_seconds:.0f} s"
