"""``where`` for Postgres: as much of a predicate as the database can decide, so that the rest isn't even sent.

What decides in the end is the filter that files are read with (``arrow_input.where_expression``); a condition made
here may keep more rows than that one, never fewer. So a column that is stored in another shape than it is read
in, or a comparison that SQL would see otherwise, is simply left to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, assert_never

import pyarrow as pa
from psycopg import sql

from tracelake.domain.where import And, Compare, CompareColumns, InList, IsNull, Op, Or, Predicate, Scalar
from tracelake.operators.arrow_input import kind_of, stored_as
from tracelake.operators.where_literal import Kind, Verdict, align

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AGES = 146_097 * 86_400 * 10**6
"""The microseconds of 400 years, after which the calendar repeats itself."""
_ORDERED = (Op.LT, Op.LE, Op.GT, Op.GE)
_TYPES: Mapping[Kind, str] = {
    "bool": "boolean",
    "integer": "bigint",
    "float": "double precision",
    "decimal": "numeric",
    "text": "text",
    "bytes": "bytea",
    "date": "date",
}


def condition(tree: Predicate, columns: Mapping[str, pa.DataType]) -> sql.Composable | None:
    """What every row that the predicate keeps fulfils; None when nothing can be said. ``columns`` are those that
    are stored as they are read."""
    match tree:
        case Compare(column, op, value):
            return _compare(columns, column, op, value)
        case CompareColumns(column, op, other):
            return _compare_columns(columns, column, op, other)
        case InList(column, values, negated):
            terms = [_compare(columns, column, Op.NE if negated else Op.EQ, value) for value in values]
            return _all(terms) if negated else _any(terms)
        case IsNull(column, negated):
            if column not in columns:
                return None
            test = sql.SQL("{} IS NOT NULL" if negated else "{} IS NULL")
            return test.format(sql.Identifier(column))
        case And(terms):
            return _all([condition(term, columns) for term in terms])
        case Or(terms):
            return _any([condition(term, columns) for term in terms])
        case _:
            assert_never(tree)


def _compare(columns: Mapping[str, pa.DataType], column: str, op: Op, value: Scalar) -> sql.Composable | None:
    if column not in columns:
        return None
    type_ = columns[column]
    kind = kind_of(type_)
    if kind == "other" or type_ == pa.float32():
        return None
    if isinstance(value, str) and "\0" in value:
        # No text of the database has it, and no statement.
        return None
    aligned = align(stored_as(type_), op, value)
    match aligned:
        case Verdict.ALWAYS:
            return sql.SQL("{} IS NOT NULL").format(sql.Identifier(column))
        case Verdict.NEVER | Verdict.UNKNOWN:
            return sql.SQL("false")
        case (op, literal):
            form = "{} {} {}" if kind != "text" or op not in _ORDERED else '{} COLLATE "C" {} {}'
            return sql.SQL(form).format(sql.Identifier(column), sql.SQL(op.value), _literal(type_, literal))
        case _:
            assert_never(aligned)


def _compare_columns(
    columns: Mapping[str, pa.DataType], column: str, op: Op, other: str
) -> sql.Composable | None:
    if column not in columns or other not in columns:
        return None
    kinds = {kind_of(columns[name]) for name in (column, other)}
    if kinds & {"other", "float", "text"} or len(kinds) > 1 or columns[column] != columns[other]:
        return None
    return sql.SQL("{} {} {}").format(sql.Identifier(column), sql.SQL(op.value), sql.Identifier(other))


def _literal(type_: pa.DataType, value: Any) -> sql.Composable:
    """A literal with the type that it is compared in. COPY takes no parameters.

    Always text with a cast: a bare number has a type and signs of its own, and ``-9223372036854775808::bigint`` is
    the negative of a number that no bigint is."""
    if kind_of(type_) == "instant":
        zone = "timestamptz" if type_.tz else "timestamp"
        # A type without a zone leaves out the one that is written.
        return sql.SQL("{}::{}").format(sql.Literal(_instant(value)), sql.SQL(zone))
    match value:
        case bytes():
            text = "\\x" + value.hex()
        case float():
            text = repr(value)
        case bool():
            text = "true" if value else "false"
        case _:
            text = str(value)
    return sql.SQL("{}::{}").format(sql.Literal(text), sql.SQL(_TYPES[kind_of(type_)]))


def _instant(microseconds: int) -> str:
    """In UTC, where it may be in a year that Python has not: the calendar 400 years before or after is the same."""
    years = 0 if abs(microseconds) < _AGES // 2 else 400 if microseconds > 0 else -400
    at = _EPOCH + timedelta(microseconds=microseconds - years // 400 * _AGES)
    year = at.year + years
    of_year = at.isoformat(sep=" ", timespec="microseconds").partition("-")[2]
    return f"{year:04}-{of_year}" if year > 0 else f"{1 - year:04}-{of_year} BC"


def _all(terms: Sequence[sql.Composable | None]) -> sql.Composable | None:
    known = [term for term in terms if term is not None]
    return _joined(known, " AND ") if known else None


def _any(terms: Sequence[sql.Composable | None]) -> sql.Composable | None:
    known = [term for term in terms if term is not None]
    return _joined(known, " OR ") if len(known) == len(terms) else None


def _joined(terms: Sequence[sql.Composable], word: str) -> sql.Composable:
    return sql.SQL("({})").format(sql.SQL(word).join(terms))
