"""Prints what commands show: tables and fields for people, JSON for programs, and the rows of a query.

Text that workers sent is printed without its control characters, so that an error message can't take control of
the reader's terminal. Rows of a query have numbers to the right and hashes shortened in the middle, and are never
wrapped: on a terminal the widest columns are cut first, and columns without room are left out and named below.
Elsewhere everything is printed in full.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer

_WIDE = 1000
_GAP = 2
_NARROW = 10
"""Minimum width of a column that is cut, in characters."""
_SECONDS = (10**9, 10**10)
_NUMBERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE", "DECIMAL")
_NUMBERS_UNSIGNED = tuple(f"U{name}" for name in _NUMBERS[:5])


def print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, indent: int = 0) -> None:
    """Print columns as wide as they need to be; on a terminal, cut at its edge."""
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
    # Without a terminal nothing is cut: programs need whole values.
    console = Console(file=sys.stdout, width=None if on_terminal else _WIDE, highlight=False)
    if on_terminal:
        console.print(Padding(table, (0, 0, 0, indent)))
        return
    with console.capture() as captured:
        console.print(Padding(table, (0, 0, 0, indent)))
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Print one name and value per line, without those that have no value."""
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
            # A control character in a name or an error could rewrite what the terminal shows.
            return "".join(letter if letter.isprintable() else " " for letter in str(value))


def pairs(fields: Mapping[str, object] | None) -> str | None:
    """Names and values in one line."""
    if not fields:
        return None
    return "  ".join(f"{name}={cell(_moment(name, value))}" for name, value in fields.items())


def _moment(name: str, value: object) -> object:
    """Operators report times in epoch seconds, as chains do; a number that no clock shows now is something else."""
    if name.endswith(("_at", "_time")) and isinstance(value, int) and _SECONDS[0] <= value < _SECONDS[1]:
        return datetime.fromtimestamp(value, UTC)
    return value


def scope(start: int | None, end: int | None) -> str | None:
    """A block range in one word; a cursor's is open at its beginning."""
    if end is None:
        return None
    return f"{start}-{end}" if start is not None else f"..{end}"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def duration(seconds: float, decimals: int = 0) -> str:
    """As in ``2 h 5 min``, ``1 min 30 s``, ``4 s``; below a minute with ``decimals``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.{decimals}f} s"
    hours, rest = divmod(whole, 3600)
    minutes, second = divmod(rest, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {second} s"


def print_rows(
    columns: Sequence[str], types: Sequence[str], rows: Sequence[Sequence[Any]], *, indent: int = 0
) -> None:
    texts = [[_text(value) for value in row] for row in rows]
    names = [cell(column) for column in columns]
    natural = [max(map(len, each)) for each in zip(names, *texts, strict=True)]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    widths = fit(natural, room - indent if room is not None else None)
    margin = " " * indent
    right = [kind.startswith((*_NUMBERS, *_NUMBERS_UNSIGNED)) and "[" not in kind for kind in types]
    typer.secho(margin + _line(names, widths, right), bold=True)
    for row in texts:
        typer.echo(margin + _line(row, widths, right))
    if left_out := names[len(widths) :]:
        typer.echo(f"no room for {', '.join(left_out)}: --json and --csv have them", err=True)


def fit(natural: Sequence[int], room: int | None) -> list[int]:
    """A width for each column from the left, as many as there is room for."""
    widths = list(natural)
    if room is None:
        return widths
    while len(widths) > 1 and sum(min(each, _NARROW) + _GAP for each in widths) - _GAP > room:
        widths.pop()
    surplus = sum(widths) + _GAP * (len(widths) - 1) - room
    while surplus > 0 and widths:
        widest = max(widths)
        at = widths.index(widest)
        others = [each for each in widths if each != widest]
        floor = max(max(others, default=_NARROW), _NARROW)
        cut = min(surplus, max(widest - floor, 1))
        widths[at] -= cut
        surplus -= cut
    return widths


def _line(texts: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = [
        _cut(text, width).rjust(width) if to_right else _cut(text, width).ljust(width)
        for text, width, to_right in zip(texts, widths, right, strict=False)
    ]
    return (" " * _GAP).join(cells).rstrip()


def _cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    # People recognize a hash by its two ends.
    if text.startswith("0x") and width > _NARROW - 1:
        tail = (width - 3) // 2
        return f"{text[: width - tail - 1]}…{text[-tail:]}"
    return text[: max(width - 1, 0)] + "…"


def _text(value: Any) -> str:
    match value:
        case None:
            return "NULL"
        case bool():
            return "true" if value else "false"
        case list() | dict():
            return cell(json.dumps(value, ensure_ascii=False))
        case _:
            return cell(value)
