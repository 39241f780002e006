"""A use of a relation, fitted to the columns that the relation really has, and the blocks that it can need.

The gate sees names and literals; the meaning of a comparison depends on the column's type. ``fit`` brings the two
together: names are matched as the engine does (ignoring case), and a comparison is kept only where ``domain.where``
and the engine decide it alike for that type. All others are dropped, which reads more rows and never fewer: a term
of an AND alone, an OR as a whole.

``wanted_blocks`` bounds the blocks that a query can need, so that files of other blocks stay closed. It is called
before anything is known of the relation, and assumes that a block is a whole number. If the relation turns out to
have no such column (``has_blocks``), the caller must start again without the bounds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, date, datetime
from functools import reduce
from typing import NamedTuple, assert_never

import pyarrow as pa

from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.where import (
    And,
    Compare,
    CompareColumns,
    InList,
    IsNull,
    Op,
    Or,
    Predicate,
    WhereValue,
    all_of,
    any_of,
    in_list,
)
from tracelake.query.catalog import WantedBlocks
from tracelake.query.engine.messages import RelationUse
from tracelake.query.engine.pushdown import compared_bytes
from tracelake.tables.arrow import kind_of
from tracelake.tables.scope import BLOCK_COLUMN
from tracelake.tables.wide_integers import WIDE_INTEGER, text_columns, visible_columns

_EXACT_IN_A_DOUBLE = 2**53
_DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_NAIVE = re.compile(_DAY + r"(?:[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?)?\Z")
_ZONED = re.compile(
    _DAY + r"[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?(?:Z|[+-][0-9]{2}(?::[0-9]{2})?)\Z"
)
_WHOLE_NUMBER = re.compile(r"-?[0-9]{1,78}\Z")
_WHOLE_DAY = re.compile(_DAY + r"\Z")
_BLOCKS_ALONE = pa.schema([(BLOCK_COLUMN, pa.int64())])
_ALL = (-math.inf, math.inf)
_NONE = (math.inf, -math.inf)
_LOW, _HIGH = -(2**63), 2**63 - 1
#: Both ends inclusive, whole numbers or infinite; the first is above the last if there is nothing between.
Bounds = tuple[float, float]


class Fitted(NamedTuple):
    """``columns``: the stored ones to read, in the schema's order; at least one, so that rows can be counted.
    ``predicate``: a condition that every needed row fulfils, for visible columns and their types; None is all
    rows."""

    columns: tuple[str, ...]
    predicate: Predicate | None


def fit(use: RelationUse, schema: pa.Schema) -> Fitted:
    """``schema`` has the stored columns in the types that the SQL sees, which decide the meaning of a comparison.
    An integer that the SQL sees as one column is read from the stored column with its text."""
    visible = visible_columns(schema)
    folded: dict[str, list[str]] = {}
    for name in visible.names:
        folded.setdefault(name.lower(), []).append(name)
    wanted = None if use.columns is None else frozenset(use.columns)
    texts = text_columns(schema)
    needed = {texts.get(name, name) for name in visible.names if wanted is None or name.lower() in wanted}
    columns = tuple(name for name in schema.names if name in needed)
    # Of columns that differ only in case, it isn't clear which one the SQL names.
    names = {low: found[0] for low, found in folded.items() if len(found) == 1}
    predicate = None if use.predicate is None else _fitted(use.predicate, names, visible)
    return Fitted(columns or tuple(schema.names[:1]), predicate)


def _fitted(tree: Predicate, names: Mapping[str, str], schema: pa.Schema) -> Predicate | None:
    match tree:
        case And(terms):
            kept = [term for term in (_fitted(term, names, schema) for term in terms) if term is not None]
            return all_of(kept) if kept else None
        case Or(terms):
            known = [_fitted(term, names, schema) for term in terms]
            whole = [term for term in known if term is not None]
            return any_of(whole) if len(whole) == len(known) else None
        case CompareColumns():
            return None
        case Compare() | InList() | IsNull():
            name = names.get(tree.column)
            return None if name is None else _leaf(tree, name, schema.field(name).type)
        case _:
            assert_never(tree)


def _leaf(tree: Compare | InList | IsNull, name: str, type_: pa.DataType) -> Predicate | None:
    match tree:
        case IsNull(_, negated):
            return IsNull(name, negated)
        case Compare(_, op, value):
            fitted = _value(value, type_)
            return None if fitted is None else Compare(name, op, fitted)
        case InList(_, values, negated):
            # The engine may compare a list of texts as text, and not as the numbers that they spell.
            if type_ == WIDE_INTEGER and any(isinstance(value, str) for value in values):
                return None
            listed = [_value(value, type_) for value in values]
            whole = [value for value in listed if value is not None]
            return in_list(name, whole, negated=negated) if len(whole) == len(listed) else None
        case _:
            assert_never(tree)


def _value(value: WhereValue, type_: pa.DataType) -> WhereValue | None:
    """The value as both the engine and ``domain.where`` compare it with a column of this type; None if they
    differ."""
    if type_ == WIDE_INTEGER:
        return _whole_number(value)
    match kind_of(type_), value:
        case "bool", bool():
            return value
        # Python's ``bool`` is an ``int``, and must not reach the cases of numbers.
        case _, bool():
            return None
        case "integer", int():
            return value if _LOW <= value <= _HIGH or type_ != pa.uint64() else None
        case "integer", float():
            return value if abs(value) < _EXACT_IN_A_DOUBLE else None
        case "float", int() | float():
            return value if type_ == pa.float64() and abs(value) <= _EXACT_IN_A_DOUBLE else None
        case "decimal", int():
            return value if _LOW <= value <= _HIGH else None
        case "text", str():
            return None if value.startswith("\\") else value
        case "bytes", str():
            return (
                value
                if value.startswith("\\x")
                else None
                if value.startswith("\\")
                else compared_bytes(value)
            )
        case "instant", str():
            return _instant(value, type_)
        case "date", str():
            text = value.removeprefix("\\date ")
            return text if _WHOLE_DAY.match(text) and _is_day(text) else None
        case _:
            return None


def _whole_number(value: WhereValue) -> int | None:
    """The engine casts a text beside such a column to a number; a fraction makes it compare as doubles."""
    match value:
        case bool() | float():
            return None
        case int():
            return value
        case str():
            return int(value) if _WHOLE_NUMBER.match(value) else None
        case _:
            assert_never(value)


def _instant(value: str, type_: pa.DataType) -> str | None:
    """A time without a zone is UTC beside a column with one: the slots' sessions are in UTC (``lockdown``)."""
    kind, _, text = value.partition(" ") if value.startswith("\\") else ("", "", value)
    match kind, bool(type_.tz):
        case ("" | "\\timestamp", False):
            known = _NAIVE.match(text)
        case ("" | "\\timestamptz", True):
            known = _NAIVE.match(text) or _ZONED.match(text)
        case ("\\timestamp", True):
            known = _NAIVE.match(text)
        case ("\\date", _):
            known = _WHOLE_DAY.match(text)
        case _:
            known = None
    if known is None or type_.unit not in ("us", "ns"):
        return None
    try:
        at = datetime.fromisoformat(text)
        if type_.tz:
            # Converted to UTC, because the data database knows fewer offsets than the engine does.
            at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
    except (ValueError, OverflowError):
        return None
    return at.isoformat()


