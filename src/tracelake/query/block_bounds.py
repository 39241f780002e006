"""Which blocks a query can need of a relation, from what its rows must fulfil: files of other blocks stay closed.

This is asked before anything is known of the relation but that a block is a whole number. Where it turns out to
have no such column, the answer doesn't hold, and whoever asked must look again without it.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import assert_never

import pyarrow as pa

from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.where import And, Compare, CompareColumns, InList, IsNull, Op, Or, Predicate, Scalar
from tracelake.operators.inputs import BLOCK_COLUMN
from tracelake.query.engine.fit_relation import fit
from tracelake.query.engine.parsed_query import RelationUse
from tracelake.query.relation import WantedBlocks

_BLOCKS_ALONE = pa.schema([(BLOCK_COLUMN, pa.int64())])
_ALL = (-math.inf, math.inf)
_NONE = (math.inf, -math.inf)

Bounds = tuple[float, float]
"""Both ends inclusive, whole numbers or infinite; crossed if nothing lies between."""


def wanted_blocks(use: RelationUse) -> WantedBlocks:
    predicate = fit(use, _BLOCKS_ALONE).predicate
    low, high = _ALL if predicate is None else _bounds(predicate)
    first = 0 if low <= 0 else MAX_BLOCK if low >= MAX_BLOCK else int(low)
    last = -1 if high < 0 else MAX_BLOCK if high >= MAX_BLOCK else int(high)
    return WantedBlocks(first, last)


def has_blocks(schema: pa.Schema) -> bool:
    """Whether the relation has the column that bounds were taken for granted of."""
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


def _compared(op: Op, value: Scalar) -> Bounds:
    if isinstance(value, bool | str):
        return _ALL
    match op:
        case Op.EQ:
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
