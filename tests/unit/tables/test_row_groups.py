"""Row groups depend on the rows alone: not on the batches that brought them."""

from __future__ import annotations

import itertools

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tracelake.tables.parquet import STEP, RowGroups

SCHEMA = pa.schema([("block_number", pa.int64()), ("data", pa.binary())])
ROWS = 9 * STEP + 7
TABLE = pa.table(
    {
        "block_number": pa.array(range(ROWS), pa.int64()),
        "data": [b"x" * (number % 50) if number % 3 else None for number in range(ROWS)],
    },
    schema=SCHEMA,
)


def grouped(cuts: list[int], **limits: int) -> list[pa.Table]:
    groups = RowGroups(SCHEMA, **limits)
    edges = [0, *sorted(cuts), ROWS]
    found = [
        group
        for start, end in itertools.pairwise(edges)
        for group in groups.add(TABLE.slice(start, end - start))
    ]
    return [*found, groups.rest()]


@given(st.lists(st.integers(0, ROWS), max_size=8))
def test_groups_are_the_same_however_rows_arrive(cuts: list[int]) -> None:
    groups = grouped(cuts, max_rows=4 * STEP, max_weight=100_000)
    assert [group.num_rows for group in groups] == [
        group.num_rows for group in grouped([], max_rows=4 * STEP, max_weight=100_000)
    ]
    assert pa.concat_tables(groups).equals(TABLE)


def test_groups_are_cut_by_rows() -> None:
    assert [group.num_rows for group in grouped([], max_rows=4 * STEP)] == [4 * STEP, 4 * STEP, STEP + 7]


def test_groups_are_cut_by_weight_where_rows_are_heavy() -> None:
    rows = pa.table({"block_number": pa.array(range(STEP * 4), pa.int64()), "data": [b"y" * 1000] * STEP * 4})
    groups = RowGroups(SCHEMA, max_weight=2_000_000)
    assert [group.num_rows for group in groups.add(rows)] == [2 * STEP, 2 * STEP]
    assert groups.rest().num_rows == 0
