"""A use of a relation, fitted to the columns that the relation really has.

The gate sees names and literals; what a comparison means depends on the column's type. Here the two come
together: names are matched as the engine does (without regard to case), and a comparison is kept only where
``domain.sql_compare`` and the engine decide it alike for that type. Everything else is dropped, which reads more
rows and never fewer: a term of an AND alone, an OR as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import NamedTuple, assert_never

import pyarrow as pa

from tracelake.domain.where import (
    And,
    Compare,
    CompareColumns,
    InList,
    IsNull,
    Or,
    Predicate,
    Scalar,
    all_of,
    any_of,
    in_list,
)
from tracelake.operators.arrow_input import kind_of
from tracelake.query.engine.parsed_query import RelationUse
from tracelake.query.engine.sql_literal import blob

_EXACT_IN_A_DOUBLE = 2**53
_LOW, _HIGH = -(2**63), 2**63 - 1
_DAY = r"[0-9]{4}-[0-9]{2}-[0-9]{2}"
_NAIVE = re.compile(_DAY + r"(?:[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?)?\Z")
_ZONED = re.compile(
    _DAY + r"[ T][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?(?:Z|[+-][0-9]{2}(?::[0-9]{2})?)\Z"
)
_WHOLE_DAY = re.compile(_DAY + r"\Z")


class Fitted(NamedTuple):
    """``columns``: what has to be read, in the schema's order, at least one (rows are counted by it).
    ``predicate``: what every row that matters fulfils, for these columns and types; None is all rows."""

    columns: tuple[str, ...]
    predicate: Predicate | None


def fit(use: RelationUse, schema: pa.Schema) -> Fitted:
    """The schema must be the one that the SQL sees: its types decide what a comparison means."""
    folded: dict[str, list[str]] = {}
    for name in schema.names:
        folded.setdefault(name.lower(), []).append(name)
    wanted = None if use.columns is None else frozenset(use.columns)
    columns = tuple(name for name in schema.names if wanted is None or name.lower() in wanted)
    names = {low: found[0] for low, found in folded.items() if len(found) == 1}
    predicate = None if use.predicate is None else _fitted(use.predicate, names, schema)
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
            listed = [_value(value, type_) for value in values]
            whole = [value for value in listed if value is not None]
            return in_list(name, whole, negated=negated) if len(whole) == len(listed) else None
        case _:
            assert_never(tree)


def _value(value: Scalar, type_: pa.DataType) -> Scalar | None:
    """The value as it compares with a column of this type, in both readings."""
    match kind_of(type_), value:
        case "bool", bool():
            return value
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
            return value if value.startswith("\\x") else None if value.startswith("\\") else blob(value)
        case "instant", str():
            return _instant(value, type_)
        case "date", str():
            text = value.removeprefix("\\date ")
            return text if _WHOLE_DAY.match(text) and _is_day(text) else None
        case _:
            return None


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
            # In UTC: the data database knows fewer offsets than the engine does.
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
