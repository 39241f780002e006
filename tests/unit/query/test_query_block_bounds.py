"""Which blocks a query can need follows from what its rows must fulfil."""

from __future__ import annotations

import pytest

from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.where_parse import parse_where
from tracelake.query.engine.messages import RelationUse
from tracelake.query.fit_relation import wanted_blocks


@pytest.mark.parametrize(
    ("where", "first", "last"),
    [
        ("block_number = 7", 7, 7),
        ("block_number > 7 and block_number <= 20", 8, 20),
        ("block_number >= 7.5", 8, MAX_BLOCK),
        ("block_number < 7.5", 0, 7),
        ("block_number = 7.5", 8, 7),
        ("block_number in (3, 9, 5)", 3, 9),
        ("not block_number in (3, 9)", 0, MAX_BLOCK),
        ("block_number <> 7", 0, MAX_BLOCK),
        ("block_number = 3 or block_number = 9", 3, 9),
        ("block_number = 3 or log_index = 1", 0, MAX_BLOCK),
        ("block_number = 3 and log_index = 1", 3, 3),
        ("block_number = 3 or (block_number > 9 and block_number < 5)", 3, 3),
        ("block_number is null", 0, MAX_BLOCK),
        ("block_number > -5", 0, MAX_BLOCK),
        ("block_number < 0", 0, -1),
        ("block_number > 9223372036854775807", MAX_BLOCK, MAX_BLOCK),
        ("log_index = 4", 0, MAX_BLOCK),
        ("block_number = '7'", 0, MAX_BLOCK),
    ],
)
def test_the_blocks_that_a_predicate_leaves(where: str, first: int, last: int) -> None:
    found = wanted_blocks(RelationUse(predicate=parse_where(where).tree))
    assert (found.first, found.last) == (first, last)
    assert found.bounded == ((first, last) != (0, MAX_BLOCK))


def test_a_query_that_says_nothing_wants_all_blocks() -> None:
    assert not wanted_blocks(RelationUse()).bounded
