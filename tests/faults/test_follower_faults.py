"""A follower that is killed, stopped or cut off while its chain grows, forks and shrinks: nothing is lost or mixed.

Everything is real: Dispatcher, worker, data database and a chain over RPC. A dependent job would read by the cursor
that the Dispatcher has; in the end it is where the chain is, and the tables say what the node says.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID, uuid4

import httpx
import psycopg
import pytest
from psycopg import sql

from tests.support.databases import install_data, role_dsn
from tests.support.dev_stack import descendants, eventually
from tests.support.follow_scene import USUAL, node_blocks, node_table, stored_table
from tests.support.processes import WorkerProcess
from tests.support.proxies import Forwarder
from tests.support.site import Databases
from tests.support.worker_scene import WorkerScene, open_scene
from tracelake.contracts.user_api import TaskDetail
from tracelake.embedded.postgres import Cluster
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import RunningChain, running
from tracelake.hot.install import READER_ROLE, WRITER_ROLE

FINALITY = 40
OPERATORS = ("--operators", str(Path(__file__).with_name("named_follower.py")))

CHANGES: dict[str, Callable[[DevChain], object]] = {
    "grew": lambda chain: chain.mine(3),
    "forked": lambda chain: chain.reorg(6, 8),
    "shrank": lambda chain: chain.rollback(5),
}

pytestmark = pytest.mark.xdist_group("follower_faults")


@pytest.fixture(scope="module")
def scene(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerScene]:
    with open_scene(Databases.create(cluster), tmp_path_factory.mktemp("follower")) as opened:
        yield opened


@pytest.fixture(scope="module")
def data_dsn(cluster: Cluster) -> str:
    name = f"data_{uuid4().hex[:8]}"
    cluster.ensure_database(name)
    install_data(cluster.dsn(name))
    return cluster.dsn(name)


@dataclass
class Following:
    """A deployed follower of a chain, and what becomes of it."""

    scene: WorkerScene
    dag: str
    node: RunningChain
    data_dsn: str
    pools: Path

    def worker(self, name: str, internal_url: str | None = None) -> WorkerProcess:
        return self.scene.worker(
            f"{self.dag}_{name}",
            *OPERATORS,
            internal_url=internal_url,
            TRACELAKE_DATA_WRITE_DSN=role_dsn(self.data_dsn, WRITER_ROLE),
            TRACELAKE_RPC_POOLS=str(self.pools),
        )

    def task(self) -> TaskDetail:
        [task] = self.scene.client.tasks(dag=self.dag, job="work").tasks
        return self.scene.client.task(task.task_id)

    def shown(self) -> dict[str, object]:
        """What the current attempt says of itself."""
        return dict(self.task().attempts[0].progress or {})

    def version(self, name: str) -> UUID:
        [version] = [each.dataset_version for each in self.task().outputs if each.name == name]
        return version

    def stored(self) -> dict[int, str]:
        version = self.version("blocks")
        query = sql.SQL("SELECT block_number, block_hash FROM data.{} ORDER BY 1").format(
            sql.Identifier(f"d_{version.hex}")
        )
        with psycopg.connect(self.data_dsn) as connection:
            try:
                return {number: f"0x{each.hex()}" for number, each in connection.execute(query).fetchall()}
            except psycopg.errors.UndefinedTable:
                return {}

    def chain(self) -> dict[int, str]:
        return {raw.number: raw.block["hash"] for raw in node_blocks(self.node.url, 0, self.node.chain.head)}

    def reached(self) -> list[int | None]:
        """How far the Dispatcher knows each table to be committed."""
        page = self.scene.client.datasets()
        return [each.cursor for each in page.datasets if (each.dag_name, each.job) == (self.dag, "work")]

    async def stored_is(self, what: str, condition: Callable[[dict[int, str]], bool]) -> None:
        await asyncio.to_thread(eventually, what, lambda: condition(self.stored()) or None)

    async def changes(self, change: str) -> None:
        """The chain does, and the tables with it, if only in part."""
        before = self.stored()
        CHANGES[change](self.node.chain)
        await self.stored_is("a commit", lambda stored: stored != before)

    async def is_past(self, attempt: int) -> None:
        await asyncio.to_thread(eventually, "a new attempt", lambda: self.task().attempt > attempt or None)

    async def in_step(self) -> None:
        """The tables are the chain's, everybody has heard of it, and a follower looks at the chain."""
        await self.stored_is("the tables are the chain's", lambda stored: stored == self.chain())
        head = self.node.chain.head
        await asyncio.to_thread(
            eventually, "the Dispatcher knows", lambda: self.reached() == [head] * 3 or None
        )
        await asyncio.to_thread(eventually, "it follows", lambda: self.shown().get("tip") == head or None)
        raw = node_blocks(self.node.url, 0, head)
        for name in USUAL:
            stored = stored_table(role_dsn(self.data_dsn, READER_ROLE), self.version(name), name)
            assert stored.to_pylist() == node_table(raw, name, 1).to_pylist(), name


