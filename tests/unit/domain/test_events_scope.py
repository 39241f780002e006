"""The scope of an event, from whichever fields name it."""

from __future__ import annotations

from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.errors import Invalid
from tracelake.domain.events import (
    CursorScope,
    DatasetRef,
    InvalidationScope,
    PartitionScope,
    partition_range,
)

blocks = st.integers(0, MAX_BLOCK)


@given(blocks, blocks)
def test_a_range_is_named_by_its_key_its_ends_or_both(one: int, other: int) -> None:
    span = BlockRange(min(one, other), max(one, other))
    key = span.partition_key
    assert partition_range(key, None, None) == span
    assert partition_range(None, span.start, span.end) == span
    assert partition_range(key, span.start, span.end) == span


def test_no_fields_name_no_range() -> None:
    assert partition_range(None, None, None) is None


@given(blocks, blocks, blocks)
def test_fields_that_disagree_are_refused(one: int, other: int, third: int) -> None:
    start, end = sorted((one, other))
    key = BlockRange(min(start, third), max(end, third)).partition_key
    if key != f"{start}-{end}":
        with pytest.raises(Invalid):
            partition_range(key, start, end)
    if start < end:
        with pytest.raises(Invalid):
            partition_range(None, end, start)


@pytest.mark.parametrize(("start", "end"), [(1, None), (None, 1), (-1, 1), (0, MAX_BLOCK + 1)])
def test_half_a_range_or_one_out_of_bounds_is_refused(start: int | None, end: int | None) -> None:
    with pytest.raises(Invalid):
        partition_range(None, start, end)


@pytest.mark.parametrize("key", ["", "-", "1", "1-", "-1", "1-2-3", "a-b", "1 -2", "²-³", "+1-2", "1_0-20"])
def test_a_malformed_partition_key_is_refused(key: str) -> None:
    with pytest.raises(Invalid):
        partition_range(key, None, None)


def test_a_dataset_is_named_by_uuid_or_by_name() -> None:
    uuid, version = uuid4(), uuid4()
    assert DatasetRef.of(uuid, version, None) == DatasetRef(uuid, version, None)
    assert DatasetRef.of(None, None, "blocks").name == "blocks"
    both: list[tuple[UUID | None, str | None]] = [(uuid, "blocks"), (None, None)]
    for given_uuid, name in both:
        with pytest.raises(Invalid):
            DatasetRef.of(given_uuid, None, name)


@given(blocks, blocks)
def test_every_scope_has_bounds(one: int, other: int) -> None:
    span = BlockRange(min(one, other), max(one, other))
    assert CursorScope(one).bounds == (one, one)
    assert PartitionScope(span).bounds == InvalidationScope(span, "id", None).bounds == (span.start, span.end)
