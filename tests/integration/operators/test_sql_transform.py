"""``sql_transform`` in a real operator process, on a real Spark: the test plays the wrapper and its Dispatcher."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.operator_process import OperatorUnderTest, a_task, an_output, operator_process
from tracelake.contracts.dispatcher_api import InputFile, PayloadInput
from tracelake.contracts.operator_protocol import (
    Call,
    Cancel,
    Finished,
    ListFiles,
    Progress,
    Reply,
    SparkTarget,
)
from tracelake.objects.base import ObjectLocation

LOGS = pa.table(
    {
        "block_number": pa.array([1, 1, 2, 4, 9, 9, 12], pa.int64()),
        "address": ["a", "b", "a", "a", "b", "b", "a"],
        "value": pa.array([10, 20, 30, 40, 50, 60, 70], pa.int64()),
    }
)


class Site:
    """An input with committed files, beside one that was not committed, and a process to run on."""

    def __init__(self, folder: Path, process: OperatorUnderTest, spark: SparkTarget) -> None:
        self._process = process
        self._spark = spark
        self._staging = folder / "staging"
        source = folder / "source"
        source.mkdir()
        pq.write_table(LOGS, source / "logs_0_99.parquet")
        pq.write_table(LOGS, source / "never_committed.parquet")
        self.files = [InputFile(f"file://{source}/logs_0_99.parquet", 7, 100, 0, 99)]

    def start(self, sql: str, *, start: int = 0, end: int = 9, **config: Any) -> None:
        source = PayloadInput(0, uuid4(), uuid4(), 0, "logs", "parquet", start=start, end=end)
        output = an_output(storage="parquet", staging=f"file://{self._staging}/{uuid4()}/")
        task = a_task(
            "sql_transform",
            config={"sql": sql, **config},
            inputs=[source],
            outputs=[output],
            runtime="ecs_spark",
        )
        self._process.run(task, {"TRACE_ATTEMPT": "1"}, spark=self._spark)

    def finish(self, at_work: Callable[[], None] | None = None) -> tuple[Finished, list[Progress]]:
        """Answers what the operator asks for until it has finished; ``at_work`` is called once Spark is."""
        progress: list[Progress] = []
        while not isinstance(message := self._process.receive(), Finished):
            if isinstance(message, Call):
                assert message.action == ListFiles(0)
                self._process.send(Reply(call_id=message.call_id, value=msgspec.to_builtins(self.files)))
            elif isinstance(message, Progress):
                if at_work is not None and not progress:
                    at_work()
                progress.append(message)
        return message, progress

    def run(self, sql: str, **how: Any) -> Finished:
        self.start(sql, **how)
        return self.finish()[0]

    def rows(self, finished: Finished) -> list[dict[str, Any]]:
        assert finished.status == "Completed", self._process.log()
        [output] = finished.outputs
        assert output.manifest is not None
        paths = ["/" + ObjectLocation.parse(file.location).path for file in output.manifest.files]
        return [row for path in paths for row in pq.read_table(path).to_pylist()]


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatorUnderTest]:
    with operator_process(tmp_path_factory.mktemp("work")) as process:
        process.ready()
        yield process


@pytest.fixture
def site(tmp_path: Path, process: OperatorUnderTest, spark_target: SparkTarget) -> Site:
    return Site(tmp_path, process, spark_target)


def test_a_select_over_the_committed_rows_of_the_scope_becomes_the_output(
    site: Site, process: OperatorUnderTest
) -> None:
    finished = site.run(
        """select s.block_number, count(address) as logs, coalesce(sum(value), 0) as total
           from scope_blocks s left join logs using (block_number) group by s.block_number""",
        end=4,
    )
    assert [tuple(row.values()) for row in site.rows(finished)] == [
        (0, 0, 0),
        (1, 2, 30),
        (2, 1, 30),
        (3, 0, 0),
        (4, 1, 40),
    ]
    [output] = finished.outputs
    assert (output.start, output.end, output.row_count) == (0, 4, 5)
    assert finished.reusable, process.log()
    process.ready()


def test_files_are_laid_out_as_the_job_asks_and_spark_progress_is_told(
    site: Site, process: OperatorUnderTest
) -> None:
    site.start("select * from logs", end=19, blocks_per_file=5, sort_by=["value"])
    finished, progress = site.finish()
    assert [row["value"] for row in site.rows(finished)] == [10, 20, 30, 40, 50, 60, 70]
    manifest = finished.outputs[0].manifest
    assert manifest is not None
    assert [file.location.rpartition("/")[2] for file in manifest.files] == [
        "result_0_4.parquet",
        "result_5_9.parquet",
        "result_10_14.parquet",
    ]
    assert any("stages" in report.fields for report in progress)
    process.ready()


def test_sql_that_can_never_work_fails_for_good(tmp_path: Path, spark_target: SparkTarget) -> None:
    with operator_process(tmp_path) as process:
        process.ready()
        finished = Site(tmp_path, process, spark_target).run("select no_such_column from logs")
        assert (finished.status, finished.retryable) == ("Failed", False)
        assert (finished.error_message or "").startswith("InvalidSql: sql can't be run: [UNRESOLVED_COLUMN")


def test_an_input_whose_file_is_gone_fails_and_may_be_tried_again(
    tmp_path: Path, spark_target: SparkTarget
) -> None:
    with operator_process(tmp_path) as process:
        process.ready()
        site = Site(tmp_path, process, spark_target)
        Path("/" + ObjectLocation.parse(site.files[0].location).path).unlink()
        finished = site.run("select * from logs")
        assert (finished.status, finished.retryable) == ("Failed", True)
        assert "PATH_NOT_FOUND" in (finished.error_message or "")


def test_a_cancel_interrupts_the_spark_work(tmp_path: Path, spark_target: SparkTarget) -> None:
    with operator_process(tmp_path) as process:
        process.ready()
        site = Site(tmp_path, process, spark_target)
        site.start("select sum(block_number % 7) as n from scope_blocks", end=10**14)
        finished, _ = site.finish(at_work=lambda: process.send(Cancel("enough")))
        assert (finished.status, finished.reusable) == ("Canceled", False)


def test_spark_on_a_runtime_without_it_is_refused_plainly(tmp_path: Path) -> None:
    with operator_process(tmp_path) as process:
        process.ready()
        output = an_output(storage="parquet", staging=f"file://{tmp_path}/staging/")
        source = PayloadInput(0, uuid4(), uuid4(), 0, "logs", "none", start=0, end=1)
        process.run(a_task("sql_transform", config={"sql": "select 1"}, inputs=[source], outputs=[output]))
        finished, _ = process.until_finished()
        assert finished.retryable is False
        assert (finished.error_message or "").startswith("NoSpark: the runtime 'ecs_python' has no Spark")
