"""A literal beside a column, decided by the column's type once instead of by each value.

``where`` means the same on every engine because what engines differ in is settled here, after the rules of
``domain.sql_compare``: a string takes the column's type, what has no common order makes the comparison unknown,
and what the column can't hold is replaced by something that it can hold and that gives the same answer. A column of
integers, decimals or instants holds whole numbers of some unit within bounds, so one rule decides on all of them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeVar

from tracelake.domain.where import Op, Scalar

Kind = Literal["bool", "integer", "float", "decimal", "text", "bytes", "instant", "date", "other"]

T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_COMPARISONS: Mapping[Op, Callable[[Any, Any], Any]] = {
    Op.EQ: operator.eq,
    Op.NE: operator.ne,
    Op.LT: operator.lt,
    Op.LE: operator.le,
    Op.GT: operator.gt,
    Op.GE: operator.ge,
}


class Verdict(Enum):
    """A comparison that is the same for every value: always true, never, or unknown; NULL stays unknown."""

    ALWAYS = "always"
    NEVER = "never"
    UNKNOWN = "unknown"


class Stored(NamedTuple):
    """What a column holds. Integers, decimals and instants are whole numbers from ``low`` to ``high``, of which
    ``units`` make one: a power of ten for decimals, and for instants, which count from 1970 in UTC, what a second
    has."""

    kind: Kind
    units: int = 1
    low: int = -(2**63)
    high: int = 2**63 - 1


MICROSECONDS = Stored("instant", 10**6)


def decimals(precision: int, scale: int) -> Stored:
    most = 10**precision - 1
    return Stored("decimal", 10**scale, -most, most)


def compared(left: T, op: Op, right: T) -> T:
    """The comparison as an expression of the engine that the operands belong to."""
    expression: T = _COMPARISONS[op](left, right)
    return expression


def align(column: Stored, op: Op, value: Scalar) -> tuple[Op, Any] | Verdict:
    """The comparison to make against a column that holds this. An instant is its number of units."""
    kind = column.kind
    match kind, value:
        case "bool", bool():
            return op, value
        case _, bool():
            return Verdict.UNKNOWN
        case "integer", int() | float():
            return _against_whole(column, op, Fraction(value))
        case "float", int() | float():
            return op, float(value)
        case "decimal", int() | float():
            aligned = _against_whole(column, op, Fraction(Decimal(repr(value))))
            return (
                aligned if isinstance(aligned, Verdict) else (aligned[0], _decimal(aligned[1], column.units))
            )
        case "text", str():
            return op, value
        case "instant", str():
            seconds = _seconds(value)
            return Verdict.UNKNOWN if seconds is None else _against_whole(column, op, seconds)
        case (("date" | "bytes"), str()):
            parsed = _parsed(kind, value)
            return Verdict.UNKNOWN if parsed is None else (op, parsed)
        case _:
            return Verdict.UNKNOWN


def _against_whole(column: Stored, op: Op, value: Fraction) -> tuple[Op, int] | Verdict:
    exact = value * column.units
    whole = math.floor(exact)
    if whole != exact:
        match op:
            case Op.EQ:
                return Verdict.NEVER
            case Op.NE:
                return Verdict.ALWAYS
            case Op.LT | Op.LE:
                op = Op.LE
            case Op.GT | Op.GE:
                op, whole = Op.GE, whole + 1
    if column.low <= whole <= column.high:
        return op, whole
    true = (op is Op.NE) or (op in (Op.LT, Op.LE) if whole > column.high else op in (Op.GT, Op.GE))
    return Verdict.ALWAYS if true else Verdict.NEVER


def _decimal(whole: int, units: int) -> Decimal:
    """All of its digits, whatever the context says."""
    sign, digits, _ = Decimal(whole).as_tuple()
    return Decimal((sign, digits, 1 - len(str(units))))


def _seconds(text: str) -> Fraction | None:
    """Since 1970 in UTC. A difference has no bounds; the instant in UTC may be in a year that Python has not."""
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        return None
    since = (at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH
    return Fraction(since // _MICROSECOND, 10**6)


def _parsed(kind: Kind, text: str) -> date | bytes | None:
    try:
        if kind == "date":
            return date.fromisoformat(text)
        return bytes.fromhex(text[2:]) if text.startswith("\\x") else None
    except ValueError:
        return None
