"""``evm_ingest``: a block range of an EVM chain as Parquet tables, in one pass and proven against the headers.

    config: { rpc_pool: main, verify: full }
    outputs: [{ name: blocks }, { name: logs }, { name: withdrawals }]

Outputs say by their names what they hold: ``blocks``, ``transactions``, ``logs`` (these three without a word),
``receipts``, ``withdrawals``, ``traces``. ``verify`` is ``full`` (every root and hash recomputed), ``bloom`` or
``off``; ``finality`` how settled the last block must be: ``latest`` (any that is there), ``safe``, ``finalized`` or
a number of blocks below the tip; ``chain_id`` is checked when given; ``blocks_per_file`` sets the grid of files.

The range is cut on that grid, one Spark task per cell, and the executors write the files; a range that the chain
doesn't have yet, a chain that changes underneath, and an endpoint that is caught lying fail the attempt, which then
has committed nothing.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.raw_block import Dataset
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.operators.api import operator
from tracelake.operators.cell_report import CellReport
from tracelake.operators.chain_layout import chain_layout
from tracelake.operators.context import Context
from tracelake.operators.evm_ingest.check_chain import check_chain
from tracelake.operators.evm_ingest.config import IngestConfig, read_config
from tracelake.operators.evm_ingest.write_cell import UNFORESEEN, IngestWork, write_cell
from tracelake.operators.file_grid import blocks_per_file
from tracelake.operators.parquet_output import manifest_of
from tracelake.operators.spark_cells import run_cells
from tracelake.operators.spark_slots import spark_slots

if TYPE_CHECKING:
    from tracelake.operators.parquet_output import ParquetPlan


@operator("evm_ingest")
def evm_ingest(ctx: Context) -> None:
    config = read_config(ctx.config, [output.name for output in ctx.outputs])
    pool = ctx.rpc_pool()
    if ctx.scope is None or ctx.scope.blocks is None:
        raise Invalid("InvalidScope", "evm_ingest needs a block range: run it PerPartition")
    span = ctx.scope.blocks
    chain_id = settled(pool, config, span)
    work = IngestWork(plans(ctx, config, chain_id), pool, 1 / spark_slots(ctx.spark), chain_id, config.verify)
    ctx.log.info("ingesting", start=span.start, end=span.end, chain_id=chain_id, cells=work.grid.cells)
    cells = work.grid.numbers
    reports = run_cells(ctx, cells, partial(write_cell, work), CellReport, span, incomplete=UNFORESEEN)
    check_chain(reports)
    endpoints = tuple(sorted({name for report in reports for name in report.endpoints}))
    for dataset, plan in work.plans.items():
        files = [report.files[dataset] for report in reports if dataset in report.files]
        manifest = manifest_of(
            files, plan, TABLES[dataset].arrow, verified=verified(config, dataset), endpoints=endpoints
        )
        ctx.outputs[str(dataset)].wrote(plan, manifest)
        ctx.log.info("written", output=str(dataset), rows=manifest.row_count, files=len(manifest.files))


def settled(config: PoolConfig, wish: IngestConfig, span: BlockRange) -> int:
    """The chain's id, once it is the one that is meant and has all blocks, as settled as they should be."""
    with Pool(config) as pool:
        chain_id = pool.chain_id(wish.chain_id)
        limit, what = _reach(pool, wish.finality)
    if span.end > limit:
        missing = max(span.start, limit + 1)
        raise Unavailable("BlockNotFound", f"block {missing} isn't there yet: {what}")
    return chain_id


def plans(ctx: Context, config: IngestConfig, chain_id: int) -> dict[Dataset, ParquetPlan]:
    size = blocks_per_file(len(ctx.blocks), config.blocks_per_file)
    return {
        dataset: ctx.outputs[str(dataset)].plan(
            blocks_per_file=size,
            layout=chain_layout(dataset, chain_id=chain_id, verified=verified(config, dataset)),
        )
        for dataset in config.datasets
    }


def verified(config: IngestConfig, dataset: Dataset) -> str:
    """Nothing in a header covers traces."""
    return "off" if dataset is Dataset.TRACES else str(config.verify)


def _reach(pool: Pool, finality: str | int) -> tuple[int, str]:
    """The highest block that may be taken, and how to say why not one more."""
    if finality in ("safe", "finalized"):
        tag = pool.safe() if finality == "safe" else pool.finalized()
        if tag is not None:
            return tag, f"the chain's {finality} block is {tag}"
        raise Invalid(
            "NoFinality", f"no endpoint knows a {finality} block: give finality as a number of blocks"
        )
    head = pool.head()
    if isinstance(finality, int):
        return head.number - finality, f"{head.endpoint} is at {head.number}, less {finality} for finality"
    return head.number, f"{head.endpoint} is at {head.number}"
