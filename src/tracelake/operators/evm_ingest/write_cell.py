"""What executors do: fetch the blocks of a cell, each once, and write the files of all outputs as they come in.

Decoded rows go to their files a few hundred blocks at a time, so that memory depends on how dense blocks are and
not on how many there are. Nothing but the report leaves the executor. Its pool stays open for cells to come soon:
connections are warm then, and what was learnt about the endpoints is still known.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import BlockRange
from tracelake.evm.decode import decode
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.portions import need_receipts, portions
from tracelake.evm.raw_block import Dataset, RawBlock, Verify
from tracelake.evm.rpc.kept_pool import kept_pool
from tracelake.operators.cell_file import CellFile
from tracelake.operators.cell_report import CellProblem, CellReport
from tracelake.operators.parquet_output import ParquetPlan

UNFORESEEN = "IngestFailed"


@dataclass(frozen=True, slots=True)
class IngestWork:
    """What executors need to know, sent by pickle. ``share`` is a cell's part of the endpoints' limits."""

    plans: dict[Dataset, ParquetPlan]
    pool: PoolConfig = field(repr=False)
    share: float
    chain_id: int
    verify: Verify

    @property
    def grid(self) -> ParquetPlan:
        """All outputs are cut alike."""
        return next(iter(self.plans.values()))


def write_cell(work: IngestWork, cell: int) -> CellReport:
    span = work.grid.span(cell)
    try:
        with _uncollected():
            return _write(work, cell, span)
    except Exception as error:
        return CellReport(start=span.start, end=span.end, problem=CellProblem.of(error, span, UNFORESEEN))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Parsed JSON has no cycles and is gone with its last use: a collector that walks it over and over would add a
    third to the parsing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _write(work: IngestWork, cell: int, span: BlockRange) -> CellReport:
    first = last = None
    endpoints: set[str] = set()
    with ExitStack() as undo:
        files = [CellFile(dataset, plan, cell) for dataset, plan in work.plans.items()]
        for file in files:
            undo.callback(file.discard)
        for blocks in portions(_fetch(work, span)):
            for file in files:
                file.add(pa.Table.from_batches([decode(blocks, file.dataset, work.chain_id)]))
            first, last = first or blocks[0].block, blocks[-1].block
            endpoints.update(each.endpoint for each in blocks)
        written = {str(file.dataset): done for file in files if (done := file.close()) is not None}
        undo.pop_all()
    assert first is not None
    assert last is not None
    return CellReport(
        start=span.start,
        end=span.end,
        files=written,
        parent_hash=first["parentHash"],
        last_hash=last["hash"],
        endpoints=sorted(endpoints),
    )


def _fetch(work: IngestWork, span: BlockRange) -> Iterator[RawBlock]:
    with kept_pool(work.pool, share=work.share) as pool:
        yield from fetch_blocks(
            pool,
            range(span.start, span.end + 1),
            receipts=need_receipts(work.plans),
            traces=Dataset.TRACES in work.plans,
            verify=work.verify,
        )
