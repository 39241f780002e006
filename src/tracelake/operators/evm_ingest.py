"""``evm_ingest``: a block range of an EVM chain as Parquet tables, in one pass and proven against the headers.

    config: { rpc_pool: main, verify: full }
    outputs: [{ name: blocks }, { name: logs }, { name: withdrawals }]

``domain.operators.evm_ingest`` declares its settings; an output's name says which table it holds. The range is cut
on the grid of files, one Spark task per cell. An executor fetches each block of its cell once and writes the files
of all outputs as blocks come in, a few hundred at a time, so that memory depends on how dense blocks are and not
on how many there are. Nothing but the report leaves it. Its pool stays open for the next cells: connections are
warm then, and the limits of the endpoints known.

Cells are fetched at different times from different endpoints, and must be parts of one chain. A range that the
chain doesn't have yet, a chain that changes meanwhile, and an endpoint that returns wrong data fail the attempt,
which then has committed nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import pyarrow as pa

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.operators.evm_ingest import SPEC
from tracelake.domain.operators.shared_settings import CHAIN_TABLES
from tracelake.evm.decode import decode
from tracelake.evm.fetch import fetch_span
from tracelake.evm.raw_block import ChainTable, Senders, Verify, portions
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.operators.cells import (
    CellFile,
    CellProblem,
    CellReport,
    blocks_per_file,
    chain_edges,
    chain_layout,
    run_cells,
    spark_slots,
)
from tracelake.operators.context import Context
from tracelake.operators.registry import operator
from tracelake.tables.parquet import ParquetPlan, manifest_of

UNFORESEEN = "IngestFailed"


@operator(SPEC.name)
def evm_ingest(ctx: Context) -> None:
    config = read_config(ctx.config, [output.name for output in ctx.outputs])
    pool = ctx.rpc_pool()
    if ctx.scope is None or ctx.scope.blocks is None:
        raise Invalid("InvalidScope", "evm_ingest needs a block range: run it PerPartition")
    span = ctx.scope.blocks
    # Before executors get work: a range that isn't there yet would occupy them in vain.
    chain_id = check_settled(pool, config, span)
    work = IngestWork(
        # Each cell has a pool of its own, so each gets a part of the endpoints' limits.
        plan_outputs(ctx, config, chain_id),
        pool,
        1 / spark_slots(ctx.spark),
        chain_id,
        config.verify,
        config.senders,
    )
    ctx.log.info("ingesting", start=span.start, end=span.end, chain_id=chain_id, cells=work.grid.cells)
    cells = work.grid.numbers
    reports = run_cells(ctx, cells, partial(write_cell, work), CellReport, span, incomplete=UNFORESEEN)
    # Each cell is proven by itself; that they are of one chain shows only here.
    check_chain(reports)
    endpoints = tuple(sorted({name for report in reports for name in report.endpoints}))
    for dataset, plan in work.plans.items():
        files = [report.files[dataset] for report in reports if dataset in report.files]
        manifest = manifest_of(
            files,
            plan,
            TABLES[dataset].arrow,
            verified=verified_level(config, dataset),
            endpoints=endpoints,
            edges=chain_edges(reports),
        )
        ctx.outputs[str(dataset)].wrote(plan, manifest)
        ctx.log.info("written", output=str(dataset), rows=manifest.row_count, files=len(manifest.files))


def check_settled(config: PoolConfig, wish: IngestConfig, span: BlockRange) -> int:
    """Check that the pool is on the right chain and has all blocks, settled as ``finality`` requires; returns the
    chain's id."""
    with Pool(config) as pool:
        chain_id = pool.chain_id(wish.chain_id)
        limit, what = _reach(pool, wish.finality)
    if span.end > limit:
        missing = max(span.start, limit + 1)
        raise Unavailable("BlockNotFound", f"block {missing} isn't there yet: {what}")
    return chain_id


def plan_outputs(ctx: Context, config: IngestConfig, chain_id: int) -> dict[ChainTable, ParquetPlan]:
    size = blocks_per_file(len(ctx.blocks), config.blocks_per_file)
    return {
        dataset: ctx.outputs[str(dataset)].plan(
            blocks_per_file=size,
            layout=chain_layout(dataset, chain_id=chain_id, verified=verified_level(config, dataset)),
        )
        for dataset in config.datasets
    }


def verified_level(config: IngestConfig, dataset: ChainTable) -> str:
    """Nothing in a header covers traces: they belong to the block, as its parts do with ``bloom``."""
    traced = dataset is ChainTable.TRACES and config.verify is Verify.FULL
    return str(Verify.BLOOM if traced else config.verify)


def _reach(pool: Pool, finality: str | int) -> tuple[int, str]:
    """The highest block that may be read, and the explanation for a block above it."""
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


@dataclass(frozen=True, slots=True)
class IngestConfig:
    datasets: tuple[ChainTable, ...]
    verify: Verify
    senders: Senders
    finality: str | int
    chain_id: int | None = None
    blocks_per_file: int | None = None


def read_config(config: Mapping[str, Any], outputs: Sequence[str]) -> IngestConfig:
    """``outputs`` are the names of the job's outputs, in their order."""
    given = SPEC.read(config)
    for name in outputs:
        if name not in CHAIN_TABLES:
            known = ", ".join(CHAIN_TABLES)
            raise Invalid("InvalidOutput", f"evm_ingest has no output {name!r}; it has {known}")
    return IngestConfig(
        datasets=tuple(ChainTable(name) for name in outputs),
        verify=Verify(given.verify),
        senders=Senders(given.senders),
        finality=given.finality,
        chain_id=given.chain_id,
        blocks_per_file=given.blocks_per_file,
    )


@dataclass(frozen=True, slots=True)
class IngestWork:
    """The work of executors, sent by pickle. ``share`` is a cell's part of the endpoints' limits."""

    plans: dict[ChainTable, ParquetPlan]
    pool: PoolConfig = field(repr=False)
    share: float
    chain_id: int
    verify: Verify
    senders: Senders

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
    """Without garbage collection: parsed JSON has no cycles, and a collector that walks it again and again would
    add a third to the time of parsing."""
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
        fetched = fetch_span(work.pool, span, work.plans.keys(), work.verify, work.senders, share=work.share)
        for blocks in portions(fetched):
            for file in files:
                file.add(pa.Table.from_batches([decode(blocks, file.dataset, work.chain_id)]))
            first, last = first or blocks[0].block, blocks[-1].block
            endpoints.update(each.endpoint for each in blocks)
        written = {str(file.dataset): done for file in files if (done := file.close()) is not None}
        # The files are whole; until here a failure removes them.
        undo.pop_all()
    assert first is not None
    assert last is not None
    return CellReport(
        start=span.start,
        end=span.end,
        files=written,
        parent_hash=first["parentHash"],
        first_hash=first["hash"],
        last_hash=last["hash"],
        endpoints=sorted(endpoints),
    )


def check_chain(reports: Iterable[CellReport]) -> None:
    """``reports`` in the order of blocks, one right after another."""
    for before, after in pairwise(reports):
        if after.parent_hash != before.last_hash:
            raise Unavailable(
                "ChainChanged",
                f"block {after.start} follows on {after.parent_hash}, but block {before.end} was "
                f"{before.last_hash} when it was fetched: the chain has changed meanwhile",
            )
