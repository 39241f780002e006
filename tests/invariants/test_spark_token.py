"""The token of a worker's Spark server is in the memory of the server, and nowhere that others could look."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from tests.support.spark import SharedSpark
from tracelake.worker.spark.session import begin, open_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def spark(shared_spark: SharedSpark) -> Iterator[SparkSession]:
    work = begin(open_session(shared_spark.target), str(uuid4()), 1, 1)
    yield work.session
    work.end()


def test_no_process_of_the_server_has_it_in_its_environment_or_command_line(
    shared_spark: SharedSpark, spark: SparkSession
) -> None:
    def looks_around(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import os
        from pathlib import Path

        for _ in batches:
            found = [Path("/proc/self/environ"), Path(f"/proc/{os.getppid()}/environ")]
            shown = [path.read_text(errors="replace") for path in found]
            yield pa.RecordBatch.from_pylist([{"shown": f"{dict(os.environ)} {shown}"}])

    rows = spark.range(1).mapInArrow(looks_around, "shown string").collect()
    assert "SPARK" in str(rows)
    assert shared_spark.target.token not in str(rows)

    family = _family(shared_spark.pid)
    assert len(family) > 1
    for pid in family:
        for name in ("environ", "cmdline"):
            assert shared_spark.target.token.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_no_text_of_sql_shows_it_to_a_session_that_did_not_ask_for_more(
    shared_spark: SharedSpark, spark: SparkSession
) -> None:
    token = shared_spark.target.token
    text = "select '${env:SPARK_CONNECT_AUTHENTICATE_TOKEN}${system:spark.connect.authenticate.token}' as v"
    assert spark.sql(text).collect()[0]["v"].startswith("${env:")
    for command in ("SET", "SET -v", "SET spark.connect.authenticate.token"):
        assert token not in str(spark.sql(command).collect())
    reads_itself = "select '${spark.connect.authenticate.token}' as v"
    assert token not in str(spark.sql(reads_itself).collect())


def test_a_path_is_no_table(shared_spark: SharedSpark, spark: SparkSession, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    with pytest.raises(PySparkException, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.table(f"text.`{secret}`").collect()
    with pytest.raises(PySparkException, match="TABLE_OR_VIEW_NOT_FOUND"):
        spark.sql(" ".join(("select * from", f"text.`{secret}`"))).collect()


def _family(pid: int) -> set[int]:
    """A process and all that it started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(entry.parent.name)] = int(fields[1])
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family
