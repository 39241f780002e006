"""Cells: a range of blocks cut on a grid, each cell the work of one Spark task that returns a small report.

``reports_of`` sends the work to executors; the driver receives their reports. A report has a few numbers and
hashes, or a problem. A problem is part of the report and not an exception: Spark would retry an exception by
itself, and show it as Java text. On the driver it is raised as it was on the executor, with its reason and whether
trying again may help. ``run_cells`` also shows progress, ends the attempt and its Spark job with the first problem,
and returns the reports in the order of blocks, once they cover the range.

Ingest and compaction also share how chain tables become files: ``CellFile`` is one table's file of one cell,
``blocks_per_file`` the grid, ``chain_layout`` the layout. So the files are the same whichever operator writes them.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

import msgspec
import pyarrow as pa

from tracelake.contracts.manifest import ChainEdges, ManifestFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, TracelakeError, Unavailable
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.tables.parquet import ParquetFile, ParquetLayout, ParquetPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tracelake.operators.context import Context

_DDL = "report string"
_LONGEST = 500
# Spark splits a range without a number of partitions by its cores; the plan shows how, and is not run.
_SPLITS = re.compile(r"splits=(?:Some\()?(\d+)")
_BLOCK_HASH = re.compile(r"0x[0-9a-f]{64}", re.ASCII)
_MAX_DETAIL = 8000
# Sizes that divide each other and a thousand, so that files of neighbouring tasks meet on round numbers.
_SIZES = (1000, 500, 250, 125, 25)
_ENOUGH_FILES = 4
_MOST_FILES = 500
# Addresses of interest are often here, though hot tables have no index for them.
_ALSO_LOOKED_UP: Mapping[ChainTable, tuple[str, ...]] = {ChainTable.LOGS: ("topic1", "topic2")}
_UNIQUE: Mapping[ChainTable, tuple[str, ...]] = {
    ChainTable.BLOCKS: (
        "block_hash",
        "parent_hash",
        "logs_bloom",
        "state_root",
        "transactions_root",
        "receipts_root",
        "mix_hash",
        "parent_beacon_block_root",
    ),
    ChainTable.TRANSACTIONS: ("transaction_hash", "input", "r", "s"),
    ChainTable.LOGS: ("data",),
    ChainTable.RECEIPTS: ("transaction_hash",),
    ChainTable.WITHDRAWALS: ("withdrawal_index",),
    ChainTable.TRACES: ("action_input", "action_init", "result_output", "result_code"),
}


class CellOutcome(Protocol):
    """The report of a cell; a ``msgspec.Struct``, since it is sent as JSON."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def problem(self) -> CellProblem | None: ...


R = TypeVar("R", bound=CellOutcome)
T = TypeVar("T")


def run_cells(
    ctx: Context, cells: range, work: Callable[[int], R], kind: type[R], span: BlockRange, incomplete: str
) -> list[R]:
    """The reports of all of ``span`` in the order of blocks; ``incomplete`` is the reason of the error when some
    are missing."""
    total = span.end - span.start + 1
    reports: list[R] = []
    ctx.progress(done=0, total=total)
    for report in _as_unavailable(reports_of(ctx.spark, cells, work, kind)):
        if report.problem is not None:
            report.problem.fail()
        reports.append(report)
        ctx.progress(done=report.end - span.start + 1, total=total)
    return complete_reports(reports, span, incomplete)


def complete_reports(reports: Iterable[R], span: BlockRange, incomplete: str) -> list[R]:
    """The reports in the order of blocks; refused unless they cover all of ``span``."""
    ordered = sorted(reports, key=lambda report: report.start)
    following = span.start
    for report in ordered:
        # A gap would be committed as blocks without rows.
        if report.start != following:
            break
        following = report.end + 1
    if following != span.end + 1:
        raise Unavailable(incomplete, f"Spark brought no report about block {following}")
    return ordered


def reports_of(spark: SparkSession, cells: range, work: Callable[[int], T], kind: type[T]) -> Iterator[T]:
    """Executors call ``work``, which is sent by pickle, with the number of each cell; returns their reports. Errors
    of Spark itself are raised as they are."""
    numbers = spark.range(cells.start, cells.stop, 1, len(cells))
    for row in numbers.mapInArrow(partial(_on_executor, work), _DDL).toLocalIterator():
        yield msgspec.json.decode(row[0], type=kind)


