"""A literal beside a column, decided by the column's type once instead of by each value.

``where`` means the same on every engine because what engines differ in is settled here, after the rules of
``domain.sql_compare``: a string takes the column's type, what has no common order makes the comparison unknown,
and a number that an integer column can't hold is replaced by one that gives the same answer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Literal, TypeVar

from tracelake.domain.where import Op, Scalar

Kind = Literal["bool", "integer", "float", "decimal", "text", "bytes", "instant", "date", "other"]

T = TypeVar("T")

_LOW, _HIGH = -(2**63), 2**63 - 1
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


def compared(left: T, op: Op, right: T) -> T:
    """The comparison as an expression of the engine that the operands belong to."""
    expression: T = _COMPARISONS[op](left, right)
    return expression


def align(kind: Kind, op: Op, value: Scalar) -> tuple[Op, Any] | Verdict:
    """The comparison to make against a column of this kind."""
    match kind, value:
        case "bool", bool():
            return op, value
        case _, bool():
            return Verdict.UNKNOWN
        case "integer", int() | float():
            return _against_integers(op, value)
        case "float", int() | float():
            return op, float(value)
        case "decimal", int() | float():
            return op, Decimal(repr(value))
        case "text", str():
            return op, value
        case (("instant" | "date" | "bytes"), str()):
            parsed = _parsed(kind, value)
            return Verdict.UNKNOWN if parsed is None else (op, parsed)
        case _:
            return Verdict.UNKNOWN


def _against_integers(op: Op, value: int | float) -> tuple[Op, int] | Verdict:
    whole = math.floor(value)
    if whole != value:
        match op:
            case Op.EQ:
                return Verdict.NEVER
            case Op.NE:
                return Verdict.ALWAYS
            case Op.LT | Op.LE:
                op = Op.LE
            case Op.GT | Op.GE:
                op, whole = Op.GE, whole + 1
    if _LOW <= whole <= _HIGH:
        return op, whole
    true = (op is Op.NE) or (op in (Op.LT, Op.LE) if whole > _HIGH else op in (Op.GT, Op.GE))
    return Verdict.ALWAYS if true else Verdict.NEVER


def _parsed(kind: Kind, text: str) -> datetime | date | bytes | None:
    try:
        if kind == "instant":
            at = datetime.fromisoformat(text)
            return at if at.tzinfo else at.replace(tzinfo=UTC)
        if kind == "date":
            return date.fromisoformat(text)
        return bytes.fromhex(text[2:]) if text.startswith("\\x") else None
    except ValueError:
        return None
