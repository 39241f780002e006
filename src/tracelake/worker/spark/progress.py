"""What an attempt's Spark work has done so far, as a handful of numbers for the task's row.

Spark reports stages and bytes while an operation runs, and how many rows came out only once it is through, for
queries and not for writes (an operator that writes counts by itself). Operations shorter than its reporting
interval may not be reported at all. The numbers here are sums over all operations of the attempt. They are told
at most twice a second, from whichever thread runs the query, and once more at the end if something is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pyspark.sql.connect.shell.progress import ProgressHandler, StageInfo

Fields = dict[str, Any]
Told = Callable[[Fields], None]

INTERVAL = 0.5


@dataclass(slots=True)
class _Operation:
    """Stages come and go in the reports; what was seen of each stays."""

    stages: dict[int, tuple[int, int, int, bool]] = field(default_factory=dict)


class SparkProgress(ProgressHandler):
    def __init__(
        self, told: Told, *, interval: float = INTERVAL, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._told = told
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._operations: dict[str, _Operation] = {}
        self._rows = 0
        self._last: Fields | None = None
        self._last_at = float("-inf")

    def __call__(
        self, stages: Iterable[StageInfo] | None, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        """Spark's progress handler."""
        with self._lock:
            operation = self._operations.setdefault(operation_id or "", _Operation())
            for stage in stages or ():
                operation.stages[stage.stage_id] = (
                    stage.num_tasks,
                    stage.num_completed_tasks,
                    stage.num_bytes_read,
                    stage.done,
                )
            if done:
                # Spark doesn't report once more at the end; an operation that is over has nothing left to do.
                operation.stages = {
                    number: (tasks, tasks, read, True)
                    for number, (tasks, _, read, _) in operation.stages.items()
                }
        self._tell(now=False)

    def add_rows(self, rows: int) -> None:
        with self._lock:
            self._rows += rows
        self._tell(now=False)

    def finish(self) -> None:
        self._tell(now=True)

    def fields(self) -> Fields:
        stages: Sequence[tuple[int, int, int, bool]] = [
            stage for operation in self._operations.values() for stage in operation.stages.values()
        ]
        return {
            "stages": len(stages),
            "stages_done": sum(done for *_, done in stages),
            "tasks": sum(tasks for tasks, *_ in stages),
            "tasks_done": sum(completed for _, completed, *_ in stages),
            "rows": self._rows,
            "bytes": sum(read for *_, read, _ in stages),
        }

    def _tell(self, *, now: bool) -> None:
        with self._lock:
            moment = self._clock()
            if not now and moment - self._last_at < self._interval:
                return
            fields = self.fields()
            if fields == self._last or not any(fields.values()):
                return
            self._last, self._last_at = fields, moment
        self._told(fields)
