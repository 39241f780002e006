"""How ``tracelake buffers`` prints a buffered dataset and a dead letter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from tracelake.cli.show import cell, print_fields, print_heading, print_table, scope

if TYPE_CHECKING:
    from tracelake.contracts.buffers import BufferDetail, BufferSummary, DeadLetterDetail, DeadLetterPage


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
    """Messages that are on their way, wherever they are."""
    if buffer.waiting is None:
        return f"{buffer.undelivered} + ?"
    return buffer.undelivered + buffer.waiting + (buffer.in_flight or 0)


def _age(buffer: BufferSummary) -> str | None:
    return None if not buffer.oldest_age_seconds else f"{buffer.oldest_age_seconds:.0f} s"
