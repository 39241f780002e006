"""``integrity_check``: checks stored blocks against themselves and against the chain, and invalidates wrong ranges.

    inputs: [{ from: { job: ingest, output: 0 } }, { from: { job: ingest, output: 1 }, trigger: false }]
    config: { rpc_pool: main, verify: bloom }

Inputs are tables of one chain, in files or in Postgres, identified by their columns. Executors read the rows of
their cells, some blocks at a time. Every block must be there once and be the child of the one before, also of one
that another task has written; every other row must belong to a stored block, and none may be missing. Then, by
``verify``: ``bloom`` compares the headers that the chain has now (hash, number of transactions, filter of the
logs); ``full`` fetches the blocks, proves them as an ingest would, and compares every value; ``off`` compares
nothing. A stored block counts as not the chain's only if no endpoint has it: while some do, the check waits until
they agree.

Wrong ranges are invalidated in all inputs at once: their producers make them again, and everything made from them.
The output ``findings`` announces the blocks that were wrong (PerPartition), or how far the check has come
(PerUpdate). A range that is wrong in the same way after it was made again fails the task for a person to look at:
the source and the chain disagree, and no repetition helps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.contracts.dispatcher_api import MAX_EVENTS, EventIn, InvalidateRange
from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.domain.operators.integrity_check import SPEC
from tracelake.evm.columns import UINT256_PARTS
from tracelake.evm.decode import decode
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.hashing import bits_of
from tracelake.evm.raw_block import ChainTable, Verify, need_receipts, portions
from tracelake.evm.rpc.pool import Pool, kept_pool
from tracelake.evm.schemas import TABLES
from tracelake.operators.cells import CellProblem, run_cells, spark_slots
from tracelake.operators.chain_checks import (
    ChainFinding,
    RowsCheck,
    SpanEdge,
    finding_ranges,
    known_blocks,
    merge_findings,
    unjoined,
)
from tracelake.operators.context import Context
from tracelake.operators.inputs import Input
from tracelake.operators.registry import operator
from tracelake.operators.stored_chain import StoredTable, broken_seams, stored_table

REASON = f"{SPEC.name}: "
_CELL = 250
_SHOWN = 20
_LONGEST_REASON = 1000
UNFORESEEN = "CheckFailed"
MAX_FOUND = 1000
"""With more findings than this in one cell, the whole cell is reported as wrong."""
# Number of blocks whose rows are in memory at a time.
_PORTION = 100
ChainRows = Mapping[ChainTable, pa.Table]
# Columns that some nodes leave out or count in their own way; nothing in a header proves them.
_AT_LIBERTY = ("size", *(f"total_difficulty{part}" for part in UINT256_PARTS))
_ALSO_AT_LIBERTY = ("gas_price", "y_parity", "blob_gas_price", "blob_gas_used")
_NOT_PROVEN = {*_AT_LIBERTY, *_ALSO_AT_LIBERTY}
_TOPICS = ("topic0", "topic1", "topic2", "topic3")


@operator(SPEC.name)
def integrity_check(ctx: Context) -> None:
    verify = Verify(SPEC.read(ctx.config).verify)
    if ctx.scope is None or ctx.scope.blocks is None:
        ctx.log.info("nothing to do: no new blocks")
        return
    checked = [source for source in ctx.inputs if source.storage != "none"]
    work = _work(ctx, checked, ctx.scope.blocks, verify)
    findings = merge_findings([*check(ctx, work), *_seams(checked, work)])
    if not findings:
        ctx.log.info("check passed", start=work.span.start, end=work.span.end)
        if not ctx.scope.by_cursor:
            # The output announces wrong blocks, and there are none.
            ctx.outputs[0].announce_nothing()
        return
    for finding in findings[:_SHOWN]:
        ctx.log.warning("mismatch found", blocks=f"{finding.start}-{finding.end}", what=finding.what)
    # Before anything is invalidated: blocks that come back wrong would be made again without an end.
    refuse_repetition(checked, findings)
    wrong = finding_ranges(findings)
    invalidate_inputs(ctx, checked, findings, wrong)
    for span in wrong if not ctx.scope.by_cursor else []:
        ctx.outputs[0].announce(start=span.start, end=span.end)


def check(ctx: Context, work: CheckWork) -> list[ChainFinding]:
    """Run one Spark job; returns the problems of the cells, and where cells don't join."""
    found = run_cells(
        ctx, work.cells, partial(check_cell, work), CellFindings, work.span, incomplete=UNFORESEEN
    )
    joints = unjoined(cell.edge for cell in found if cell.edge is not None)
    return merge_findings([*(finding for cell in found for finding in cell.findings), *joints])