def _on_executor(
    work: Callable[[int], object], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            report = msgspec.json.encode(work(number)).decode()
            yield pa.RecordBatch.from_pydict({"report": [report]})


def _as_unavailable(reports: Iterator[T]) -> Iterator[T]:
    from pyspark.errors import PySparkException

    try:
        yield from reports
    except PySparkException as error:
        # An executor or all of Spark is gone. The rest of the message is in the attempt's log.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise Unavailable("SparkFailed", f"Spark could not do it: {lines[0][:_LONGEST]}") from error


def spark_slots(spark: SparkSession) -> int:
    """Number of tasks that Spark runs at a time, which limits shared by all of them are divided by."""
    uncut: Any = spark.range(1 << 30)
    found = _SPLITS.search(uncut._explain_string())
    return int(found[1]) if found else 1


class CellProblem(msgspec.Struct, frozen=True):
    """``detail`` is for the attempt's log: the traceback of an unforeseen error."""

    reason: str
    message: str
    retryable: bool
    detail: str = ""

    @classmethod
    def of(cls, error: Exception, span: BlockRange, unforeseen: str) -> CellProblem:
        """``unforeseen`` is the reason of errors that have none of their own."""
        if isinstance(error, TracelakeError):
            # The platform's rule: ``Invalid`` is wrong again, however often it is tried.
            return cls(error.reason, error.message, not isinstance(error, Invalid))
        where = f"blocks {span.partition_key}: {type(error).__name__}: {error}"
        if isinstance(error, OSError):
            # A full disk or a lost mount may be mended before the next attempt.
            return cls("StorageFailed", where, True)
        return cls(unforeseen, where, True, traceback.format_exc()[-_MAX_DETAIL:])

    def error(self) -> TracelakeError:
        return (Unavailable if self.retryable else Invalid)(self.reason, self.message)

    def fail(self) -> NoReturn:
        # Standard error is the attempt's log.
        sys.stderr.write(self.detail)
        raise self.error()


class CellReport(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a cell, by table. ``parent_hash`` and ``first_hash`` are those of the first block, ``last_hash``
    the hash of the last one; empty where the blocks aren't known. ``endpoints`` are those that delivered the
    blocks."""

    start: int
    end: int
    files: dict[str, ManifestFile] = {}
    parent_hash: str = ""
    first_hash: str = ""
    last_hash: str = ""
    endpoints: list[str] = []
    problem: CellProblem | None = None


def chain_edges(reports: Sequence[CellReport]) -> ChainEdges | None:
    """The hashes that join the whole range to its neighbours, from reports in the order of blocks; None where they
    aren't hashes of 32 bytes, as on a chain of another kind."""
    first, last = reports[0], reports[-1]
    hashes = [first.parent_hash.lower(), first.first_hash.lower(), last.last_hash.lower()]
    if not all(map(_BLOCK_HASH.fullmatch, hashes)):
        return None
    return ChainEdges(parent_hash=hashes[0], first_hash=hashes[1], last_hash=hashes[2])


class CellFile:
    """One chain table's file of one cell. It is made with the first rows, and removed if the cell fails."""

    def __init__(self, dataset: ChainTable, plan: ParquetPlan, cell: int) -> None:
        self.dataset = dataset
        self._plan = plan
        self._cell = cell
        self._file: ParquetFile | None = None

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if self._file is None:
            place = self._plan.place(self._cell)
            schema = TABLES[self.dataset].arrow
            self._file = ParquetFile(place, schema, self._plan.block_column, self._plan.layout)
        self._file.add(rows)

    def close(self) -> ManifestFile | None:
        return self._file.close() if self._file is not None else None

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()


def blocks_per_file(blocks: int, wished: int | None) -> int:
    """``wished``, or else a size that follows from the scope alone, so that one task keeps several cores busy and
    its files are the same wherever it runs, and whichever operator writes them."""
    if wished is not None:
        return wished
    size = next((size for size in _SIZES if blocks >= _ENOUGH_FILES * size), _SIZES[-1])
    while blocks > size * _MOST_FILES:
        size *= 10
    return size


def chain_layout(
    dataset: ChainTable, *, chain_id: int | None = None, verified: str | None = None
) -> ParquetLayout:
    """Sorted as the table is, with filters for looked-up columns; the metadata has the verification level."""
    table = TABLES[dataset]
    looked_up = dict.fromkeys(name for lookup in table.lookups for name in lookup if name != "block_number")
    facts = {"tracelake.dataset": str(dataset)}
    if chain_id is not None:
        facts["tracelake.chain_id"] = str(chain_id)
    if verified is not None:
        facts["tracelake.verified"] = verified
    return ParquetLayout(
        sort_by=table.sort_by,
        lookups=(*looked_up, *_ALSO_LOOKED_UP.get(dataset, ())),
        unique=_UNIQUE[dataset],
        facts=facts,
    )
