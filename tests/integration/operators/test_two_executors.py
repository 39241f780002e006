"""The same ingest on a cluster of two executors: the files are those that one process writes by itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from tests.support.operator_process import a_task, an_input, an_output
from tests.support.spark import QUICK, LocalPrograms
from tracelake.contracts.manifest import Manifest
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.evm.rpc.config import pool_of
from tracelake.operators import Context
from tracelake.operators.cells import spark_slots
from tracelake.operators.evm_ingest import IngestWork, evm_ingest, plan_outputs, read_config, write_cell
from tracelake.worker.spark import session as spark_session
from tracelake.worker.spark.server import SparkServer
from tracelake.worker.spark.settings import SparkSettings

CONFIG = {"rpc_pool": "main", "blocks_per_file": 20}
NAMES = ("blocks", "transactions", "logs")

pytestmark = pytest.mark.xdist_group("spark_cluster")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    asked = {"TRACELAKE_SPARK_MASTER": "local-cluster[2,1,1024]"}
    settings = SparkSettings.from_environment(asked)
    folder = tmp_path_factory.mktemp("cluster")
    server = SparkServer(
        SparkSettings(master=settings.master, java_options=QUICK.java_options, conf=QUICK.conf),
        LocalPrograms(),
        folder / "spark",
    )
    with asyncio.Runner() as loop:
        loop.run(server.start())
        connection = spark_session.open_session(server.target)
        work = spark_session.begin(connection, str(uuid4()), 1, 1)
        yield work.session
        work.end()
        connection.close()
        loop.run(server.stop())


class Link:
    canceled = paused = False

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def call(self, action: object) -> object:
        raise AssertionError(action)

    def report(self, fields: dict[str, object]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> SparkSession:
        return self._spark


def context(folder: Path, url: str, spark: SparkSession) -> Context:
    outputs = [
        an_output(index, name=name, storage="parquet", staging=f"file://{folder}/{uuid4()}/")
        for index, name in enumerate(NAMES)
    ]
    task = a_task("evm_ingest", config=CONFIG, inputs=[an_input(start=5, end=119)], outputs=outputs)
    return Context(task, Link(spark), rpc_pool=pool_of(url))


def described(manifest: Manifest | None) -> list[tuple[str, int, str]]:
    assert manifest is not None
    return [(file.location.rpartition("/")[2], file.rows, file.content_hash) for file in manifest.files]


def test_there_are_two_executors_and_both_work(cluster: SparkSession) -> None:
    def parent(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict({"parent": [os.getppid()]})

    both_at_once = cluster.range(0, 2, 1, 2).mapInArrow(parent, "parent long", barrier=True)
    assert len({row.parent for row in both_at_once.collect()}) == 2
    assert spark_slots(cluster) == 2


def test_the_files_are_those_of_a_single_process(cluster: SparkSession, tmp_path: Path) -> None:
    with running(DevChain(seed=9, blocks=120)) as node:
        alone = context(tmp_path, node.url, cluster)
        config = read_config(CONFIG, NAMES)
        chain_id = node.chain.chain_id
        work = IngestWork(
            plan_outputs(alone, config, chain_id),
            alone.rpc_pool(),
            1.0,
            chain_id,
            config.verify,
            config.senders,
        )
        cells = range(work.grid.first_cell, work.grid.first_cell + work.grid.cells)
        reports = [write_cell(work, cell) for cell in cells]
        together = context(tmp_path, node.url, cluster)
        evm_ingest(together)
        outputs, _ = together.finish()
    for output, name in zip(outputs, NAMES, strict=True):
        expected = [report.files[name] for report in reports]
        assert described(output.manifest) == [
            (file.location.rpartition("/")[2], file.rows, file.content_hash) for file in expected
        ]
        assert len(expected) == 6