def _seams(checked: Sequence[Input], work: CheckWork) -> Iterator[ChainFinding]:
    """Where the scope doesn't join the blocks around it, which other tasks have written."""
    for source, table in zip(checked, work.tables, strict=True):
        if table.dataset is ChainTable.BLOCKS:
            yield from broken_seams(source, table.dataset, work.span)


def refuse_repetition(checked: Sequence[Input], findings: Sequence[ChainFinding]) -> None:
    before = {source.invalidation.reason for source in checked if source.invalidation is not None}
    for finding in findings:
        if _reason(finding) in before:
            raise Invalid("StillWrong", f"after it was made again, {finding}")


def invalidate_inputs(
    ctx: Context, checked: Sequence[Input], findings: Sequence[ChainFinding], wrong: list[BlockRange]
) -> None:
    """All events go in one call and so in one transaction: the first one makes this attempt's inputs stale."""
    # One call takes a limited number of events; one wide range covers all of them.
    if len(wrong) * len(checked) > MAX_EVENTS:
        wrong = [BlockRange(wrong[0].start, wrong[-1].end)]
    events = []
    for span in wrong:
        first = next(finding for finding in findings if span.start <= finding.start <= span.end)
        for source in checked:
            # The same when the attempt is repeated, another one after the next invalidation.
            key = f"{ctx.task.task_id}/{source.dataset_version}/{source.revision}/{span.partition_key}"
            events.append(
                EventIn(
                    dataset_uuid=source.dataset_uuid,
                    dataset_version=source.dataset_version,
                    id=hashlib.sha256(key.encode()).hexdigest()[:40],
                    invalidate=InvalidateRange(span.start, span.end),
                    reason=_reason(first),
                )
            )
    ctx.emit(*events)


def _work(ctx: Context, checked: Sequence[Input], span: BlockRange, verify: Verify) -> CheckWork:
    tables: list[StoredTable] = []
    for source in checked:
        table = stored_table(source)
        if table is None:
            raise Conflict("InputEmpty", f"input {source.index} has no rows yet")
        if table.dataset in {known.dataset for known in tables}:
            raise Invalid("InvalidConfig", f"two inputs are {table.dataset}")
        tables.append(table)
    pool = None if verify is Verify.OFF else ctx.rpc_pool()
    chain_id, share = 0, 1.0
    if pool is not None:
        with Pool(pool) as endpoints:
            chain_id = endpoints.chain_id(ctx.config.get("chain_id"))
        share = 1 / spark_slots(ctx.spark)
    return CheckWork(tuple(tables), span, _CELL, verify, pool, share, chain_id)


def _reason(finding: ChainFinding) -> str:
    return f"{REASON}{finding}"[:_LONGEST_REASON]


