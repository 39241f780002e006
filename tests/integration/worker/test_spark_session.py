"""Sessions of attempts: one each, alone with their views and conf, and ended from inside or outside."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession, functions

from tests.support.spark import SharedSpark, unsupervised
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.worker.spark import connect as spark_ids
from tracelake.worker.spark import session
from tracelake.worker.spark import session as spark_session
from tracelake.worker.spark.session import SparkAttempt, SparkConnection

OPERATOR = Path(__file__).with_name("spark_operator.py")


@pytest.fixture
def connection(spark_target: SparkTarget) -> SparkConnection:
    return spark_session.open_session(spark_target)


@pytest.fixture
def task_id() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def work(connection: SparkConnection, task_id: str) -> Iterator[SparkAttempt]:
    attempt = spark_session.begin(connection, task_id, 1, 1)
    yield attempt
    attempt.end()


def test_a_process_keeps_its_connection(connection: SparkConnection, spark_target: SparkTarget) -> None:
    assert spark_session.open_session(spark_target) is connection


def test_another_server_gets_another_connection(spark_target: SparkTarget) -> None:
    first = spark_session.open_session(spark_target)
    first.close()

    second = spark_session.open_session(spark_target)

    assert second is not first
    work = spark_session.begin(second, str(uuid.uuid4()), 1, 1)
    assert work.session.sql("select 1").collect()[0][0] == 1
    work.end()


def test_attempts_share_neither_views_nor_conf(connection: SparkConnection, task_id: str) -> None:
    first = spark_session.begin(connection, task_id, 1, 1)
    first.session.range(3).createOrReplaceTempView("mine")
    first.session.conf.set("spark.sql.shuffle.partitions", "7")
    second = spark_session.begin(connection, task_id, 2, 2)

    assert second.session.conf.get("spark.sql.shuffle.partitions") == "2"
    with pytest.raises(PySparkException, match="TABLE_OR_VIEW_NOT_FOUND"):
        second.session.table("mine").collect()

    first.end()
    second.end()


def test_a_session_that_has_ended_takes_no_more_work(connection: SparkConnection, task_id: str) -> None:
    stale = spark_session.begin(connection, task_id, 1, 1)
    spark_session.begin(connection, task_id, 1, 1).session.sql("select 1").collect()
    stale.end()

    with pytest.raises(PySparkException, match="SESSION_CLOSED"):
        spark_session.begin(connection, task_id, 1, 1).session.sql("select 1").collect()


def test_the_usual_ways_of_spark_lead_to_the_attempt_s_session(work: SparkAttempt) -> None:
    assert SparkSession.builder.getOrCreate() is work.session
    assert work.session.range(4).select(functions.sum(functions.col("id"))).collect()[0][0] == 6


def test_an_operator_that_stops_spark_stops_only_its_own_session(
    connection: SparkConnection, task_id: str
) -> None:
    first = spark_session.begin(connection, task_id, 1, 1)
    beside = first.session.newSession()
    assert beside.sql("select 2").collect()[0][0] == 2
    first.session.stop()
    first.end()
    del beside, first
    gc.collect()

    second = spark_session.begin(connection, task_id, 2, 1)
    assert second.session.sql("select 3").collect()[0][0] == 3
    second.end()


def test_times_are_utc_and_parquet_has_microseconds(work: SparkAttempt, tmp_path: Path) -> None:
    frame = work.session.sql("select timestamp '2026-01-02 03:04:05.000006 UTC' as at")
    frame.write.parquet(str(tmp_path / "out"))

    table = pq.read_table(tmp_path / "out")
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert (
        pq.ParquetFile(next((tmp_path / "out").glob("*.parquet"))).schema.column(0).physical_type == "INT64"
    )
    assert work.session.conf.get("spark.sql.session.timeZone") == "UTC"
    assert work.session.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"


def test_python_workers_run_this_interpreter_and_find_this_package(work: SparkAttempt) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import sys

        import tracelake

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"python": [sys.executable], "package": [tracelake.__file__]})

    found = work.session.range(1).mapInArrow(look, "python string, package string").collect()[0]

    import tracelake

    assert (found.python, found.package) == (sys.executable, tracelake.__file__)


def python_daemon_of(work: SparkAttempt) -> int:
    def who(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os

        for _ in batches:
            yield pa.RecordBatch.from_pydict({"parent": [os.getppid()]})

    return int(work.session.range(1).mapInArrow(who, "parent long").collect()[0].parent)


def test_attempts_share_python_workers(connection: SparkConnection, task_id: str) -> None:
    parents = set()
    for number in (1, 2):
        work = spark_session.begin(connection, task_id, number, number)
        parents.add(python_daemon_of(work))
        work.end()
    assert len(parents) == 1, "each of them has started a Python of its own"


def test_attempts_share_python_workers_across_parent_sessions(
    connection: SparkConnection, task_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = spark_session.begin(connection, task_id, 1, 1)
    shared = python_daemon_of(first)
    first.end()
    monkeypatch.setattr(session, "_AGE", 7)
    second = spark_session.begin(connection, task_id, 2, 2)
    assert python_daemon_of(second) == shared, "another parent, and its copies share with those of the first"
    second.end()


def test_progress_tells_stages_tasks_rows_and_bytes(
    connection: SparkConnection, task_id: str, tmp_path: Path
) -> None:
    told: list[dict[str, Any]] = []
    go_on = tmp_path / "go-on"

    def hear(fields: dict[str, Any]) -> None:
        told.append(fields)
        if fields["bytes"]:
            go_on.touch()

    def wait_until_heard(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            while batch.column(0)[0].as_py() and not go_on.exists():
                time.sleep(0.01)
            yield batch

    work = spark_session.begin(connection, task_id, 1, 1, hear)
    work.session.range(0, 1000, 1, 4).write.parquet(str(tmp_path / "numbers"))
    numbers = work.session.read.parquet(str(tmp_path / "numbers")).repartition(4)
    assert len(numbers.mapInArrow(wait_until_heard, "id long").collect()) == 1000
    work.end()

    assert set(told[-1]) == {"stages", "stages_done", "tasks", "tasks_done", "rows", "bytes"}
    assert any(fields["tasks"] > fields["tasks_done"] for fields in told)
    assert told[-1]["stages"] == told[-1]["stages_done"] > 1
    assert told[-1]["tasks"] == told[-1]["tasks_done"] > 4
    assert told[-1]["rows"] == 1000
    assert told[-1]["bytes"] > 0


def test_work_is_interrupted_from_another_thread_whichever_thread_runs_it(
    connection: SparkConnection, task_id: str
) -> None:
    running = threading.Event()
    work = spark_session.begin(connection, task_id, 1, 1, lambda fields: running.set())
    outcome: list[str] = []

    def run() -> None:
        try:
            work.session.range(0, 10**17, 1, 2).selectExpr("sum(id % 7)").collect()
        except PySparkException as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    assert running.wait(60)
    work.interrupt()
    thread.join()

    assert "OPERATION_CANCELED" in outcome[0]
    assert work.session.sql("select 1").collect()[0][0] == 1
    work.end()


def test_an_attempt_that_is_ended_from_outside_can_do_nothing_more(
    shared_spark: SharedSpark, connection: SparkConnection, task_id: str
) -> None:
    zombie = spark_session.begin(connection, task_id, 1, 1)
    zombie.session.range(1).createOrReplaceTempView("mine")

    shared_spark.run(shared_spark.server.interrupt(task_id, 1, 1))

    with pytest.raises(PySparkException, match="SESSION_CLOSED"):
        zombie.session.sql("select 1").collect()
    zombie.interrupt()
    zombie.end()


def test_an_attempt_that_was_ended_before_it_began_can_do_nothing(
    shared_spark: SharedSpark, connection: SparkConnection, task_id: str
) -> None:
    shared_spark.run(shared_spark.server.interrupt(task_id, 1, 1))

    late = spark_session.begin(connection, task_id, 1, 1)
    with pytest.raises(PySparkException, match="SESSION_CLOSED"):
        late.session.sql("select 1").collect()
    shared_spark.run(shared_spark.server.interrupt(task_id, 1, 1))
    late.end()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_the_work_of_an_operator_process_that_is_gone_is_ended_from_outside(
    shared_spark: SharedSpark, connection: SparkConnection, task_id: str, fate: signal.Signals
) -> None:
    with _operator(shared_spark.target, task_id) as operator:
        operator.send_signal(fate)

        shared_spark.run(shared_spark.server.interrupt(task_id, 1, 1))

        assert _a_slot_is_free(connection)
        operator.kill()


def test_on_a_spark_that_nobody_here_watches_it_ends_by_itself(
    shared_spark: SharedSpark, connection: SparkConnection, task_id: str
) -> None:
    with _operator(unsupervised(shared_spark.target), task_id) as operator:
        operator.kill()

        assert _a_slot_is_free(connection)


def test_names_follow_from_the_attempt_alone() -> None:
    assert spark_ids.tag("t", 3) == "tracelake-t-3"
    assert spark_ids.session_id("t", 3, 9) == spark_ids.session_id("t", 3, 9)
    different = {spark_ids.session_id(*key) for key in [("t", 3, 9), ("t", 3, 10), ("t", 4, 9), ("u", 3, 9)]}
    assert len(different) == 4


def _operator(target: SparkTarget, task_id: str) -> subprocess.Popen[str]:
    """Returns when its work holds both slots of the server."""
    process = subprocess.Popen(
        [sys.executable, str(OPERATOR), target.url, task_id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{target.token}\n")
    process.stdin.flush()
    assert process.stdout.readline() == "running\n"
    return process


def _a_slot_is_free(connection: SparkConnection) -> bool:
    """With both slots taken for ever, a job that needs one would never end."""
    work = spark_session.begin(connection, str(uuid.uuid4()), 1, 1)
    count = work.session.range(0, 100, 1, 2).where("id % 2 = 0").count()
    work.end()
    return count == 50
