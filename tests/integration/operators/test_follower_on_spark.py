"""A follower that is far behind lets Spark fetch, in a real worker, and follows the tip itself afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.databases import install_data, role_dsn
from tests.support.dev_stack import eventually
from tests.support.follow_scene import USUAL, node_blocks, node_table, stored_table
from tests.support.postgres import SharedPostgres
from tests.support.spark import unsupervised
from tests.support.worker_scene import WorkerScene, shared_scene
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running
from tracelake.hot.install import READER_ROLE, WRITER_ROLE

CONFIG = {"chain_id": 1, "rpc_pool": "main", "catch_up": "spark", "max_blocks_per_commit": 300}

pytestmark = pytest.mark.xdist_group("spark")


@pytest.fixture(scope="module")
def data_dsn(postgres_cluster: SharedPostgres) -> Iterator[str]:
    dsn = postgres_cluster.clone("data_installed", install_data)
    yield dsn
    postgres_cluster.drop(dsn)


@pytest.fixture(scope="module")
def scene(
    postgres_cluster: SharedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerScene]:
    with shared_scene(postgres_cluster, tmp_path_factory.mktemp("catch_up")) as opened:
        yield opened


def test_a_follower_catches_up_on_spark_and_then_follows_the_tip(
    scene: WorkerScene, data_dsn: str, spark_target: SparkTarget, tmp_path: Path
) -> None:
    pools = tmp_path / "rpc.toml"
    roles = {
        "TRACELAKE_DATA_WRITE_DSN": role_dsn(data_dsn, WRITER_ROLE),
        "TRACELAKE_RPC_POOLS": str(pools),
        "TRACELAKE_SPARK_REMOTE": unsupervised(spark_target).url,
        "TRACELAKE_SPARK_TOKEN": spark_target.token,
    }
    with running(DevChain(seed=5, chain_id=1, blocks=700, transactions_per_block=2)) as node:
        pools.write_text(f'[[pools.main.endpoints]]\nurl = "{node.url}"\n')
        pools.chmod(0o600)
        outputs = [{"name": name} for name in USUAL]
        scene.deploy_source("far", "block_follower", runtime="ecs_spark", outputs=outputs, config=CONFIG)
        with scene.working("worker", runtime="ecs_spark", **roles) as worker:

            def reached() -> list[int | None]:
                return [each.cursor for each in scene.client.datasets().datasets if each.dag_name == "far"]

            def compare() -> None:
                eventually("it is in step", lambda: reached() == [node.chain.head] * 3 or None)
                raw = node_blocks(node.url, 0, node.chain.head)
                for output in scene.task("far").outputs:
                    stored = stored_table(
                        role_dsn(data_dsn, READER_ROLE), output.dataset_version, output.name
                    )
                    assert stored.to_pylist() == node_table(raw, output.name, 1).to_pylist(), output.name

            compare()
            shown = scene.task("far")
            log = worker.home / "logs" / "tasks" / str(shown.task_id) / "1.log"
            assert "catching up" in log.read_text()
            assert "stages" in (shown.attempts[0].progress or {}), "executors have fetched it"
            node.chain.reorg(5, 9)
            compare()
            assert [each.outcome for each in scene.task("far").attempts] == [None]
            scene.client.cancel(shown.task_id)
