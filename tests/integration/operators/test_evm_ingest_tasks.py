"""``evm_ingest`` as a job: deployed, triggered, run by a worker on Spark, committed, or failed with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.faulty_rpc import Fault, FaultyRpc
from tests.support.postgres import SharedPostgres
from tests.support.processes import WorkerProcess
from tests.support.spark import SharedSpark, unsupervised
from tests.support.worker_scene import WorkerScene, shared_scene
from tracelake.contracts.user_api import TaskDetail
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import RunningChain, running
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.pool import Pool

NAMES = ("blocks", "transactions", "logs")
KEY = "k3y-that-nobody-should-see"


@pytest.fixture(scope="module")
def scene(
    postgres_cluster: SharedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerScene]:
    with shared_scene(postgres_cluster, tmp_path_factory.mktemp("ingest")) as opened:
        yield opened


@pytest.fixture(scope="module")
def node() -> Iterator[RunningChain]:
    with running(DevChain(seed=4, blocks=50)) as node:
        yield node


@pytest.fixture(scope="module")
def liar(node: RunningChain) -> Iterator[FaultyRpc]:
    with FaultyRpc(node.url) as faulty:
        faulty.lie(Fault.WRONG_BLOOM, block=30)
        yield faulty


@pytest.fixture(scope="module")
def worker(
    scene: WorkerScene, node: RunningChain, liar: FaultyRpc, shared_spark: SharedSpark
) -> Iterator[WorkerProcess]:
    pools = scene.folder / "pools.toml"
    pools.write_text(
        f'[[pools.main.endpoints]]\nurl = "{node.url}"\n'
        f'[[pools.bad.endpoints]]\nname = "liar"\nurl = "{liar.url}/{KEY}"\n'
    )
    pools.chmod(0o600)
    spark = unsupervised(shared_spark.target)
    with scene.working(
        "worker",
        runtime="ecs_spark",
        TRACELAKE_SPARK_REMOTE=spark.url,
        TRACELAKE_SPARK_TOKEN=spark.token,
        TRACELAKE_RPC_POOLS=str(pools),
    ) as working:
        yield working


def ingested(scene: WorkerScene, dag: str, pool: str, start: int, end: int, **fields: object) -> TaskDetail:
    job = {"runtime": "ecs_spark", "outputs": len(NAMES), "max_attempts": 1, **fields}
    scene.deploy(dag, "evm_ingest", config={"rpc_pool": pool, "blocks_per_file": 20}, **job)
    scene.trigger(dag, [(start, end)])
    return scene.ended(dag)


def test_a_range_is_committed_as_the_node_has_it(
    scene: WorkerScene, worker: WorkerProcess, node: RunningChain
) -> None:
    shown = ingested(scene, "good", "main", 0, 45)
    assert shown.status == "Completed", shown.error_message
    assert (shown.attempts[0].progress or {})["done"] == 46
    with Pool(pool_of(node.url)) as pool:
        raw = pool.fetch(range(46), receipts=True)
        chain_id = pool.chain_id()
    for output, name in zip(shown.outputs, NAMES, strict=True):
        [partition] = output.partitions
        expected = pa.Table.from_batches([decode(raw, ChainTable(name), chain_id)])
        assert (partition.start, partition.end, partition.row_count) == (0, 45, expected.num_rows)
    files = sorted((scene.folder / "dispatcher" / "objects").rglob("logs_*.parquet"), key=first_block)
    assert [file.name for file in files] == ["logs_0_19.parquet", "logs_20_39.parquet", "logs_40_45.parquet"]
    stored = pa.concat_tables([pq.ParquetFile(file).read() for file in files])
    assert stored.equals(pa.Table.from_batches([decode(raw, ChainTable.LOGS, chain_id)]))


def first_block(file: Path) -> int:
    return int(file.stem.split("_")[1])


def test_a_node_that_lies_fails_the_task_and_nothing_is_committed(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    shown = ingested(scene, "lied_to", "bad", 20, 45)
    assert shown.status == "Failed"
    said = shown.error_message or ""
    assert "block 30" in said
    assert "liar" in said
    assert "loom" in said, "what didn't match"
    assert "Traceback" not in said
    assert all(not output.partitions for output in shown.outputs)
    log = worker.home / "logs" / "tasks" / str(shown.task_id) / "1.log"
    assert KEY not in said + log.read_text() + worker.log()


def test_a_pool_that_the_worker_does_not_have_is_said(scene: WorkerScene, worker: WorkerProcess) -> None:
    shown = ingested(scene, "poolless", "none", 0, 9, max_attempts=3)
    assert (shown.status, shown.failures) == ("Failed", 1)
    assert "there is no RPC pool 'none'" in (shown.error_message or "")
