"""Stored chain tables against themselves: what is missing, doubled, foreign or unlinked is found, no more."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.operators.chain_checks import (
    ChainFinding,
    KnownBlocks,
    RowsCheck,
    broken_seam,
    finding_ranges,
    known_blocks,
    merge_findings,
    unjoined,
)

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
        ChainFinding(102, 104, "is missing"),
        ChainFinding(106, 106, "is stored more than once"),
        ChainFinding(107, 109, "is missing"),
    ]


def test_a_block_that_is_not_the_child_of_the_one_before_is_found() -> None:
    rows = blocks([100, 101, 102])
    forked = rows.set_column(2, "parent_hash", pa.array([block_hash(99), b"\1" * 32, block_hash(101)]))
    assert known_blocks(forked, 100, 102)[1] == [
        ChainFinding(101, 101, "is not the child of the block before it")
    ]


def test_spans_are_joined_by_the_parent_of_the_first_block() -> None:
    first, _ = known_blocks(blocks([100, 101]), 100, 101)
    second, _ = known_blocks(blocks([102, 103]), 102, 103)
    assert unjoined([second.edge, first.edge]) == []
    foreign = second.edge._replace(first_parent="0x02")
    assert unjoined([foreign, first.edge]) == [
        ChainFinding(102, 102, "is not the child of the block before it")
    ]


def test_an_empty_table_is_one_missing_range() -> None:
    assert known_blocks(blocks([]), 100, 102)[1] == [ChainFinding(100, 102, "is missing")]


def test_rows_of_another_fork_are_found() -> None:
    check = RowsCheck("logs", whole(3))
    check.add(logs([(100, 0)]))
    check.add(logs([(101, 0)], of=7))
    assert check.findings() == [ChainFinding(101, 101, "has logs of another block hash")]


def test_transactions_are_counted_against_what_the_block_says() -> None:
    check = RowsCheck("transactions", whole(3, counts=[1, 0, 2]))
    rows = logs([(100, 0), (102, 0)]).rename_columns(["block_number", "block_hash", "transaction_index"])
    check.add(rows)
    assert check.findings() == [
        ChainFinding(102, 102, "has another number of transactions than its transaction_count")
    ]


@pytest.mark.parametrize(
    ("chain_id", "found"),
    [(137, []), (1, [ChainFinding(100, 100, "has another number of receipts than its transaction_count")])],
    ids=["polygon", "ethereum"],
)
def test_receipts_may_be_fewer_where_the_chain_has_transactions_without(
    chain_id: int, found: list[ChainFinding]
) -> None:
    stored = blocks([100, 101], [3, 1]).append_column("chain_id", pa.array([chain_id] * 2))
    check = RowsCheck("receipts", known_blocks(stored, 100, 101)[0])
    names = ["block_number", "block_hash", "transaction_index"]
    check.add(logs([(100, 0), (100, 1), (101, 0)]).rename_columns(names))
    assert check.findings() == found
    check.add(logs([(101, 1)]).rename_columns(names))
    assert finding_ranges(check.findings())[-1].end == 101, "more than there are transactions"


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
    findings = [
        ChainFinding(5, 5, "a"),
        ChainFinding(1, 2, "b"),
        ChainFinding(3, 3, "a"),
        ChainFinding(4, 4, "a"),
    ]
    assert merge_findings(findings) == [ChainFinding(1, 2, "b"), ChainFinding(3, 5, "a")]
    assert [span.partition_key for span in finding_ranges([*findings, ChainFinding(9, 9, "c")])] == [
        "1-5",
        "9-9",
    ]
    assert str(ChainFinding(3, 5, "is missing")) == "blocks 3 to 5: is missing"


def test_a_broken_seam_is_a_finding_about_the_newer_side() -> None:
    rows = blocks([104, 105])
    assert broken_seam(rows, 105) is None
    forked = rows.set_column(2, "parent_hash", pa.array([block_hash(103), block_hash(9)], pa.binary()))
    assert broken_seam(forked, 105) == ChainFinding(105, 105, "is not the child of the block before it")
    assert broken_seam(forked, 105, lower_is_newer=True) == ChainFinding(
        104, 104, "is not the parent of the block after it"
    )
    assert broken_seam(forked, 106) is None, "there is no block 106 to compare"
