"""What executors do: read the stored rows of a cell, some blocks at a time, and say what is wrong with them."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import BlockRange
from tracelake.evm.raw_block import Dataset, Verify
from tracelake.evm.rpc.kept_pool import kept_pool
from tracelake.operators.cell_report import CellProblem
from tracelake.operators.integrity_check.chain_check import against_content, against_headers
from tracelake.operators.stored_chain.blocks_check import SpanEdge, known_blocks, unjoined
from tracelake.operators.stored_chain.finding import Finding, merged
from tracelake.operators.stored_chain.rows_check import RowsCheck
from tracelake.operators.stored_chain.stored_table import StoredTable

UNFORESEEN = "CheckFailed"
MAX_FOUND = 1000
"""More than this wrong in one cell says no more than that all of it is."""

# So many blocks' rows are in memory at a time.
_PORTION = 100


@dataclass(frozen=True, slots=True)
class CheckWork:
    """What executors need to know; travels to them by pickle. ``share`` is a cell's part of the pool's limits."""

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


class CellFound(msgspec.Struct, frozen=True, kw_only=True):
    start: int
    end: int
    findings: list[Finding] = []
    edge: SpanEdge | None = None
    problem: CellProblem | None = None


def check_cell(work: CheckWork, number: int) -> CellFound:
    cell = work.cell(number)
    try:
        return _check(work, cell)
    except Exception as error:
        problem = CellProblem.of(error, cell, UNFORESEEN)
        return CellFound(start=cell.start, end=cell.end, problem=problem)


def _check(work: CheckWork, cell: BlockRange) -> CellFound:
    findings: list[Finding] = []
    edges: list[SpanEdge] = []
    for start in range(cell.start, cell.end + 1, _PORTION):
        end = min(start + _PORTION - 1, cell.end)
        rows = {table.dataset: table.rows(start, end) for table in work.tables}
        wrong, edge = against_themselves(rows, start, end)
        findings += wrong
        edges += [edge] if edge is not None else []
        findings += _against_chain(work, rows, start, end)
    found = merged([*findings, *unjoined(edges)])
    if len(found) > MAX_FOUND:
        found = [Finding(cell.start, cell.end, f"{len(found)} things are wrong, such as: {found[0]}")]
    whole = SpanEdge(cell.start, cell.end, edges[0].first_parent, edges[-1].last_hash) if edges else None
    return CellFound(start=cell.start, end=cell.end, findings=found, edge=whole)


def _against_chain(work: CheckWork, rows: dict[Dataset, pa.Table], start: int, end: int) -> list[Finding]:
    if work.pool is None or work.verify is Verify.OFF:
        return []
    with kept_pool(work.pool, share=work.share) as pool:
        if work.verify is Verify.BLOOM:
            return list(against_headers(pool, rows, start, end))
        return list(against_content(pool, rows, start, end, work.chain_id))


def against_themselves(
    rows: dict[Dataset, pa.Table], start: int, end: int
) -> tuple[list[Finding], SpanEdge | None]:
    """Without the blocks there is nothing to hold the other tables against."""
    blocks = rows.get(Dataset.BLOCKS)
    if blocks is None:
        return [], None
    known, findings = known_blocks(blocks, start, end)
    for dataset, table in rows.items():
        if dataset is not Dataset.BLOCKS:
            check = RowsCheck(dataset, known)
            check.add(table)
            findings += check.findings()
    return findings, known.edge