@pytest.fixture
def node() -> Iterator[RunningChain]:
    with running(DevChain(seed=3, chain_id=1, blocks=30)) as chain:
        yield chain


@pytest.fixture
def elsewhere(node: RunningChain) -> Iterator[RunningChain]:
    """The same chain at another address."""
    with running(node.chain) as moved:
        yield moved


@pytest.fixture
def story(scene: WorkerScene, data_dsn: str, node: RunningChain, tmp_path: Path) -> Iterator[Following]:
    dag = f"follow_{uuid4().hex[:8]}"
    pools = tmp_path / "rpc.toml"
    pools.write_text(f'[[pools.main.endpoints]]\nurl = "{node.url}"\n')
    pools.chmod(0o600)
    follower = {
        "name": "work",
        "activation": "source",
        "runtime": "ecs_python",
        "operator": "named_follower",
        "source": {"kind": "always_on"},
        "outputs": [{"name": name, "storage": "postgres"} for name in USUAL],
        "update_strategy": "replace",
        "heartbeat_timeout_seconds": 2,
        "retry": {"base": 0, "max": 1},
        "config": {
            "chain_id": 1,
            "rpc_pool": "main",
            "finality": FINALITY,
            "shorter_after_seconds": 0.3,
            "poll_seconds": 0.1,
        },
    }
    check = {
        "name": "check",
        "activation": "reactive",
        # Whose worker is this test.
        "runtime": "ecs_spark",
        "operator": "integrity_check",
        "inputs": [{"from": {"job": "work", "output": place}} for place in range(len(USUAL))],
        "execution_strategy": "PerUpdate",
        "config": {"rpc_pool": "main"},
    }
    scene.client.deploy(json.dumps({"name": dag, "jobs": [follower, check]}).encode())
    following = Following(scene, dag, node, data_dsn, pools)
    yield following
    scene.client.cancel(following.task().task_id)


async def test_a_worker_killed_between_its_commit_and_its_events_loses_neither(
    scene: WorkerScene, story: Following
) -> None:
    """The chain changes while the Dispatcher can't be reached: the rows are there, the events aren't said."""
    async with Forwarder(scene.replica.internal_url) as way:
        worker = story.worker("worker", internal_url=way.url)
        try:
            await worker.start()
            for change in CHANGES:
                await story.in_step()
                reached = await asyncio.to_thread(story.reached)
                way.cut()
                await story.changes(change)
                assert await asyncio.to_thread(story.reached) == reached, "nobody has heard of it"
                await worker.kill()
                way.lead_to(scene.replica.internal_url)
                await worker.start()
            await story.in_step()
            outcomes = [each.outcome for each in story.task().attempts]
            assert outcomes == [None, *(["TimedOut"] * len(CHANGES))], (
                "its own news is no reason to begin again"
            )
        finally:
            await worker.close()


