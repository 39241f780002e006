"""Rows of a query on a screen: numbers to the right, hashes shortened in their middle, nothing wrapped.

On a terminal the widest columns give way first; columns that find no room at all are left out and named below.
Elsewhere everything is printed in full.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import typer

from tracelake.cli.show import cell

_GAP = 2
_NARROW = 10
"""A column isn't cut below so many characters."""
_NUMBERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "FLOAT", "DOUBLE", "DECIMAL")
_NUMBERS_UNSIGNED = tuple(f"U{name}" for name in _NUMBERS[:5])


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
