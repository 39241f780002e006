"""The columns that parameters get, and their names.

A table of one event has its parameters in their order. A table of several has the columns of all of them: one that
has the same name and the same form in two events is one column, and events without it have nulls there. A name that
a log's own columns or another form has taken gets ``_param`` behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from tracelake.domain.event_abi.model import Bytes, Event, Param, Word, WordKind

EVENT = "event"


class Form(StrEnum):
    """How a parameter's values are stored."""

    BOOL = "bool"
    INTEGER = "integer"
    WIDE = "wide"
    """An integer that 64 signed bits can't hold: exact as bytes and text, near as a float."""
    BINARY = "binary"
    TEXT = "text"
    JSON = "json"


_SIMPLE = {
    Form.BOOL: (pa.bool_(), "boolean"),
    Form.INTEGER: (pa.int64(), "bigint"),
    Form.BINARY: (pa.binary(), "bytea"),
    Form.TEXT: (pa.string(), "text"),
    Form.JSON: (pa.string(), "jsonb"),
}


def form_of(param: Param) -> Form:
    if param.hashed:
        return Form.BINARY
    match param.type:
        case Word(WordKind.BOOL):
            return Form.BOOL
        case Word(WordKind.UINT, bits):
            return Form.INTEGER if bits < 64 else Form.WIDE
        case Word(WordKind.INT, bits):
            return Form.INTEGER if bits <= 64 else Form.WIDE
        case Word(WordKind.FIXED | WordKind.UFIXED):
            return Form.TEXT
        case Word():
            return Form.BINARY
        case Bytes(text):
            return Form.TEXT if text else Form.BINARY
        case _:
            return Form.JSON


@dataclass(frozen=True, slots=True)
class Column:
    """A parameter's column, or its columns: ``hot`` for Postgres, which keeps a wide integer in one."""

    name: str
    form: Form
    hot: bool

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        if self.form is not Form.WIDE:
            return (pa.field(self.name, _SIMPLE[self.form][0]),)
        if self.hot:
            return (pa.field(self.name, pa.string()),)
        return (
            pa.field(f"{self.name}_binary", pa.binary()),
            pa.field(f"{self.name}_string", pa.string()),
            pa.field(f"{self.name}_f64", pa.float64()),
        )

    @property
    def postgres_type(self) -> str:
        return "numeric(78,0)" if self.form is Form.WIDE else _SIMPLE[self.form][1]


@dataclass(frozen=True, slots=True)
class Layout:
    """``columns`` of the table, and for each event which of them its parameters are."""

    columns: tuple[Column, ...]
    of_events: tuple[tuple[int, ...], ...]


def lay_out(events: Sequence[Event], taken: Sequence[str], *, hot: bool) -> Layout:
    """``taken`` are the names that the table has already, whatever their case."""
    columns: list[Column] = []
    made_for: dict[tuple[str, Form], list[int]] = {}
    used = {name.lower() for name in (*taken, EVENT)}
    of_events: list[tuple[int, ...]] = []
    for event in events:
        own: list[int] = []
        for wanted, form in _wanted(event):
            candidates = made_for.setdefault((wanted.lower(), form), [])
            index = next((candidate for candidate in candidates if candidate not in own), None)
            if index is None:
                index = len(columns)
                columns.append(_new(wanted, form, used, hot=hot))
                candidates.append(index)
            own.append(index)
        of_events.append(tuple(own))
    return Layout(tuple(columns), tuple(of_events))


def _wanted(event: Event) -> Iterator[tuple[str, Form]]:
    for index, param in enumerate(event.params):
        name = param.name or f"arg{index}"
        yield (f"{name}_hash" if param.hashed else name), form_of(param)


def _new(wanted: str, form: Form, used: set[str], *, hot: bool) -> Column:
    name, number = wanted, 1
    # The columns that either storage gives it: a table has the same parameters' names hot and cold.
    while used & (names := _all_names(name, form)):
        name = f"{wanted}_param" if number == 1 else f"{wanted}_param{number}"
        number += 1
    used |= names
    return Column(name, form, hot)


def _all_names(name: str, form: Form) -> set[str]:
    return {
        field.name.lower()
        for column in (Column(name, form, True), Column(name, form, False))
        for field in column.fields
    }
