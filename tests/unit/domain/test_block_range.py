"""Block ranges: inclusive at both ends, never empty, cut the same way whoever asks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.block_range import MAX_BLOCK, BlockRange


@st.composite
def ranges(draw: st.DrawFn, top: int = MAX_BLOCK, longest: int = 500) -> BlockRange:
    start = draw(st.integers(0, top))
    return BlockRange(start, min(top, start + draw(st.integers(0, longest))))


near = ranges(top=60)


@given(st.integers(), st.integers())
def test_a_range_is_neither_negative_nor_empty_nor_too_large(start: int, end: int) -> None:
    if 0 <= start <= end <= MAX_BLOCK:
        assert BlockRange(start, end).partition_key == f"{start}-{end}"
    else:
        with pytest.raises(ValueError, match="not a block range"):
            BlockRange(start, end)


@given(ranges())
def test_a_partition_key_is_read_back_as_it_was(span: BlockRange) -> None:
    assert BlockRange.parse(span.partition_key) == span


@given(st.text(max_size=12))
def test_only_a_partition_key_is_one(text: str) -> None:
    try:
        span = BlockRange.parse(text)
    except ValueError:
        return
    start, end = text.split("-")
    assert text.isascii()
    assert (int(start), int(end)) == (span.start, span.end)


@given(near, near)
def test_overlap_and_cover_are_those_of_the_blocks(one: BlockRange, other: BlockRange) -> None:
    blocks, others = set(range(one.start, one.end + 1)), set(range(other.start, other.end + 1))
    assert one.overlaps(other) == bool(blocks & others)
    assert one.covers(other) == (others <= blocks)


@given(ranges(), st.integers(1, 200))
def test_chunks_tile_the_range_on_the_grid(span: BlockRange, size: int) -> None:
    chunks = list(span.split_on_grid(size))
    assert (chunks[0].start, chunks[-1].end) == (span.start, span.end)
    assert all(one.end + 1 == other.start for one, other in pairwise(chunks))
    assert all(chunk.start // size == chunk.end // size for chunk in chunks)
    assert all(chunk.start % size == 0 for chunk in chunks[1:])


@given(ranges(top=400), ranges(top=400), st.integers(1, 100))
def test_a_whole_chunk_is_the_same_whatever_was_asked(one: BlockRange, other: BlockRange, size: int) -> None:
    whole = {c for c in one.split_on_grid(size) if c.start % size == 0 and c.end % size == size - 1}
    inside = {chunk for chunk in whole if other.covers(chunk)}
    assert inside <= set(other.split_on_grid(size))


@given(near, st.integers(max_value=0))
def test_a_chunk_size_is_at_least_one(span: BlockRange, size: int) -> None:
    with pytest.raises(ValueError, match="chunk size"):
        list(span.split_on_grid(size))