def _is_day(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def wanted_blocks(use: RelationUse) -> WantedBlocks:
    predicate = fit(use, _BLOCKS_ALONE).predicate
    low, high = _ALL if predicate is None else _bounds(predicate)
    first = 0 if low <= 0 else MAX_BLOCK if low >= MAX_BLOCK else int(low)
    last = -1 if high < 0 else MAX_BLOCK if high >= MAX_BLOCK else int(high)
    return WantedBlocks(first, last)


def has_blocks(schema: pa.Schema) -> bool:
    """Whether the relation has the column of block numbers that ``wanted_blocks`` assumes."""
    place = schema.get_field_index(BLOCK_COLUMN)
    return place >= 0 and bool(pa.types.is_integer(schema.field(place).type))


def _bounds(tree: Predicate) -> Bounds:
    match tree:
        case Compare(_, op, value):
            return _compared(op, value)
        case InList(_, values, negated):
            return _ALL if negated else reduce(_hull, [_compared(Op.EQ, value) for value in values], _NONE)
        case And(terms):
            return reduce(_common, [_bounds(term) for term in terms], _ALL)
        case Or(terms):
            return reduce(_hull, [_bounds(term) for term in terms], _NONE)
        case IsNull() | CompareColumns():
            return _ALL
        case _:
            assert_never(tree)


def _compared(op: Op, value: WhereValue) -> Bounds:
    if isinstance(value, bool | str):
        return _ALL
    match op:
        case Op.EQ:
            # No block equals a fraction: the bounds cross, which is an empty range.
            return math.ceil(value), math.floor(value)
        case Op.LT:
            return -math.inf, math.ceil(value) - 1
        case Op.LE:
            return -math.inf, math.floor(value)
        case Op.GT:
            return math.floor(value) + 1, math.inf
        case Op.GE:
            return math.ceil(value), math.inf
        case Op.NE:
            return _ALL
        case _:
            assert_never(op)


def _common(one: Bounds, other: Bounds) -> Bounds:
    return max(one[0], other[0]), min(one[1], other[1])


def _hull(one: Bounds, other: Bounds) -> Bounds:
    if one[0] > one[1]:
        return other
    return one if other[0] > other[1] else (min(one[0], other[0]), max(one[1], other[1]))
