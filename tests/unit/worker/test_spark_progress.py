"""Spark's reports become a few sums, told seldom enough for a task's row and never lost at the end."""

from __future__ import annotations

from typing import Any

from pyspark.sql.connect.shell.progress import StageInfo

from tracelake.worker.spark.session import SparkProgress


class Listener:
    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.now = 100.0
        self.progress = SparkProgress(self.told.append, interval=0.5, clock=lambda: self.now)

    def report(self, operation: str, *stages: StageInfo, after: float = 1.0) -> None:
        self.now += after
        self.progress(stages, 0, operation, done=False)


def stage(number: int, tasks: int, completed: int, read: int = 0, *, done: bool = False) -> StageInfo:
    return StageInfo(number, tasks, completed, read, done)


def test_operations_of_an_attempt_add_up() -> None:
    listener = Listener()

    listener.report("a", stage(0, 4, 4, 100, done=True), stage(1, 2, 1, 10))
    listener.report("b", stage(2, 3, 0))

    assert listener.told[-1] == {
        "stages": 3,
        "stages_done": 1,
        "tasks": 9,
        "tasks_done": 5,
        "rows": 0,
        "bytes": 110,
    }


def test_a_later_report_of_a_stage_replaces_the_earlier_one() -> None:
    listener = Listener()

    listener.report("a", stage(0, 4, 1))
    listener.report("a", stage(0, 4, 4, done=True))

    assert listener.told[-1]["tasks_done"] == 4
    assert listener.told[-1]["stages"] == 1


def test_reports_in_quick_succession_are_told_once_and_the_last_at_the_end() -> None:
    listener = Listener()

    for completed in range(5):
        listener.report("a", stage(0, 5, completed), after=0.01)
    assert len(listener.told) == 1

    listener.progress.add_rows(7)
    listener.progress.finish()
    listener.progress.finish()

    assert [fields["tasks_done"] for fields in listener.told] == [0, 4]
    assert listener.told[-1]["rows"] == 7


def test_an_operation_that_is_over_has_nothing_left_to_do() -> None:
    listener = Listener()

    listener.report("a", stage(0, 4, 1, 100))
    listener.now += 1
    listener.progress(None, 0, "a", done=True)

    assert (listener.told[-1]["stages_done"], listener.told[-1]["tasks_done"]) == (1, 4)


def test_an_attempt_that_did_nothing_on_spark_tells_nothing() -> None:
    listener = Listener()

    listener.report("a")
    listener.progress.finish()

    assert listener.told == []
