"""Columns of an event's parameters, and their names.

A table of one event has its parameters in their order. A table of several events has the columns of all of
them: a parameter with the same name and form in two events is one column, null for events without it.

An ABI may name a parameter as it likes. A name gets the suffix ``_param`` if a column of the log or another form
uses it already, or if an engine that stores or reads the table has it for itself: Postgres for its system columns,
Arrow, Spark and this platform for names that begin with two underscores. A name that is longer than Postgres allows
is cut. So a table can be written and read everywhere, and a column has one name in files and in Postgres.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from tracelake.domain.event_abi import AbiEvent, Bytes, Param, Word, WordKind
from tracelake.evm.columns import UINT256_ARROW, UINT256_PARTS

EVENT = "event"
MAX_NAME = 63
"""Characters of a column's name: Postgres cuts longer ones by itself, and two may become one then."""
_OF_POSTGRES = frozenset({"tableoid", "xmin", "cmin", "xmax", "cmax", "ctid"})
_OF_ENGINES = "__"
_HASH = "_hash"
_LONGEST_PART = len("_binary")


class ParamForm(StrEnum):
    """How a parameter's values are stored."""

    BOOL = "bool"
    INTEGER = "integer"
    WIDE = "wide"
    """An integer beyond 64 signed bits: exact as bytes, text and digits, approximate as a float."""
    BINARY = "binary"
    TEXT = "text"
    JSON = "json"


_SIMPLE = {
    ParamForm.BOOL: (pa.bool_(), "boolean"),
    ParamForm.INTEGER: (pa.int64(), "bigint"),
    ParamForm.BINARY: (pa.binary(), "bytea"),
    ParamForm.TEXT: (pa.string(), "text"),
    ParamForm.JSON: (pa.string(), "jsonb"),
}


def form_of(param: Param) -> ParamForm:
    if param.hashed:
        return ParamForm.BINARY
    match param.type:
        case Word(WordKind.BOOL):
            return ParamForm.BOOL
        case Word(WordKind.UINT, bits):
            # An unsigned number of 64 bits doesn't fit a signed one.
            return ParamForm.INTEGER if bits < 64 else ParamForm.WIDE
        case Word(WordKind.INT, bits):
            return ParamForm.INTEGER if bits <= 64 else ParamForm.WIDE
        case Word(WordKind.FIXED | WordKind.UFIXED):
            return ParamForm.TEXT
        case Word():
            return ParamForm.BINARY
        case Bytes(text):
            return ParamForm.TEXT if text else ParamForm.BINARY
        case _:
            return ParamForm.JSON


@dataclass(frozen=True, slots=True)
class ParamColumn:
    """One column of a parameter, or several for a wide integer in files. ``hot``: for Postgres, where it is one."""

    name: str
    form: ParamForm
    hot: bool

    @property
    def fields(self) -> tuple[pa.Field, ...]:
        if self.form is not ParamForm.WIDE:
            return (pa.field(self.name, _SIMPLE[self.form][0]),)
        if self.hot:
            return (pa.field(self.name, pa.string()),)
        parts = zip(UINT256_PARTS, UINT256_ARROW, strict=True)
        return tuple(pa.field(self.name + part, kind) for part, kind in parts)

    @property
    def postgres_type(self) -> str:
        return "numeric(78,0)" if self.form is ParamForm.WIDE else _SIMPLE[self.form][1]


@dataclass(frozen=True, slots=True)
class ParamLayout:
    """``columns`` of the table; ``of_events`` has the indexes of its parameters' columns for each event."""

    columns: tuple[ParamColumn, ...]
    of_events: tuple[tuple[int, ...], ...]


def lay_out(events: Sequence[AbiEvent], taken: Sequence[str], *, hot: bool) -> ParamLayout:
    """Assign columns to parameters. ``taken`` are the table's other column names; case doesn't matter."""
    columns: list[ParamColumn] = []
    made_for: dict[tuple[str, str, ParamForm], list[int]] = {}
    used = {name.lower() for name in (*taken, EVENT)}
    of_events: list[tuple[int, ...]] = []
    for event in events:
        own: list[int] = []
        for wanted in _wanted(event):
            candidates = made_for.setdefault((wanted.name.lower(), wanted.ending, wanted.form), [])
            # An event may have two parameters of one name: they must not share a column.
            index = next((candidate for candidate in candidates if candidate not in own), None)
            if index is None:
                index = len(columns)
                columns.append(_new(wanted, used, hot=hot))
                candidates.append(index)
            own.append(index)
        of_events.append(tuple(own))
    return ParamLayout(tuple(columns), tuple(of_events))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The name that a parameter asks for, whole. ``ending`` stays when it is cut."""

    name: str
    ending: str
    form: ParamForm

    def named(self, suffix: str) -> str:
        # The columns of a wide integer have endings of their own.
        room = (
            MAX_NAME - len(self.ending) - len(suffix) - (_LONGEST_PART if self.form is ParamForm.WIDE else 0)
        )
        return f"{self.name[:room]}{self.ending}{suffix}"


def _wanted(event: AbiEvent) -> Iterator[_Wanted]:
    for index, param in enumerate(event.params):
        yield _Wanted(param.name or f"arg{index}", _HASH if param.hashed else "", form_of(param))


def _new(wanted: _Wanted, used: set[str], *, hot: bool) -> ParamColumn:
    name, number = wanted.named(""), 1
    # Names are checked for both storages, so that a parameter has the same name in hot and cold tables.
    while used & (names := _all_names(name, wanted.form)) or (number == 1 and _is_of_engines(name)):
        name = wanted.named("_param" if number == 1 else f"_param{number}")
        number += 1
    used |= names
    return ParamColumn(name, wanted.form, hot)


def _is_of_engines(name: str) -> bool:
    return name.lower() in _OF_POSTGRES or name.startswith(_OF_ENGINES)


def _all_names(name: str, form: ParamForm) -> set[str]:
    return {
        field.name.lower()
        for column in (ParamColumn(name, form, True), ParamColumn(name, form, False))
        for field in column.fields
    }