@dataclass(frozen=True, slots=True)
class CheckWork:
    """The work of executors, sent by pickle. ``share`` is a cell's part of the pool's limits."""

    tables: tuple[StoredTable, ...]
    span: BlockRange
    cell_size: int
    verify: Verify
    pool: PoolConfig | None = field(repr=False)
    share: float
    chain_id: int

    @property
    def cells(self) -> range:
        return range(self.span.end // self.cell_size - self.span.start // self.cell_size + 1)

    def cell(self, number: int) -> BlockRange:
        first = (self.span.start // self.cell_size + number) * self.cell_size
        return BlockRange(max(first, self.span.start), min(first + self.cell_size - 1, self.span.end))


class CellFindings(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    end: int
    findings: list[ChainFinding] = []
    edge: SpanEdge | None = None
    problem: CellProblem | None = None


def check_cell(work: CheckWork, number: int) -> CellFindings:
    cell = work.cell(number)
    try:
        return _check(work, cell)
    except Exception as error:
        problem = CellProblem.of(error, cell, UNFORESEEN)
        return CellFindings(start=cell.start, end=cell.end, problem=problem)


def _check(work: CheckWork, cell: BlockRange) -> CellFindings:
    findings: list[ChainFinding] = []
    edges: list[SpanEdge] = []
    for start in range(cell.start, cell.end + 1, _PORTION):
        end = min(start + _PORTION - 1, cell.end)
        rows = {table.dataset: table.rows(start, end) for table in work.tables}
        wrong, edge = against_themselves(rows, start, end)
        findings += wrong
        edges += [edge] if edge is not None else []
        findings += _against_chain(work, rows, start, end)
    found = merge_findings([*findings, *unjoined(edges)])
    if len(found) > MAX_FOUND:
        # Reports are collected in the driver's memory.
        found = [ChainFinding(cell.start, cell.end, f"{len(found)} mismatches, such as: {found[0]}")]
    whole = SpanEdge(cell.start, cell.end, edges[0].first_parent, edges[-1].last_hash) if edges else None
    return CellFindings(start=cell.start, end=cell.end, findings=found, edge=whole)


def _against_chain(
    work: CheckWork, rows: dict[ChainTable, pa.Table], start: int, end: int
) -> list[ChainFinding]:
    if work.pool is None or work.verify is Verify.OFF:
        return []
    with kept_pool(work.pool, share=work.share) as pool:
        if work.verify is Verify.BLOOM:
            return list(against_headers(pool, rows, start, end))
        return list(against_content(pool, rows, start, end, work.chain_id))


def against_themselves(
    rows: dict[ChainTable, pa.Table], start: int, end: int
) -> tuple[list[ChainFinding], SpanEdge | None]:
    """Other tables are checked against the blocks; without these there is nothing to check."""
    blocks = rows.get(ChainTable.BLOCKS)
    if blocks is None:
        return [], None
    known, findings = known_blocks(blocks, start, end)
    for dataset, table in rows.items():
        if dataset is not ChainTable.BLOCKS:
            check = RowsCheck(dataset, known)
            check.add(table)
            findings += check.findings()
    return findings, known.edge


def against_headers(pool: Pool, stored: ChainRows, start: int, end: int) -> Iterator[ChainFinding]:
    headers = _headers(pool, start, end)
    yield from _other_hashes(pool, stored, {number: header["hash"] for number, header in headers.items()})
    if ChainTable.TRANSACTIONS in stored:
        counts = _by_block(stored[ChainTable.TRANSACTIONS], start, end)
        for number, header in headers.items():
            if counts[number - start] != len(header["transactions"]):
                what = f"has {counts[number - start]} transactions, the chain {len(header['transactions'])}"
                yield ChainFinding(number, number, what)
    if ChainTable.LOGS in stored:
        blooms = _blooms(stored[ChainTable.LOGS])
        for number, header in headers.items():
            if blooms.get(number, 0) != int(header["logsBloom"], 16):
                yield ChainFinding(number, number, "has other logs than the chain's logsBloom")


def against_content(
    pool: Pool, stored: ChainRows, start: int, end: int, chain_id: int
) -> Iterator[ChainFinding]:
    """Blocks are decoded as they come in: a hundred dense ones as JSON wouldn't fit into memory."""
    hashes: dict[int, str] = {}
    decoded: dict[ChainTable, list[pa.RecordBatch]] = {dataset: [] for dataset in stored}
    blocks = fetch_blocks(
        pool,
        range(start, end + 1),
        receipts=need_receipts(stored),
        traces=ChainTable.TRACES in stored,
        verify=Verify.FULL,
    )
    for portion in portions(blocks):
        hashes |= {raw.number: raw.block["hash"] for raw in portion}
        for dataset, batches in decoded.items():
            batches.append(decode(portion, dataset, chain_id))
    yield from _other_hashes(pool, stored, hashes)
    for dataset, rows in stored.items():
        chain = pa.Table.from_batches(decoded[dataset], TABLES[dataset].arrow)
        yield from _other_rows(dataset, rows, chain, start, end)


def _other_hashes(pool: Pool, stored: ChainRows, hashes: Mapping[int, str]) -> Iterator[ChainFinding]:
    """Compare the block hash of every stored row, in all tables."""
    seen: set[tuple[int, bytes]] = set()
    for rows in stored.values():
        pairs = (
            rows.select(["block_number", "block_hash"]).group_by(["block_number", "block_hash"]).aggregate([])
        )
        seen |= {(row["block_number"], row["block_hash"]) for row in pairs.to_pylist()}
    for number, stored_hash in sorted(seen, key=lambda pair: pair[0]):
        here, there = "0x" + (stored_hash or b"").hex(), hashes[number]
        if here == there:
            continue
        believers = [
            name
            for name, header in pool.headers_by_endpoint(number).items()
            if header and header["hash"] == here
        ]
        # An endpoint on a fork that will be left must not have good blocks made again.
        if believers:
            raise Unavailable(
                "EndpointsDisagree",
                f"block {number} is stored as {here}, as {', '.join(believers)} has it; others have {there}",
            )
        yield ChainFinding(number, number, f"is stored as {here}, the chain's is {there}")


def _headers(pool: Pool, start: int, end: int) -> dict[int, dict[str, Any]]:
    numbers = range(start, end + 1)
    answers = pool.batch([("eth_getBlockByNumber", (hex(number), False)) for number in numbers])
    found = {}
    for number, answer in zip(numbers, answers, strict=True):
        # The endpoint of the batch may be behind; the pool asks the others.
        header = answer if answer is not None else pool.header(number)
        if header is None:
            raise Unavailable("BlockNotFound", f"block {number} is stored, but no endpoint has it now")
        found[number] = header
    return found


def _other_rows(
    dataset: ChainTable, stored: pa.Table, chain: pa.Table, start: int, end: int
) -> Iterator[ChainFinding]:
    names = [name for name in chain.column_names if name not in _NOT_PROVEN]
    stored, chain = stored.select(names), chain.select(names)
    # The usual case takes one native comparison instead of a loop over the blocks.
    if stored.equals(chain):
        return
    for number in range(start, end + 1):
        here, there = _of_block(stored, number), _of_block(chain, number)
        if here.num_rows != there.num_rows:
            what = f"has {here.num_rows} rows in {dataset}, the chain {there.num_rows}"
            yield ChainFinding(number, number, what)
        elif different := [name for name in names if not here.column(name).equals(there.column(name))]:
            yield ChainFinding(number, number, f"has other values in {dataset}: {', '.join(different)}")


def _of_block(rows: pa.Table, number: int) -> pa.Table:
    return rows.filter(pc.equal(rows.column("block_number"), number)).combine_chunks()


def _by_block(rows: pa.Table, start: int, end: int) -> npt.NDArray[np.int64]:
    blocks = rows.column("block_number").to_numpy() - start
    return np.bincount(blocks, minlength=end - start + 1)


def _blooms(logs: pa.Table) -> dict[int, int]:
    """The filter of each block's stored logs, as a number."""
    found: dict[int, int] = {}
    columns = [logs.column(name).to_pylist() for name in ("block_number", "address", *_TOPICS)]
    for number, *values in zip(*columns, strict=True):
        bits = found.get(number, 0)
        for value in values:
            if value is not None:
                bits |= bits_of("0x" + value.hex())
        found[number] = bits
    return found
