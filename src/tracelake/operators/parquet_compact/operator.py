"""``parquet_compact``: the final rows of hot tables as Parquet, in the files that an ingest would have written.

    inputs:
      - { from: { job: ranges } }                                  # what triggers, and says which blocks
      - { from: { job: follower, output: 0 }, trigger: false }     # stands for the follower's further outputs too
    outputs: 3
    config: { finality: finalized }

One output for each hot input, in their order. ``finality`` is ``finalized`` (what the source has said can't be
taken back; one that says nothing is taken at its word), a number of blocks below the highest, or ``latest``;
``blocks_per_file`` sets the grid of files; ``verified`` is what the source has checked, for the files to say.

The rows are read by executors, at one snapshot of the data database, and written where they are read. Nothing is
committed unless the range is whole: see ``write_cell``. What is taken back meanwhile is found by the completion.
The hot rows stay; readers of both see each block once (``hot_and_cold``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from psycopg import sql

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES
from tracelake.operators.api import operator
from tracelake.operators.cell_report import CellReport
from tracelake.operators.chain_layout import chain_layout
from tracelake.operators.context import Context
from tracelake.operators.data_database import SQL
from tracelake.operators.file_grid import blocks_per_file
from tracelake.operators.inputs import Input
from tracelake.operators.outputs import Output
from tracelake.operators.parquet_compact.config import CompactConfig, check_final, read_config
from tracelake.operators.parquet_compact.write_cell import UNFORESEEN, CompactWork, refuse, write_cell
from tracelake.operators.parquet_output import manifest_of
from tracelake.operators.postgres_scan import PostgresScan, reading_errors, table_of
from tracelake.operators.spark_cells import run_cells
from tracelake.operators.stored_chain.blocks_check import SpanEdge, unjoined
from tracelake.operators.stored_chain.hot_rows import chain_scan


class Compacted(NamedTuple):
    """One table on its way from hot to cold."""

    hot: Input
    scan: PostgresScan
    cold: Output


Tables = dict[Dataset, Compacted]


@operator("parquet_compact")
def parquet_compact(ctx: Context) -> None:
    config = read_config(ctx.config)
    if ctx.scope is None or ctx.scope.blocks is None:
        raise Invalid("InvalidScope", "parquet_compact needs a block range: run it PerPartition")
    span = ctx.scope.blocks
    hot = [source for source in ctx.inputs if source.storage == "postgres"]
    if not hot or len(hot) != len(ctx.outputs):
        raise Invalid("InvalidConfig", "parquet_compact has one output for each input in postgres")
    tables = pair(hot, list(ctx.outputs))
    chain_id, highest = _found(hot[0], span)
    check_final(span, config.finality, [source.finalized for source in hot], highest)
    size = blocks_per_file(len(ctx.blocks), config.blocks_per_file)
    work = _work(tables, config, size, chain_id)
    ctx.log.info("compacting", start=span.start, end=span.end, cells=work.grid.cells)
    cells = work.grid.numbers
    reports = run_cells(ctx, cells, partial(write_cell, work), CellReport, span, incomplete=UNFORESEEN)
    refuse(unjoined([_edge(report) for report in reports]))
    for dataset, table in tables.items():
        plan = work.plans[dataset]
        files = [report.files[dataset] for report in reports if dataset in report.files]
        manifest = manifest_of(files, plan, TABLES[dataset].arrow, verified=config.verified)
        table.cold.wrote(plan, manifest)
        ctx.log.info("written", output=table.cold.name, rows=manifest.row_count, files=len(manifest.files))


def pair(hot: Sequence[Input], cold: Sequence[Output]) -> Tables:
    """Which of the chain's tables each output is, told by the hot one that it is made of."""
    tables: Tables = {}
    for source, output in zip(hot, cold, strict=True):
        found = chain_scan(source.data, source.dataset_version, f"input {source.index}")
        if found is None:
            raise Unavailable("HotIncomplete", f"nothing was ever committed to input {source.index}")
        dataset, scan = found
        if dataset in tables:
            raise Invalid(
                "InvalidConfig", f"inputs {tables[dataset].hot.index} and {source.index} are both {dataset}"
            )
        tables[dataset] = Compacted(source, scan, output)
    return tables


def _edge(report: CellReport) -> SpanEdge:
    return SpanEdge(report.start, report.end, report.parent_hash, report.last_hash)


def _found(source: Input, span: BlockRange) -> tuple[int | None, int | None]:
    """The chain that the rows are of, and the highest block that there are rows of."""
    statement = sql.SQL(SQL.chain_and_highest).format(
        table=sql.Identifier("data", table_of(source.dataset_version)),
        start=sql.Literal(span.start),
        end=sql.Literal(span.end),
    )
    with reading_errors():
        row = source.data.snapshot().connection.execute(statement).fetchone()
    assert row is not None
    return row[0], row[1]


def _work(tables: Tables, config: CompactConfig, size: int, chain_id: int | None) -> CompactWork:
    plans = {
        dataset: table.cold.plan(
            blocks_per_file=size,
            layout=chain_layout(dataset, chain_id=chain_id, verified=config.verified),
        )
        for dataset, table in tables.items()
    }
    return CompactWork(plans, {dataset: table.scan for dataset, table in tables.items()})
