"""``parquet_compact``: the final rows of hot tables as Parquet, in the files that an ingest would have written.

    inputs:
      - { from: { job: ranges } }                                  # triggers, and has the block ranges
      - { from: { job: follower, output: 0 }, trigger: false }     # stands for the follower's further outputs too
    outputs: 3
    config: { finality: finalized }

There is one output for each hot input, in their order; ``domain.operators.parquet_compact`` declares the settings.
Executors read the hot rows of their cells, all tables at the attempt's one snapshot, and write them where they
read them. Rows are checked on the way: every block there once and the child of the one before, every other row of
a stored block, none missing and none twice. Incomplete rows are no mistake of the job's: the attempt fails, says
where, and is tried again. Nothing is committed unless the range is whole.

The completion detects invalidations in between. The hot rows stay; readers of both see each block once
(``hot_and_cold``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

from tracelake.contracts.manifest import ManifestFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.operators.parquet_compact import SPEC
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.operators.cells import (
    CellFile,
    CellProblem,
    CellReport,
    blocks_per_file,
    chain_edges,
    chain_layout,
    run_cells,
)
from tracelake.operators.chain_checks import (
    CHAIN,
    COLUMNS,
    COUNT,
    ChainFinding,
    KnownBlocks,
    RowsCheck,
    SpanEdge,
    known_blocks,
    unjoined,
)
from tracelake.operators.context import Context
from tracelake.operators.inputs import Input
from tracelake.operators.outputs import Output
from tracelake.operators.registry import operator
from tracelake.operators.stored_chain import chain_scan, read_hot_columns, read_hot_rows
from tracelake.tables.data_database import SQL
from tracelake.tables.parquet import ParquetPlan, manifest_of
from tracelake.tables.postgres_scan import PostgresScan, hot_table_name, reading_errors

UNFORESEEN = "CompactFailed"
_SHOWN = 5


class CompactedTable(NamedTuple):
    """A table and its hot and cold side."""

    hot: Input
    scan: PostgresScan
    cold: Output


Tables = dict[ChainTable, CompactedTable]


@operator(SPEC.name)
def parquet_compact(ctx: Context) -> None:
    config = read_config(ctx.config)
    if ctx.scope is None or ctx.scope.blocks is None:
        raise Invalid("InvalidScope", "parquet_compact needs a block range: run it PerPartition")
    span = ctx.scope.blocks
    hot = [source for source in ctx.inputs if source.storage == "postgres"]
    if not hot or len(hot) != len(ctx.outputs):
        raise Invalid("InvalidConfig", "parquet_compact has one output for each input in postgres")
    tables = pair_tables(hot, list(ctx.outputs))
    chain_id, highest = _found(hot[0], span)
    # Before rows are read: files of blocks that may still change would have to be invalidated.
    check_final(span, config.finality, [source.finalized for source in hot], highest)
    size = blocks_per_file(len(ctx.blocks), config.blocks_per_file)
    work = _work(tables, config, size, chain_id)
    ctx.log.info("compacting", start=span.start, end=span.end, cells=work.grid.cells)
    cells = work.grid.numbers
    reports = run_cells(ctx, cells, partial(write_cell, work), CellReport, span, incomplete=UNFORESEEN)
    # Cells are whole in themselves; whether they join is known only here.
    refuse_incomplete(unjoined([_edge(report) for report in reports]))
    for dataset, table in tables.items():
        plan = work.plans[dataset]
        files = [report.files[dataset] for report in reports if dataset in report.files]
        manifest = manifest_of(
            files, plan, TABLES[dataset].arrow, verified=config.verified, edges=chain_edges(reports)
        )
        table.cold.wrote(plan, manifest)
        ctx.log.info("written", output=table.cold.name, rows=manifest.row_count, files=len(manifest.files))


def pair_tables(hot: Sequence[Input], cold: Sequence[Output]) -> Tables:
    """Outputs by chain table, which the columns of the hot input identify."""
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
        tables[dataset] = CompactedTable(source, scan, output)
    return tables


def _edge(report: CellReport) -> SpanEdge:
    return SpanEdge(report.start, report.end, report.parent_hash, report.last_hash)


def _found(source: Input, span: BlockRange) -> tuple[int | None, int | None]:
    """The chain that the rows are of, and the highest block that there are rows of."""
    statement = sql.SQL(SQL.chain_and_highest).format(
        table=sql.Identifier("data", hot_table_name(source.dataset_version)),
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


@dataclass(frozen=True, slots=True)
class CompactConfig:
    """``verified`` is the level that the source has checked; it is recorded in the files."""

    finality: str | int
    blocks_per_file: int | None
    verified: str | None


def read_config(config: Mapping[str, Any]) -> CompactConfig:
    given = SPEC.read(config)
    return CompactConfig(given.finality, given.blocks_per_file, given.verified)


def check_final(
    span: BlockRange, finality: str | int, reported: Sequence[int | None], highest: int | None
) -> None:
    """``reported`` are the blocks that the source has reported as final, by output; ``highest`` is its highest
    block.

    The blocks of a source that reports none count as final, as for ``range_aggregator``.
    """
    known = [number for number in reported if number is not None]
    if finality == "finalized" and known and span.end > max(known):
        raise _not_final(span.end, f"the source reports {max(known)} as final")
    if isinstance(finality, int) and (highest is None or span.end > highest - finality):
        raise _not_final(span.end, f"the highest block is {highest}, and finality {finality} blocks below it")


def _not_final(block: int, why: str) -> Unavailable:
    return Unavailable("NotFinal", f"block {block} isn't final yet: {why}")


@dataclass(frozen=True, slots=True)
class CompactWork:
    """The work of executors, sent by pickle. The other tables are checked against the blocks, if these are among
    them."""

    plans: dict[ChainTable, ParquetPlan]
    scans: dict[ChainTable, PostgresScan]

    @property
    def grid(self) -> ParquetPlan:
        """All outputs are cut alike."""
        return next(iter(self.plans.values()))


def write_cell(work: CompactWork, cell: int) -> CellReport:
    span = work.grid.span(cell)
    try:
        # Any scan will do, since all of them are in the attempt's one snapshot.
        with next(iter(work.scans.values())).connected() as connection:
            return _write(work, connection, cell, span)
    except Exception as error:
        return CellReport(start=span.start, end=span.end, problem=CellProblem.of(error, span, UNFORESEEN))


def _write(work: CompactWork, connection: psycopg.Connection, cell: int, span: BlockRange) -> CellReport:
    # First, since the rows of the other tables are checked against the blocks.
    known = _known(work, connection, span)
    files: dict[str, ManifestFile] = {}
    with ExitStack() as undo:
        for dataset, plan in work.plans.items():
            file = CellFile(dataset, plan, cell)
            undo.callback(file.discard)
            check = RowsCheck(dataset, known) if known and dataset != ChainTable.BLOCKS else None
            for rows in read_hot_rows(connection, work.scans[dataset], span):
                file.add(rows)
                if check is not None:
                    check.add(rows)
            refuse_incomplete(check.findings() if check is not None else [])
            if (written := file.close()) is not None:
                files[str(dataset)] = written
        # The cell is whole; until here a failure removes its files.
        undo.pop_all()
    return CellReport(
        start=span.start,
        end=span.end,
        files=files,
        parent_hash=known.edge.first_parent if known else "",
        first_hash=known.edge.first_hash if known else "",
        last_hash=known.edge.last_hash if known else "",
    )


def _known(work: CompactWork, connection: psycopg.Connection, span: BlockRange) -> KnownBlocks | None:
    scan = work.scans.get(ChainTable.BLOCKS)
    if scan is None:
        return None
    rows = read_hot_columns(connection, scan, (*COLUMNS, COUNT, CHAIN), span)
    known, findings = known_blocks(rows, span.start, span.end)
    refuse_incomplete(findings)
    return known


def refuse_incomplete(findings: list[ChainFinding]) -> None:
    if findings:
        more = f" and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
        shown = "; ".join(map(str, findings[:_SHOWN]))
        raise Unavailable("HotIncomplete", f"the hot rows are incomplete: {shown}{more}")
