"""``where`` on an input edge: a predicate over one row that can do nothing but compare.

The tree consists of the structs below and nothing else, so any engine can evaluate a predicate. It is kept in a
normal form: NOT is pushed into the leaves (exact under three-valued logic), AND and OR are flattened, sorted and
free of repeats, a column is on the left. So predicates that differ only in spelling have one tree, one text and one
fingerprint. ``where_parse`` makes them from a DAG file.

``compare`` decides a comparison of a value with a literal as Postgres would. NULL makes it unknown (``None``), and
so do two values without a common order: SQL would refuse the query, a row filter leaves the row out. A string
literal takes the type of the column beside it, as untyped literals do in SQL (``literals``), and what can't be read
as that type is unknown; a column of text takes no other type. NaN equals itself and is above every number. Strings
order by code point, as in the C collation of the data database.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias, assert_never
from uuid import UUID

import msgspec

from tracelake.domain.literals import read_boolean, read_double, read_integer, read_numeric

WhereValue: TypeAlias = bool | int | float | str
_Key: TypeAlias = tuple[str, Any]
_PLAIN_NAME = re.compile(r"[a-z_][a-z0-9_]*\Z")
_COMPARE: dict[str, Callable[[Any, Any], object]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@cache
def _keywords() -> frozenset[str]:
    """Names to quote. The parser also gives the last ones a meaning, without listing them as keywords. It is
    imported late: clients use predicates and have no parser."""
    from sqlglot.dialects.postgres import Postgres

    known = {word.lower() for word in Postgres.Tokenizer.KEYWORDS}
    return frozenset(known | {"and", "or", "not", "in", "is"} | {"if", "while", "connect_by_root"})


class Op(StrEnum):
    EQ = "="
    NE = "<>"
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="

    @property
    def negated(self) -> Op:
        return _NEGATED[self]

    @property
    def flipped(self) -> Op:
        """The operator with the same meaning when its operands are swapped."""
        return _FLIPPED.get(self, self)


_NEGATED = {Op.EQ: Op.NE, Op.NE: Op.EQ, Op.LT: Op.GE, Op.GE: Op.LT, Op.GT: Op.LE, Op.LE: Op.GT}
_FLIPPED = {Op.LT: Op.GT, Op.GT: Op.LT, Op.LE: Op.GE, Op.GE: Op.LE}


class Compare(msgspec.Struct, frozen=True, tag="compare"):
    column: str
    op: Op
    value: WhereValue


class CompareColumns(msgspec.Struct, frozen=True, tag="compare_columns"):
    column: str
    op: Op
    other: str


class InList(msgspec.Struct, frozen=True, tag="in"):
    column: str
    values: tuple[WhereValue, ...]
    negated: bool = False


class IsNull(msgspec.Struct, frozen=True, tag="is_null"):
    column: str
    negated: bool = False


class And(msgspec.Struct, frozen=True, tag="and"):
    terms: tuple[Predicate, ...]


class Or(msgspec.Struct, frozen=True, tag="or"):
    terms: tuple[Predicate, ...]


Predicate: TypeAlias = Compare | CompareColumns | InList | IsNull | And | Or


class Where(msgspec.Struct, frozen=True):
    """A predicate and its canonical text, which parses back to the same tree."""

    text: str
    tree: Predicate

    @classmethod
    def of(cls, tree: Predicate) -> Where:
        return cls(render(tree), tree)

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is kept. As in SQL, unknown is not true; a column that the row lacks is NULL."""
        return _truth(self.tree, row) is True


def all_of(terms: Iterable[Predicate]) -> Predicate:
    return _combine(terms, And)


def any_of(terms: Iterable[Predicate]) -> Predicate:
    return _combine(terms, Or)


def in_list(column: str, values: Iterable[WhereValue], *, negated: bool = False) -> Predicate:
    # By type too, since True equals 1 in Python.
    unique = {(type(value).__name__, value): value for value in values}
    ordered = tuple(unique[key] for key in sorted(unique, key=lambda key: (key[0], key[1])))
    if len(ordered) == 1:
        return Compare(column, Op.NE if negated else Op.EQ, ordered[0])
    return InList(column, ordered, negated)


def compare_columns(column: str, op: Op, other: str) -> CompareColumns:
    return CompareColumns(column, op, other) if column <= other else CompareColumns(other, op.flipped, column)


def _combine(terms: Iterable[Predicate], kind: type[And] | type[Or]) -> Predicate:
    flat: dict[str, Predicate] = {}
    for term in terms:
        for part in term.terms if isinstance(term, And | Or) and isinstance(term, kind) else (term,):
            # With all names quoted, so that the order doesn't depend on the parser's list of keywords.
            flat[render(part, quote_all=True)] = part
    if len(flat) == 1:
        return next(iter(flat.values()))
    return kind(tuple(flat[text] for text in sorted(flat)))


