"""The types of a result's columns, and how their values get through Arrow as they are.

Arrow is narrower than the engine, and the engine's way there is silent: an UHUGEINT above 2^127 becomes negative, a
long INTERVAL wraps around, a TIME WITH TIME ZONE loses its zone. So a column of such a type is cast by the engine
before it is turned into Arrow, to a type that holds every value (text), or that refuses those that don't fit. Parts
of nested types are cast within them. A type that isn't known here is refused.

    in            JSON                  Arrow                           Parquet
    HUGEINT …     text, then a number   DECIMAL(38,0), or an error      as in Arrow
    TIME …        text                  as it is; 24:00:00 is an error  as in Arrow
    TIMESTAMP_S … as it is              as it is                        TIMESTAMP, or an error
    BIT, BIGNUM, INTERVAL, TIME WITH TIME ZONE: text, everywhere
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import duckdb
import msgspec

from tracelake.domain.errors import Invalid
from tracelake.query.engine.identifiers import quoted
from tracelake.query.engine.weight import MOST_FIELDS, MOST_LEVELS

_TEXT = "VARCHAR"
_DIGITS = "DECIMAL(38,0)"


class ResultForm(StrEnum):
    """What a result's rows are for."""

    JSON = "json"
    ARROW = "arrow"
    PARQUET = "parquet"


class ColumnType(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``name`` is the engine's, for people; ``kind`` its bare word in lower case; ``inner`` the types within it."""

    name: str
    kind: str
    inner: tuple[ColumnType, ...] = ()


_PLAIN = frozenset(
    (
        *(
            "boolean",
            "tinyint",
            "smallint",
            "integer",
            "bigint",
            "hugeint",
            "utinyint",
            "usmallint",
            "uinteger",
        ),
        *(
            "ubigint",
            "uhugeint",
            "bignum",
            "float",
            "double",
            "decimal",
            "varchar",
            "blob",
            "bit",
            "uuid",
            "enum",
        ),
        *(
            "date",
            "time",
            "time_ns",
            "time with time zone",
            "interval",
            "timestamp",
            "timestamp_s",
            "timestamp_ms",
        ),
        *("timestamp_ns", "timestamp with time zone", "null"),
    )
)
_NESTED = frozenset({"list", "array", "struct", "tuple", "map", "union"})

_ALWAYS = dict.fromkeys(("bit", "bignum", "interval", "time with time zone"), _TEXT)
_ARROW = {**_ALWAYS, "hugeint": _DIGITS, "uhugeint": _DIGITS}
_CAST: Mapping[ResultForm, Mapping[str, str]] = {
    ResultForm.JSON: {**_ALWAYS, **dict.fromkeys(("hugeint", "uhugeint", "time", "time_ns"), _TEXT)},
    ResultForm.ARROW: _ARROW,
    ResultForm.PARQUET: {**_ARROW, "timestamp_s": "TIMESTAMP", "timestamp_ms": "TIMESTAMP"},
}
#: Arrow has a type for it, and not for all of its values.
_CHECKED = frozenset({"time", "time_ns"})
#: Within a value that is cast as a whole.
_WITHIN = {"enum": _TEXT, "null": _TEXT}


def column_types(query: duckdb.DuckDBPyRelation) -> list[ColumnType]:
    budget = [MOST_FIELDS]
    return [_column_type(kind, 1, budget) for kind in query.types]


def _column_type(kind: Any, level: int, budget: list[int]) -> ColumnType:
    word: str = kind.id
    if word in _PLAIN:
        return ColumnType(str(kind), word)
    name = str(kind)
    if word not in _NESTED:
        raise Invalid("QueryFailed", f"a result can't have values of the type {name}: cast them")
    children = list(_children(word, kind))
    budget[0] -= len(children)
    if level > MOST_LEVELS or budget[0] < 0:
        raise Invalid(
            "ResultTooWide", "the result's values are nested too deeply: name those that are needed"
        )
    return ColumnType(name, word, tuple(_column_type(child, level + 1, budget) for child in children))


def _children(word: str, kind: Any) -> Iterator[Any]:
    """Without an array's size and a union's tag."""
    for name, child in kind.children:
        if not (word == "array" and name == "size") and not (word == "union" and name == ""):
            yield child


def carried(query: duckdb.DuckDBPyRelation, form: ResultForm) -> duckdb.DuckDBPyRelation:
    """The same rows in types that Arrow holds; the query itself where all are."""
    casts = [_cast(kind, form) for kind in query.types]
    if not any(casts):
        return query
    columns = [
        f"{f'CAST(#{place} AS {cast})' if cast else f'#{place}'} AS {quoted(name)}"
        for place, (cast, name) in enumerate(zip(casts, query.columns, strict=True), 1)
    ]
    return query.project(", ".join(columns))


def _cast(kind: Any, form: ResultForm) -> str | None:
    word: str = kind.id
    if word not in _NESTED:
        return _CAST[form].get(word)
    casts = [_cast(child, form) for child in _children(word, kind)]
    return _rebuilt(word, kind, form) if any(casts) else None


def _rebuilt(word: str, kind: Any, form: ResultForm) -> str:
    inner = [_within(child, form) for child in _children(word, kind)]
    match word:
        case "list":
            return f"{inner[0]}[]"
        case "array":
            return f"{inner[0]}[{dict(kind.children)['size']}]"
        case "map":
            return f"MAP({inner[0]}, {inner[1]})"
        case "tuple":
            return f"TUPLE({', '.join(inner)})"
        case _:
            names = [name for name, _ in kind.children if word == "struct" or name != ""]
            fields = ", ".join(f"{quoted(name)} {cast}" for name, cast in zip(names, inner, strict=True))
            return f"{word.upper()}({fields})"


def _within(kind: Any, form: ResultForm) -> str:
    word: str = kind.id
    if word in _NESTED:
        return _rebuilt(word, kind, form)
    return _CAST[form].get(word) or _WITHIN.get(word) or str(kind)


def must_be_checked(types: Sequence[ColumnType], form: ResultForm) -> bool:
    """Whether a value may be there that is none in Arrow."""
    return form is not ResultForm.JSON and holds(types, _CHECKED)


def holds(types: Sequence[ColumnType], kinds: frozenset[str]) -> bool:
    return any(each.kind in kinds or holds(each.inner, kinds) for each in types)


def unfit(error: Exception) -> Invalid | None:
    """What one of our casts complains of, in other words; None if the complaint is about something else."""
    text = str(error)
    if "Conversion Error: " not in text or "CAST(#" not in text:
        return None
    return no_such_value(text.partition("Conversion Error: ")[2].partition("\n")[0])


def no_such_value(why: str) -> Invalid:
    return Invalid(
        "QueryFailed", f"{why}: Arrow and Parquet hold no such value; cast it to VARCHAR, or ask in JSON"
    )
