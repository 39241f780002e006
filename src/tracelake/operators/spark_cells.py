"""A range of blocks cut into cells, each the work of one Spark task, which sends back a small report.

Executors turn the number of a cell into a report; the driver hears of them as they come in, in the order of blocks.
The first problem ends it: the attempt fails with what the executor says, and Spark is told to stop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec
import pyarrow as pa

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Unavailable
from tracelake.operators.cell_report import CellProblem

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from tracelake.operators.context import Context

_DDL = "report string"
_LONGEST = 500


class Report(Protocol):
    """What a cell came to; a ``msgspec.Struct``, since it travels as JSON."""

    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def problem(self) -> CellProblem | None: ...


R = TypeVar("R", bound=Report)


def run_cells(
    ctx: Context, cells: range, work: Callable[[int], R], kind: type[R], span: BlockRange, incomplete: str
) -> list[R]:
    """``work`` is done by executors, on the number of each cell, and travels to them by pickle. Answers the reports
    of all of ``span`` in the order of blocks; ``incomplete`` is the reason when some are missing."""
    numbers = ctx.spark.range(cells.start, cells.stop, 1, len(cells))
    total = span.end - span.start + 1
    reports: list[R] = []
    ctx.progress(done=0, total=total)
    for report in _reports(numbers.mapInArrow(partial(_on_executor, work), _DDL), kind):
        if report.problem is not None:
            sys.stderr.write(report.problem.detail)
            raise report.problem.error()
        reports.append(report)
        ctx.progress(done=report.end - span.start + 1, total=total)
    return whole(reports, span, incomplete)


def whole(reports: Iterable[R], span: BlockRange, incomplete: str) -> list[R]:
    """In the order of blocks, once it is certain that there is one about each of them."""
    ordered = sorted(reports, key=lambda report: report.start)
    following = span.start
    for report in ordered:
        if report.start != following:
            break
        following = report.end + 1
    if following != span.end + 1:
        raise Unavailable(incomplete, f"Spark brought no report about block {following}")
    return ordered


def _on_executor(
    work: Callable[[int], Report], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            report = msgspec.json.encode(work(number)).decode()
            yield pa.RecordBatch.from_pydict({"report": [report]})


def _reports(done: DataFrame, kind: type[R]) -> Iterator[R]:
    from pyspark.errors import PySparkException

    try:
        for row in done.toLocalIterator():
            yield msgspec.json.decode(row[0], type=kind)
    except PySparkException as error:
        # Of an executor that is gone, or a Spark: the rest of what it says is in the attempt's log.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise Unavailable("SparkFailed", f"Spark could not do it: {lines[0][:_LONGEST]}") from error
