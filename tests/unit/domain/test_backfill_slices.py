"""What a backfill asks for, of ranges of any length."""

from __future__ import annotations

from itertools import islice
from typing import Any
from uuid import uuid4

import pytest

from tracelake.domain.backfill import BackfillRoute, JobNode, slices
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.operators.in_process import RANGE_SPLITTER

EVERYTHING = BlockRange(0, MAX_BLOCK)


def node(operator: str, **config: Any) -> JobNode:
    return JobNode(uuid4(), "dag", operator, operator, None, None, config, False, False, None)


def route(*between: JobNode) -> BackfillRoute:
    return BackfillRoute(node("noop"), between, node("evm_ingest"), ())


@pytest.mark.parametrize("between", [(), (node(RANGE_SPLITTER.name, chunk_size=1000),)])
def test_a_range_of_any_length_is_asked_for_one_by_one(between: tuple[JobNode, ...]) -> None:
    oldest = slices(EVERYTHING, route(*between), 10, newest_first=False, chunks=1)
    assert list(islice(oldest, 2)) == [BlockRange(0, 9), BlockRange(10, 19)]
    newest = slices(EVERYTHING, route(*between), 10, newest_first=True, chunks=1)
    cut = MAX_BLOCK - MAX_BLOCK % 10
    assert list(islice(newest, 2)) == [BlockRange(cut, MAX_BLOCK), BlockRange(cut - 10, cut - 1)]


def test_the_newest_come_first_in_slices_of_the_splitter_s_grid() -> None:
    found = list(
        slices(
            BlockRange(5, 2500),
            route(node(RANGE_SPLITTER.name, chunk_size=1000)),
            1000,
            newest_first=True,
            chunks=3,
        )
    )
    assert found == [BlockRange(2000, 2500), BlockRange(1000, 1999), BlockRange(5, 999)]
