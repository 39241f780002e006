"""What executors do: read the hot rows of a cell, check that they are whole, and write them as they come.

All tables of a cell are read at the attempt's one snapshot and checked while they pass: every block there once and
the child of the one before, every other row of a stored block, none missing and none twice. Rows that aren't whole
are no mistake of the job's, but of the moment: the attempt fails, says where, and is tried again.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import psycopg

from tracelake.contracts.manifest import ManifestFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Unavailable
from tracelake.evm.raw_block import Dataset
from tracelake.operators.cell_file import CellFile
from tracelake.operators.cell_report import CellProblem, CellReport
from tracelake.operators.parquet_output import ParquetPlan
from tracelake.operators.postgres_scan import PostgresScan
from tracelake.operators.stored_chain.blocks_check import COLUMNS, COUNT, KnownBlocks, known_blocks
from tracelake.operators.stored_chain.finding import Finding
from tracelake.operators.stored_chain.hot_rows import hot_columns, hot_rows
from tracelake.operators.stored_chain.rows_check import RowsCheck

UNFORESEEN = "CompactFailed"
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class CompactWork:
    """What executors need to know; travels to them by pickle. The other tables are checked against the blocks,
    where these are among them."""

    plans: dict[Dataset, ParquetPlan]
    scans: dict[Dataset, PostgresScan]

    @property
    def grid(self) -> ParquetPlan:
        """All outputs are cut alike."""
        return next(iter(self.plans.values()))


def write_cell(work: CompactWork, cell: int) -> CellReport:
    span = work.grid.span(cell)
    try:
        with next(iter(work.scans.values())).connected() as connection:
            return _write(work, connection, cell, span)
    except Exception as error:
        return CellReport(start=span.start, end=span.end, problem=CellProblem.of(error, span, UNFORESEEN))


def _write(work: CompactWork, connection: psycopg.Connection, cell: int, span: BlockRange) -> CellReport:
    known = _known(work, connection, span)
    files: dict[str, ManifestFile] = {}
    with ExitStack() as undo:
        for dataset, plan in work.plans.items():
            file = CellFile(dataset, plan, cell)
            undo.callback(file.discard)
            check = RowsCheck(dataset, known) if known and dataset != Dataset.BLOCKS else None
            for rows in hot_rows(connection, work.scans[dataset], span):
                file.add(rows)
                if check is not None:
                    check.add(rows)
            refuse(check.findings() if check is not None else [])
            if (written := file.close()) is not None:
                files[str(dataset)] = written
        undo.pop_all()
    return CellReport(
        start=span.start,
        end=span.end,
        files=files,
        parent_hash=known.edge.first_parent if known else "",
        last_hash=known.edge.last_hash if known else "",
    )


def _known(work: CompactWork, connection: psycopg.Connection, span: BlockRange) -> KnownBlocks | None:
    scan = work.scans.get(Dataset.BLOCKS)
    if scan is None:
        return None
    rows = hot_columns(connection, scan, (*COLUMNS, COUNT), span)
    known, findings = known_blocks(rows, span.start, span.end)
    refuse(findings)
    return known


def refuse(findings: list[Finding]) -> None:
    if findings:
        more = f" and {len(findings) - _SHOWN} more" if len(findings) > _SHOWN else ""
        told = "; ".join(map(str, findings[:_SHOWN]))
        raise Unavailable("HotIncomplete", f"the hot rows aren't whole: {told}{more}")
