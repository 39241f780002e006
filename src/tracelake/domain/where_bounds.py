"""Whether a ``where`` can match any row, by what is known of the rows: proven, never guessed.

Known are the smallest and the largest value of some columns, and whether they have nulls. ``can_match`` is false
only if no rows within these bounds match; a column without bounds may have any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias, assert_never

import msgspec

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
    compare,
)

BoundValue: TypeAlias = bool | int | str


class ColumnBounds(msgspec.Struct, frozen=True):
    """``low`` and ``high`` are the ends of a column's values, both null if it has none but nulls."""

    low: BoundValue | None
    high: BoundValue | None
    nulls: bool


def can_match(tree: Predicate, bounds: Mapping[str, ColumnBounds]) -> bool:
    match tree:
        case Compare(column, op, value):
            known = bounds.get(column)
            return known is None or _can_compare(known.low, known.high, op, value, value)
        case CompareColumns(column, op, other):
            one, two = bounds.get(column), bounds.get(other)
            return one is None or two is None or _can_compare(one.low, one.high, op, two.low, two.high)
        case InList(column, values, negated):
            terms = [Compare(column, Op.NE if negated else Op.EQ, value) for value in values]
            possible = [can_match(term, bounds) for term in terms]
            return all(possible) if negated else any(possible)
        case IsNull(column, negated):
            known = bounds.get(column)
            return known is None or (known.low is not None if negated else known.nulls)
        case And(terms):
            return all(can_match(term, bounds) for term in terms)
        case Or(terms):
            return any(can_match(term, bounds) for term in terms)
        case _:
            assert_never(tree)


def _can_compare(
    low: BoundValue | None, high: BoundValue | None, op: Op, from_: WhereValue | None, to: WhereValue | None
) -> bool:
    """Whether a value between ``low`` and ``high`` can compare with one between ``from_`` and ``to``."""
    if low is None or high is None or from_ is None or to is None:
        # Nulls compare with nothing.
        return False
    if len({_kind(value) for value in (low, high, from_, to)}) > 1:
        # One side would be converted, and its ends may not be ends any more.
        return True
    match op:
        case Op.EQ:
            verdicts = [compare(low, "<=", to), compare(from_, "<=", high)]
        case Op.NE:
            single = compare(low, "=", high) and compare(from_, "=", to) and compare(low, "=", from_)
            verdicts = [not single]
        case Op.LT | Op.LE:
            verdicts = [compare(low, op.value, to)]
        case Op.GT | Op.GE:
            verdicts = [compare(high, op.value, from_)]
        case _:
            assert_never(op)
    return False not in verdicts


def _kind(value: WhereValue) -> str:
    # Before the numbers: a bool is an int too.
    if isinstance(value, bool):
        return "bool"
    return "text" if isinstance(value, str) else "number"
