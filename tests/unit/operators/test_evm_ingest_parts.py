"""The parts of ``evm_ingest`` that need neither Spark nor a chain."""

from __future__ import annotations

import pickle
from typing import Any

import msgspec
import pytest

from tracelake.contracts.manifest import ManifestFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.operators import evm_ingest, shared_settings
from tracelake.evm.raw_block import (
    PORTION_BLOCKS,
    PORTION_ITEMS,
    BlockMismatch,
    ChainTable,
    RawBlock,
    Senders,
    Verify,
    portions,
)
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.schemas import TABLES
from tracelake.operators.cells import CellProblem, CellReport, blocks_per_file, chain_layout, complete_reports
from tracelake.operators.evm_ingest import IngestWork, check_chain, read_config
from tracelake.tables.parquet import ParquetPlan
from tracelake.tables.stored_types import stored_schema

SPAN = BlockRange(0, 29)


def report(start: int, end: int, parent: str, last: str) -> CellReport:
    return CellReport(start=start, end=end, parent_hash=parent, last_hash=last)


def test_cells_of_one_chain_fit_together_in_any_order() -> None:
    shuffled = [report(20, 29, "b", "c"), report(0, 9, "", "a"), report(10, 19, "a", "b")]
    check_chain(complete_reports(shuffled, SPAN, "IngestFailed"))


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ([report(0, 9, "", "a"), report(10, 29, "x", "b")], "block 10 follows on x, but block 9 was a"),
        ([report(0, 9, "", "a"), report(20, 29, "a", "b")], "no report about block 10"),
        ([report(0, 9, "", "a")], "no report about block 10"),
        ([], "no report about block 0"),
    ],
)
def test_cells_that_do_not_fit_together_are_tried_again(reports: list[CellReport], why: str) -> None:
    with pytest.raises(Unavailable, match=why):
        check_chain(complete_reports(reports, SPAN, "IngestFailed"))


def test_a_report_travels_as_text() -> None:
    file = ManifestFile(location="file:///x", rows=1, bytes=2, content_hash="sha256:" + "0" * 64)
    full = CellReport(start=0, end=9, files={"logs": file}, parent_hash="0x1", last_hash="0x2")
    assert msgspec.json.decode(msgspec.json.encode(full), type=CellReport) == full


@pytest.mark.parametrize(
    ("error", "kind", "reason", "message"),
    [
        (
            BlockMismatch(7, "alpha", "wrong bloom"),
            Unavailable,
            "BlockMismatch",
            "block 7 from alpha: wrong bloom",
        ),
        (Invalid("RpcRefused", "no"), Invalid, "RpcRefused", "no"),
        (
            OSError(28, "No space left"),
            Unavailable,
            "StorageFailed",
            "blocks 0-29: OSError: [Errno 28] No space left",
        ),
        (KeyError("hash"), Unavailable, "CompactFailed", "blocks 0-29: KeyError: 'hash'"),
    ],
)
def test_a_problem_is_on_the_driver_what_it_was_on_the_executor(
    error: Exception, kind: type[Exception], reason: str, message: str
) -> None:
    told = CellReport(start=0, end=29, problem=CellProblem.of(error, SPAN, "CompactFailed"))
    problem = msgspec.json.decode(msgspec.json.encode(told), type=CellReport).problem
    assert problem is not None
    again = problem.error()
    assert (type(again), again.reason, again.message) == (kind, reason, message)


def test_the_grid_follows_from_the_scope_alone() -> None:
    sizes = {1: 25, 100: 25, 1000: 250, 3000: 500, 10_000: 1000, 500_000: 1000, 10**6: 10_000, 10**9: 10**7}
    assert {blocks: blocks_per_file(blocks, None) for blocks in sizes} == sizes
    assert blocks_per_file(10**6, 7) == 7


def test_every_setting_has_an_effect_and_others_are_refused() -> None:
    given: dict[str, Any] = {
        "rpc_pool": "main",
        "chain_id": 5,
        "verify": "bloom",
        "senders": "node",
        "finality": 12,
        "blocks_per_file": 9,
    }
    assert set(given) == evm_ingest.SPEC.keys
    config = read_config(given, ["logs", "traces"])
    assert (config.datasets, config.verify) == ((ChainTable.LOGS, ChainTable.TRACES), Verify.BLOOM)
    assert config.senders is Senders.NODE
    assert (config.chain_id, config.finality, config.blocks_per_file) == (5, 12, 9)
    with pytest.raises(
        Invalid, match="config: verfy: evm_ingest has no such setting; config: rpc_pool: is required"
    ):
        read_config({"verfy": "off"}, [])


def test_the_names_of_outputs_are_the_datasets() -> None:
    assert tuple(ChainTable) == shared_settings.CHAIN_TABLES == evm_ingest.SPEC.outputs
    assert tuple(Verify) == shared_settings.VERIFY
    assert tuple(Senders) == shared_settings.SENDERS


@pytest.mark.parametrize("dataset", list(ChainTable))
def test_tables_are_stored_as_they_are_decoded(dataset: ChainTable) -> None:
    schema = TABLES[dataset].arrow
    assert stored_schema(schema).equals(schema, check_metadata=True)
    layout = chain_layout(dataset, chain_id=1, verified="full")
    for column in (*layout.sort_by, *layout.lookups, *layout.unique):
        assert column in schema.names


def test_work_hides_its_addresses() -> None:
    plan = ParquetPlan("file:///x/", "logs", 0, 9, 10, "block_number")
    work = IngestWork(
        {ChainTable.LOGS: plan}, pool_of("http://host/secret-key"), 0.5, 1, Verify.FULL, Senders.DERIVE
    )
    assert "secret" not in repr(work)
    assert pickle.loads(pickle.dumps(work)) == work


def raw(number: int, transactions: int = 0, logs: int = 0) -> RawBlock:
    receipts: list[dict[str, Any]] = [{"logs": [{}] * logs}] if logs else []
    return RawBlock(number, {"transactions": [{}] * transactions}, receipts, None, "alpha")


def test_portions_are_bounded_by_blocks_and_by_what_is_in_them() -> None:
    light = [len(portion) for portion in portions(raw(number) for number in range(2 * PORTION_BLOCKS + 1))]
    assert light == [PORTION_BLOCKS, PORTION_BLOCKS, 1]
    heavy = portions([raw(0, 1), raw(1, 0, PORTION_ITEMS), raw(2, PORTION_ITEMS), raw(3)])
    assert [[each.number for each in portion] for portion in heavy] == [[0, 1], [2], [3]]