def render(tree: Predicate, *, quote_all: bool = False) -> str:
    match tree:
        case Compare(column, op, value):
            return f"{_name(column, quote_all)} {op.value} {literal_text(value)}"
        case CompareColumns(column, op, other):
            return f"{_name(column, quote_all)} {op.value} {_name(other, quote_all)}"
        case InList(column, values, negated):
            listed = ", ".join(map(literal_text, values))
            return f"{_name(column, quote_all)} {'NOT IN' if negated else 'IN'} ({listed})"
        case IsNull(column, negated):
            return f"{_name(column, quote_all)} IS {'NOT NULL' if negated else 'NULL'}"
        case And(terms):
            return " AND ".join(_grouped(term, quote_all) for term in terms)
        case Or(terms):
            return " OR ".join(_grouped(term, quote_all) for term in terms)
        case _:
            assert_never(tree)


def _grouped(term: Predicate, quote_all: bool) -> str:
    text = render(term, quote_all=quote_all)
    return f"({text})" if isinstance(term, And | Or) else text


def _name(column: str, quote_all: bool) -> str:
    # Only a plain name that is no keyword reads back as the same name.
    if not quote_all and _PLAIN_NAME.match(column) and column not in _keywords():
        return column
    return '"' + column.replace('"', '""') + '"'


def literal_text(value: WhereValue) -> str:
    if isinstance(value, bool):
        return "TRUE" if value else "FALSE"
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return repr(value)


def _truth(tree: Predicate, row: Mapping[str, Any]) -> bool | None:
    match tree:
        case Compare(column, op, value):
            return compare(row.get(column), op.value, value)
        case CompareColumns(column, op, other):
            return _ordered(row.get(column), op.value, row.get(other))
        case InList(column, values, negated):
            found = _either(compare(row.get(column), "=", value) for value in values)
            return found if found is None or not negated else not found
        case IsNull(column, negated):
            return (row.get(column) is None) is not negated
        case And(terms):
            # De Morgan: one false term makes AND false, even beside unknown ones.
            verdict = _either(_inverted(_truth(term, row)) for term in terms)
            return _inverted(verdict)
        case Or(terms):
            return _either(_truth(term, row) for term in terms)
        case _:
            assert_never(tree)


def _either(verdicts: Iterable[bool | None]) -> bool | None:
    unknown = False
    for verdict in verdicts:
        if verdict:
            return True
        unknown = unknown or verdict is None
    return None if unknown else False


def _inverted(verdict: bool | None) -> bool | None:
    return None if verdict is None else not verdict


def compare(value: object, op: str, literal: object) -> bool | None:
    if isinstance(literal, str) and value is not None:
        literal = literal_as(type(value), literal)
    return _ordered(value, op, literal)


def _ordered(left: object, op: str, right: object) -> bool | None:
    if left is None or right is None:
        return None
    # By the float's shortest text: 0.1 means a tenth, not its binary approximation.
    if isinstance(left, Decimal) and isinstance(right, float):
        right = Decimal(repr(right))
    elif isinstance(right, Decimal) and isinstance(left, float):
        left = Decimal(repr(left))
    one, two = _key(left), _key(right)
    if one is None or two is None or one[0] != two[0]:
        return None
    return bool(_COMPARE[op](one[1], two[1]))


def literal_as(kind: type, text: str) -> object:
    """A string literal beside a value of this type; None if it can't be read as one."""
    try:
        # Each before the type that it is derived from: bool is an int, and datetime a date.
        if issubclass(kind, bool):
            return read_boolean(text)
        if issubclass(kind, int):
            return read_integer(text)
        if issubclass(kind, float):
            return read_double(text)
        if issubclass(kind, Decimal):
            return read_numeric(text)
        if issubclass(kind, datetime):
            return datetime.fromisoformat(text)
        if issubclass(kind, date):
            return date.fromisoformat(text)
        if issubclass(kind, UUID):
            return UUID(text)
        if issubclass(kind, bytes):
            # Postgres' own spelling of bytea.
            return bytes.fromhex(text[2:]) if text.startswith("\\x") else None
    except ValueError:
        return None
    return text


def can_compare(kind: type, literal: WhereValue) -> bool:
    """Whether a comparison of the literal with a value of this type can ever be known."""
    match literal:
        case bool():
            return kind is bool
        case int() | float():
            return kind in (int, float, Decimal)
        case str():
            return literal_as(kind, literal) is not None
        case _:
            assert_never(literal)


def compared_literals(tree: Predicate) -> Iterator[tuple[str, WhereValue]]:
    """Each literal with the column beside it."""
    match tree:
        case Compare(column, _, value):
            yield column, value
        case InList(column, values):
            yield from ((column, value) for value in values)
        case And(terms) | Or(terms):
            for term in terms:
                yield from compared_literals(term)
        case CompareColumns() | IsNull():
            return
        case _:
            assert_never(tree)


def _key(value: object) -> _Key | None:
    """A value's kind, and a key that orders values of that kind."""
    match value:
        # Before int: a bool is an int too.
        case bool():
            return "bool", value
        case int() | float() | Decimal():
            # NaN sorts above every number, and equals itself.
            return "number", (True, 0) if value != value else (False, value)
        case str():
            return "text", value
        case bytes():
            return "bytes", value
        case datetime():
            return "instant", value if value.tzinfo else value.replace(tzinfo=UTC)
        case date():
            return "date", value
        case UUID():
            return "uuid", value
        case _:
            return None
