"""Stored chain tables against themselves: what is missing, doubled, foreign or unlinked is found, no more."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from tracelake.operators.stored_chain.blocks_check import KnownBlocks, known_blocks, unjoined
from tracelake.operators.stored_chain.finding import Finding, merged, ranges
from tracelake.operators.stored_chain.rows_check import RowsCheck

START = 100


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def blocks(numbers: list[int], counts: list[int] | None = None) -> pa.Table:
    columns = {
        "block_number": pa.array(numbers, pa.int64()),
        "block_hash": pa.array([block_hash(n) for n in numbers], pa.binary()),
        "parent_hash": pa.array([block_hash(n - 1) for n in numbers], pa.binary()),
    }
    if counts is not None:
        columns["transaction_count"] = pa.array(counts, pa.int64())
    return pa.table(columns)


def whole(size: int, counts: list[int] | None = None) -> KnownBlocks:
    known, findings = known_blocks(blocks(list(range(START, START + size)), counts), START, START + size - 1)
    assert findings == []
    return known


def logs(rows: list[tuple[int, int]], of: int | None = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {
            "block_number": pa.array([block for block, _ in rows], pa.int64()),
            "block_hash": pa.array([block_hash(of or block) for block, _ in rows], pa.binary()),
            "log_index": pa.array([index for _, index in rows], pa.int32()),
        }
    )


def test_blocks_that_are_missing_or_doubled_are_named_as_ranges() -> None:
    _, findings = known_blocks(blocks([100, 101, 105, 106, 106]), 100, 109)
    assert findings == [
        Finding(102, 104, "is missing"),
        Finding(106, 106, "is stored more than once"),
        Finding(107, 109, "is missing"),
    ]


def test_a_block_that_is_not_the_child_of_the_one_before_is_found() -> None:
    rows = blocks([100, 101, 102])
    forked = rows.set_column(2, "parent_hash", pa.array([block_hash(99), b"\1" * 32, block_hash(101)]))
    assert known_blocks(forked, 100, 102)[1] == [Finding(101, 101, "is not the child of the block before it")]


def test_spans_are_joined_by_the_parent_of_the_first_block() -> None:
    first, _ = known_blocks(blocks([100, 101]), 100, 101)
    second, _ = known_blocks(blocks([102, 103]), 102, 103)
    assert unjoined([second.edge, first.edge]) == []
    foreign = second.edge._replace(first_parent="0x02")
    assert unjoined([foreign, first.edge]) == [Finding(102, 102, "is not the child of the block before it")]


def test_an_empty_table_is_one_missing_range() -> None:
    assert known_blocks(blocks([]), 100, 102)[1] == [Finding(100, 102, "is missing")]


def test_rows_of_another_fork_are_found() -> None:
    check = RowsCheck("logs", whole(3))
    check.add(logs([(100, 0)]))
    check.add(logs([(101, 0)], of=7))
    assert check.findings() == [Finding(101, 101, "has logs of another block hash")]


def test_transactions_are_counted_against_what_the_block_says() -> None:
    check = RowsCheck("transactions", whole(3, counts=[1, 0, 2]))
    rows = logs([(100, 0), (102, 0)]).rename_columns(["block_number", "block_hash", "transaction_index"])
    check.add(rows)
    assert check.findings() == [Finding(102, 102, "has another number of transactions than it says")]


@given(st.lists(st.tuples(st.integers(100, 103), st.integers(0, 4)), max_size=30), st.integers(1, 7))
def test_positions_are_right_exactly_when_each_block_counts_from_zero(
    rows: list[tuple[int, int]], size: int
) -> None:
    wrong = set()
    for block in range(100, 104):
        positions = [index for number, index in rows if number == block]
        if sorted(positions) != list(range(len(positions))):
            wrong.add(block)
    check = RowsCheck("logs", whole(4))
    for place in range(0, len(rows), size):
        check.add(logs(sorted(rows)[place : place + size]))
    assert {n for f in check.findings() for n in range(f.start, f.end + 1)} == wrong


def test_findings_become_as_few_ranges_as_possible() -> None:
    findings = [Finding(5, 5, "a"), Finding(1, 2, "b"), Finding(3, 3, "a"), Finding(4, 4, "a")]
    assert merged(findings) == [Finding(1, 2, "b"), Finding(3, 5, "a")]
    assert [span.partition_key for span in ranges([*findings, Finding(9, 9, "c")])] == ["1-5", "9-9"]
    assert str(Finding(3, 5, "is missing")) == "blocks 3 to 5: is missing"
