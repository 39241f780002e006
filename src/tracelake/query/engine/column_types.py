"""The types of a result's columns: how their values pass through Arrow unchanged, and how much they weigh.

Arrow is narrower than the engine, and the engine converts silently: an UHUGEINT above 2^127 becomes negative, a
long INTERVAL wraps around, a TIME WITH TIME ZONE loses its zone. So the engine first casts a column of such a type
to one that holds every value (text), or that refuses the values that don't fit. Parts of nested types are cast
within them. A type that isn't known here is refused.

    in               JSON                  Arrow                             Parquet
    HUGEINT          text, then a number   DECIMAL(38,0); text if too wide   as in Arrow
    BIGNUM, UHUGEINT text, then a number   text                              as in Arrow
    TIME …           text                  as it is; 24:00:00 is an error    as in Arrow
    TIMESTAMP_S …    as it is              as it is                          TIMESTAMP, or an error
    BIT, INTERVAL, TIME WITH TIME ZONE: text, everywhere

A HUGEINT of 39 digits is found out only when its row is reached. The run then ends with ``HUGEINT_TOO_WIDE``, and
the service runs the query again with every HUGEINT as text.

Arrow's bytes understate a result: a column of nulls has none, twenty million of them in a list have five, and truth
values are bits. In a message, in JSON and in memory each is a value. So ``weight`` counts values, null ones and
nested ones included, and the names of a struct's fields with every struct, since JSON repeats them. The number of
columns and levels is bounded too (``shape_problem``): a column costs something even when it is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types as is_

from tracelake.domain.errors import Invalid

_TEXT = "VARCHAR"
_DIGITS = "DECIMAL(38,0)"
_PLAIN = frozenset(
    (
        *("boolean", "tinyint", "smallint", "integer", "bigint", "hugeint"),
        *("utinyint", "usmallint", "uinteger", "ubigint", "uhugeint", "bignum", "float", "double", "decimal"),
        *(
            "varchar",
            "blob",
            "bit",
            "uuid",
            "enum",
            "date",
            "time",
            "time_ns",
            "time with time zone",
            "interval",
        ),
        *("timestamp", "timestamp_s", "timestamp_ms", "timestamp_ns", "timestamp with time zone", "null"),
    )
)
_NESTED = frozenset({"list", "array", "struct", "tuple", "map", "union"})
_ALWAYS = dict.fromkeys(("bit", "bignum", "interval", "time with time zone", "uhugeint"), _TEXT)
_ARROW = {**_ALWAYS, "hugeint": _DIGITS}
_AS_TEXT = {"hugeint": _TEXT}
#: The reason of a failure that passes when HUGEINT is text.
HUGEINT_TOO_WIDE = "HugeintTooWide"
#: Arrow has the type, but not all of its values.
_CHECKED = frozenset({"time", "time_ns"})
#: Replacements within a nested type that is cast as a whole: these have no name to cast to.
_WITHIN = {"enum": _TEXT, "null": _TEXT}
#: Weight of one value, at least.
VALUE_BYTES = 8
_SMALL = 16 * 1024
MOST_COLUMNS = 2_000
#: Maximum number of columns and fields within them.
MOST_FIELDS = 10_000
#: Maximum depth of nesting; Arrow's own limit in IPC is 64.
MOST_LEVELS = 50


class ResultFormat(StrEnum):
    """The format that a result's rows are for."""

    JSON = "json"
    ARROW = "arrow"
    PARQUET = "parquet"


