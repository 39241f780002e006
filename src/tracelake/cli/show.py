"""What commands print: tables for people, JSON for programs.

Text that workers sent is shown without its control characters: an error message must not be able to take
over the terminal of whoever reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

_WIDE = 1000


def print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, indent: int = 0) -> None:
    """Columns as wide as they need to be; on a terminal, cut at its edge."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(Text(column), no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row))
    on_terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if on_terminal else _WIDE, highlight=False)
    if on_terminal:
        console.print(Padding(table, (0, 0, 0, indent)))
        return
    with console.capture() as captured:
        console.print(Padding(table, (0, 0, 0, indent)))
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """One name and value per line, without those that have no value."""
    known = [(name, cell(value)) for name, value in fields if value is not None]
    width = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        typer.echo(f"{name:<{width}}  {value}")


def print_heading(text: str) -> None:
    typer.echo()
    typer.secho(text, bold=True)


def cell(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case datetime():
            return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        case _:
            return "".join(letter if letter.isprintable() else " " for letter in str(value))


def pairs(fields: Mapping[str, object] | None) -> str | None:
    """Names and values in one line."""
    if not fields:
        return None
    return "  ".join(f"{name}={cell(value)}" for name, value in fields.items())


def scope(start: int | None, end: int | None) -> str | None:
    """A block range in one word; a cursor's is open at its beginning."""
    if end is None:
        return None
    return f"{start}-{end}" if start is not None else f"..{end}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