async def test_a_follower_that_slept_past_its_lease_writes_nothing_when_it_wakes(
    scene: WorkerScene, story: Following
) -> None:
    async with Forwarder(scene.replica.internal_url) as way:
        slow, quick = story.worker("slow", internal_url=way.url), story.worker("quick")
        try:
            await slow.start()
            await story.in_step()
            asleep = [slow.pid, *descendants(slow.pid)]
            for pid in asleep:
                os.kill(pid, signal.SIGSTOP)
            way.cut()
            await quick.start()
            story.node.chain.reorg(4, 6)
            await story.in_step()
            for pid in asleep:
                os.kill(pid, signal.SIGCONT)
            story.node.chain.reorg(2, 5)
            await story.in_step()
            way.lead_to(scene.replica.internal_url)
            await asyncio.to_thread(
                eventually,
                "it has heard of its end",
                lambda: slow.events("attempt_dropped") + slow.events("report_refused"),
            )
            await story.in_step()
        finally:
            await slow.close()
            await quick.close()


async def test_an_operator_killed_again_and_again_while_the_chain_changes_ends_up_with_it(
    story: Following,
) -> None:
    worker = story.worker("only")
    try:
        await worker.start()
        await story.in_step()
        for change in ("grew", "forked", "shrank", "forked", "grew"):
            await story.changes(change)
            attempt = story.task().attempt
            for pid in _operators(worker):
                os.kill(pid, signal.SIGKILL)
            await story.is_past(attempt)
        await story.in_step()
    finally:
        await worker.close()


async def test_what_a_check_finds_wrong_is_written_again_without_anybodys_help(
    scene: WorkerScene, story: Following
) -> None:
    """Rows that somebody damaged, found by a job that reads them and may take them back."""
    worker = story.worker("only")
    try:
        await worker.start()
        await story.in_step()
        damage(story, "logs", 5, 9)
        await take_back(scene, story, 5, 9)
        story.node.chain.mine()
        await story.in_step()
        assert await worker.logged("outputs_invalidated_by_others")
        shown = story.task()
        assert [each.outcome for each in shown.attempts] == [None, "Released"], "that cost nothing"
        log = worker.home / "logs" / "tasks" / str(shown.task_id) / f"{shown.attempt}.log"
        assert "others found these blocks wrong: writing them again start=5 end=9" in log.read_text()
    finally:
        await worker.close()


def damage(story: Following, name: str, start: int, end: int) -> None:
    table = sql.Identifier("data", f"d_{story.version(name).hex}")
    with psycopg.connect(story.data_dsn) as connection:
        deleted = connection.execute(
            sql.SQL("DELETE FROM {} WHERE block_number BETWEEN %s AND %s").format(table), [start, end]
        )
        assert deleted.rowcount > 0


async def take_back(scene: WorkerScene, story: Following, start: int, end: int) -> None:
    """By the task of an ``integrity_check`` that nobody else runs."""
    async with httpx.AsyncClient(base_url=scene.replica.internal_url, trust_env=False) as http:
        http.headers.update(scene.replica.worker_headers)
        [check] = await asyncio.to_thread(
            eventually, "the check", lambda: scene.client.tasks(dag=story.dag, job="check").tasks
        )
        asked = {"task_id": str(check.task_id), "worker_id": "the test"}
        claim = (await http.post("/internal/task-claim", json=asked)).raise_for_status().json()
        taken_back = [
            {
                "dataset_uuid": read["dataset_uuid"],
                "dataset_version": read["dataset_version"],
                "id": "wrong-1",
                "invalidate": {"start": start, "end": end},
                "reason": "rows are missing",
            }
            for read in claim["task"]["inputs"]
        ]
        fence = {key: claim[key] for key in ("task_id", "attempt", "lease_token")}
        said = await http.post("/internal/events", json={**fence, "events": taken_back})
        said.raise_for_status()


def _operators(worker: WorkerProcess) -> list[int]:
    return [pid for pid in descendants(worker.pid) if Path(f"/proc/{pid}/comm").read_text() == "follower\n"]


async def test_endpoints_that_are_changed_reach_a_follower_that_runs(
    story: Following, elsewhere: RunningChain
) -> None:
    worker = story.worker("worker")
    try:
        await worker.start()
        await story.in_step()
        story.pools.write_text(f'[[pools.main.endpoints]]\nurl = "{elsewhere.url}"\n')
        await story.is_past(1)
        story.node.chain.mine(2)
        await story.in_step()
        outcomes = [each.outcome for each in story.task().attempts]
        assert outcomes == [None, "Released"], "begun again, and nobody's failure"
    finally:
        await worker.close()