class ResultColumnType(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``name`` is the engine's, for people; ``kind`` its bare word in lower case; ``inner`` the types within it."""

    name: str
    kind: str
    inner: tuple[ResultColumnType, ...] = ()


_CAST: Mapping[ResultFormat, Mapping[str, str]] = {
    ResultFormat.JSON: {**_ALWAYS, **dict.fromkeys(("hugeint", "time", "time_ns"), _TEXT)},
    ResultFormat.ARROW: _ARROW,
    ResultFormat.PARQUET: {**_ARROW, "timestamp_s": "TIMESTAMP", "timestamp_ms": "TIMESTAMP"},
}


def column_types(query: duckdb.DuckDBPyRelation) -> list[ResultColumnType]:
    # All columns share one budget, so the recursion needs a value that it can change.
    budget = [MOST_FIELDS]
    return [_column_type(kind, 1, budget) for kind in query.types]


def _column_type(kind: Any, level: int, budget: list[int]) -> ResultColumnType:
    word: str = kind.id
    if word in _PLAIN:
        return ResultColumnType(str(kind), word)
    name = str(kind)
    if word not in _NESTED:
        raise Invalid("QueryFailed", f"a result can't have values of the type {name}: cast them")
    children = list(_children(word, kind))
    budget[0] -= len(children)
    if level > MOST_LEVELS or budget[0] < 0:
        raise Invalid(
            "ResultTooWide", "the result's values are nested too deeply: select only the fields that you need"
        )
    return ResultColumnType(name, word, tuple(_column_type(child, level + 1, budget) for child in children))


def _children(word: str, kind: Any) -> Iterator[Any]:
    """Without an array's size and a union's tag."""
    for name, child in kind.children:
        if not (word == "array" and name == "size") and not (word == "union" and name == ""):
            yield child


def carried(
    query: duckdb.DuckDBPyRelation, form: ResultFormat, *, hugeint_as_text: bool = False
) -> duckdb.DuckDBPyRelation:
    """The same rows in types that Arrow holds; the query itself if none needs a cast."""
    replaced = {**_CAST[form], **(_AS_TEXT if hugeint_as_text else {})}
    casts = [_cast(kind, replaced) for kind in query.types]
    if not any(casts):
        return query
    columns = [
        f"{f'CAST(#{place} AS {cast})' if cast else f'#{place}'} AS {quoted(name)}"
        for place, (cast, name) in enumerate(zip(casts, query.columns, strict=True), 1)
    ]
    return query.project(", ".join(columns))


def _cast(kind: Any, replaced: Mapping[str, str]) -> str | None:
    word: str = kind.id
    if word not in _NESTED:
        return replaced.get(word)
    casts = [_cast(child, replaced) for child in _children(word, kind)]
    return _rebuilt(word, kind, replaced) if any(casts) else None


def _rebuilt(word: str, kind: Any, replaced: Mapping[str, str]) -> str:
    inner = [_within(child, replaced) for child in _children(word, kind)]
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


def _within(kind: Any, replaced: Mapping[str, str]) -> str:
    word: str = kind.id
    if word in _NESTED:
        return _rebuilt(word, kind, replaced)
    return replaced.get(word) or _WITHIN.get(word) or str(kind)


def must_be_checked(types: Sequence[ResultColumnType], form: ResultFormat) -> bool:
    """Whether the rows may have values that are invalid in Arrow."""
    return form is not ResultFormat.JSON and holds(types, _CHECKED)


def holds(types: Sequence[ResultColumnType], kinds: frozenset[str]) -> bool:
    return any(each.kind in kinds or holds(each.inner, kinds) for each in types)


def unfit(error: Exception) -> Invalid | None:
    """The error of one of our casts, reworded; None for any other error."""
    text = str(error)
    if "Conversion Error: " not in text or "CAST(#" not in text:
        return None
    why = text.partition("Conversion Error: ")[2].partition("\n")[0]
    return Invalid(HUGEINT_TOO_WIDE, why) if _DIGITS in why else no_such_value(why)


def no_such_value(why: str) -> Invalid:
    return Invalid(
        "QueryFailed", f"{why}: Arrow and Parquet hold no such value; cast it to VARCHAR, or ask for JSON"
    )


def weight(batch: pa.RecordBatch) -> int:
    """In bytes, never less than the batch has in Arrow. A slice's own size is computed only for large buffers: that
    takes as long as sending a small query's rows."""
    stored: int = batch.get_total_buffer_size()
    if stored > _SMALL:
        stored = batch.nbytes
    return max(stored, VALUE_BYTES * sum(cells(batch.column(at)) for at in range(batch.num_columns)))


def cells(array: pa.Array) -> int:
    """The number of values, nested ones included."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return cells(array.storage)
    if is_.is_dictionary(kind):
        # Rows share a dictionary's values in Arrow, but JSON repeats the value in each row.
        return len(array) * _longest(array.dictionary)
    if kind.num_fields == 0:
        return len(array)
    if is_.is_list(kind) or is_.is_large_list(kind) or is_.is_map(kind):
        return len(array) + _items(array)
    if is_.is_fixed_size_list(kind):
        size = kind.list_size
        # ``values`` ignores that the array may be a slice of a larger one.
        return len(array) + cells(array.values.slice(array.offset * size, len(array) * size))
    children = sum(cells(array.field(at)) for at in range(kind.num_fields))
    return len(array) * (1 + _names(kind)) + children


def _items(array: pa.ListArray | pa.LargeListArray | pa.MapArray) -> int:
    if len(array) == 0:
        return 0
    # A slice keeps the values of the whole array, so its own are found by its offsets.
    first, last = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
    if not is_.is_map(array.type):
        return cells(array.values.slice(first, last - first))
    return sum(cells(each.slice(first, last - first)) for each in (array.keys, array.items))


def _names(kind: pa.DataType) -> int:
    return sum(len(kind.field(at).name) for at in range(kind.num_fields)) // VALUE_BYTES


def _longest(dictionary: pa.Array) -> int:
    """The largest number of cells that one dictionary value may stand for."""
    if len(dictionary) == 0:
        return 1
    if not (is_.is_string(dictionary.type) or is_.is_large_string(dictionary.type)):
        return cells(dictionary)
    return 1 + (pc.max(pc.binary_length(dictionary)).as_py() or 0) // VALUE_BYTES


def shape_problem(schema: pa.Schema) -> str | None:
    """Why a result of these columns is refused; None if it isn't."""
    if len(schema) > MOST_COLUMNS:
        return f"the result has {len(schema)} columns; the maximum is {MOST_COLUMNS}"
    # Not recursive: the depth is chosen by the query and may exceed Python's stack.
    pending = [(kind, 1) for kind in schema.types]
    seen = 0
    while pending:
        kind, level = pending.pop()
        seen += 1
        if level > MOST_LEVELS:
            return f"the result's values are nested more than {MOST_LEVELS} levels deep"
        if seen > MOST_FIELDS:
            return f"the result has more than {MOST_FIELDS} columns and fields"
        pending += [(kind.field(at).type, level + 1) for at in range(kind.num_fields)]
    return None


def stands_alone(schema: pa.Schema) -> bool:
    """Whether each value has its own bytes. In views and runs a few bytes can stand for any number of values."""
    pending = list(schema.types)
    while pending:
        kind = pending.pop()
        if isinstance(kind, pa.BaseExtensionType):
            pending.append(kind.storage_type)
        elif is_.is_dictionary(kind):
            pending.append(kind.value_type)
        elif _shares(kind):
            return False
        else:
            pending += [kind.field(at).type for at in range(kind.num_fields)]
    return True


def _shares(kind: pa.DataType) -> bool:
    return bool(
        is_.is_string_view(kind)
        or is_.is_binary_view(kind)
        or is_.is_list_view(kind)
        or is_.is_large_list_view(kind)
        or is_.is_run_end_encoded(kind)
    )


def quoted(name: str) -> str:
    """A name as an identifier in a statement for the engine."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as a literal in a statement for the engine."""
    return "'" + text.replace("'", "''") + "'"
