"""A worker hands an attempt the RPC pool that its job names, and lets no key of it out again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import SharedPostgres
from tests.support.processes import WorkerProcess
from tests.support.worker_scene import WorkerScene, shared_scene
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import running

OPERATORS = str(Path(__file__).with_name("rpc_operators.py"))
KEY = "KEY-of-the-endpoint"

pytestmark = pytest.mark.xdist_group("wrapper")


@pytest.fixture(scope="module")
def scene(
    postgres_cluster: SharedPostgres, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerScene]:
    with shared_scene(postgres_cluster, tmp_path_factory.mktemp("rpc")) as opened:
        yield opened


@pytest.fixture(scope="module")
def worker(scene: WorkerScene) -> Iterator[WorkerProcess]:
    with running(DevChain(blocks=7)) as node:
        home = scene.folder / "worker"
        home.mkdir(mode=0o700, exist_ok=True)
        (home / "rpc.toml").write_text('[[pools.main.endpoints]]\nurl_env = "NODE_URL"\n')
        (home / "rpc.toml").chmod(0o600)
        url = f"{node.url}/v2/{KEY}"
        with scene.working("worker", "--operators", OPERATORS, NODE_URL=url) as working:
            yield working


def test_an_attempt_reads_the_chain_and_its_log_and_failure_keep_the_key(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    shown = scene.ran("reads", "asks_pool", config={"rpc_pool": "main"}, max_attempts=1)
    assert shown.progress is not None
    assert shown.progress["message"] == "main of chain 31339 is at 7"
    assert "nothing else to do with •••" in (shown.error_message or "")
    log = (worker.home / "logs" / "tasks" / str(shown.task_id) / "1.log").read_text()
    assert "the address is •••" in log
    assert KEY not in f"{shown}{log}"


def test_a_pool_that_the_worker_does_not_have_is_named_and_not_tried_again(
    scene: WorkerScene, worker: WorkerProcess
) -> None:
    shown = scene.ran("misses", "asks_pool", config={"rpc_pool": "man"}, max_attempts=3)
    assert (shown.status, len(shown.attempts)) == ("Failed", 1)
    assert "there is no RPC pool 'man': configured pools: main" in (shown.error_message or "")
