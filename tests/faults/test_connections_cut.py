"""Connections to the state database end amid transactions, and between a commit and its answer."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from tests.support.load import Caller, Ledger, Load, Port
from tests.support.proxies import ClientMessage, Cut, CuttingProxy, RandomCuts, pass_all
from tests.support.site import Databases, open_site
from tracelake.hot.commit import HotStore
from tracelake.postgres.sessions import end_transactions_after, open_statement_pool
from tracelake.settings import Secret
from tracelake.store import db

QUIET = dict.fromkeys(
    (
        "TRACELAKE_REAP_SECONDS",
        "TRACELAKE_REWAKE_SECONDS",
        "TRACELAKE_RECONCILE_SECONDS",
        "TRACELAKE_WATCH_SOURCES_SECONDS",
        "TRACELAKE_OUTBOX_SWEEP_SECONDS",
        "TRACELAKE_OBSERVE_SECONDS",
    ),
    "3600",
)


@pytest.mark.parametrize("seed", [11, 12])
async def test_connections_cut_at_random_lose_and_repeat_nothing(
    databases: Databases, tmp_path: Path, seed: int
) -> None:
    cuts = RandomCuts(seed, one_in=60, commit_one_in=10)
    async with (
        CuttingProxy(databases.state_dsn) as proxy,
        open_site(databases, tmp_path, state_dsn=proxy.dsn) as site,
        Load(site.replicas, databases.queue_dsn, seed=seed) as load,
    ):
        load.begin()
        proxy.policy = cuts
        for _ in range(4):
            await load.made_progress(20)
            proxy.cut_all()
        await load.finish()
        proxy.policy = pass_all
        await site.verify(load.ledger)
        assert min(cuts.made.get(f"{side} COMMIT", 0) for side in ("before", "after")) > 0, cuts.made


class Staircase:
    """Cuts a call's first statement, then when it is repeated the second, and so on until it gets through."""

    def __init__(self, cut: Cut) -> None:
        self._cut = cut
        self._step = 0
        self._passed = 0
        self.made = 0

    def restart(self) -> None:
        self._step = self._passed = 0

    def __call__(self, message: ClientMessage) -> Cut:
        if not message.asks_for_answer:
            return Cut.NONE
        self._passed += 1
        if self._passed <= self._step:
            return Cut.NONE
        self._step += 1
        self._passed = 0
        self.made += 1
        return self._cut


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER])
async def test_every_statement_of_every_call_may_be_the_last_one_of_its_connection(
    databases: Databases, tmp_path: Path, cut: Cut
) -> None:
    ledger = Ledger()
    stairs = Staircase(cut)
    async with (
        CuttingProxy(databases.state_dsn) as proxy,
        open_site(databases, tmp_path, state_dsn=proxy.dsn, replicas=1, environment=QUIET) as site,
    ):
        proxy.policy = stairs
        caller = Caller(site.replicas, ledger, seed=1)
        await converse(caller, stairs)
        await caller.close()
    assert not ledger.surprises
    assert stairs.made > 20
    assert ledger.repeats["StateUnavailable"] > 20
    await databases.until("SELECT count(*) = 2 AND bool_and(status = 'Completed') FROM task", patience=0.5)
    await databases.until(
        "SELECT count(*) = 2 AND bool_and((progress->>'rows')::int = 1) FROM attempt", patience=0.5
    )
    await databases.until("SELECT count(DISTINCT value->>'job') = 2 FROM operator_state", patience=0.5)
    await databases.until("SELECT count(*) = 3 FROM partition WHERE current", patience=0.5)
    await databases.until("SELECT count(*) = 1 FROM dag_version", patience=0.5)


async def converse(caller: Caller, stairs: Staircase) -> None:
    """Deploy, trigger; for both jobs claim, heartbeat, save state, complete; every call until it is answered."""

    async def say(port: Port, path: str, **body: Any) -> dict[str, Any]:
        stairs.restart()
        answer = await caller.say(port, path, **body)
        assert answer.status_code in (200, 201, 202), answer.text
        return answer.json()

    await say("user", "/v1/dags", content=DAG)
    await say("user", "/v1/sources/chain/src/trigger", json={"start": 0, "end": 9})
    for job in ("first", "second"):
        stairs.restart()
        [task] = (await caller.ask("user", f"/v1/tasks?job={job}")).json()["tasks"]
        claim = {"task_id": task["task_id"], "worker_id": "w", "claim_key": "k"}
        claimed = await say("internal", "/internal/task-claim", json=claim)
        assert (claimed["status"], claimed["attempt"]) == ("Claimed", 1), claimed
        fence = {name: claimed[name] for name in ("task_id", "attempt", "lease_token")}
        await say("internal", "/internal/heartbeat", json={**fence, "progress": {"rows": 1}})
        await say("internal", "/internal/task-state", json={**fence, "state": {"job": job}})
        output = {"output_index": 0, "start": 0, "end": 9, "row_count": 0}
        completion = {**fence, "status": "Completed", "outputs": [output]}
        await say("internal", "/internal/task-complete", json=completion)


DAG = """
name: chain
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: first
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
    scaling: { max_concurrency: 1 }
  - name: second
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: first, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
"""


async def test_connections_whose_other_end_vanished_are_given_up(
    databases: Databases, tmp_path: Path
) -> None:
    async with (
        CuttingProxy(databases.state_dsn) as proxy,
        open_site(databases, tmp_path, state_dsn=proxy.dsn) as site,
        Load(site.replicas, databases.queue_dsn, seed=5) as load,
    ):
        load.begin()
        await load.made_progress(20)
        assert proxy.freeze()
        await load.finish()
        await site.verify(load.ledger, patience=240)
        proxy.freeze()
        await asyncio.gather(*(process.terminate() for process in site.replicas))
        assert [process.exit_code for process in site.replicas] == [0, 0]


class HoldBetweenMessages:
    """Holds back the execution of a statement that the server has parsed: to it, the session is busy."""

    def __init__(self) -> None:
        self._before = ""

    def __call__(self, message: ClientMessage) -> Cut:
        parsed, self._before = self._before == "H", message.kind
        return Cut.HOLD if parsed and message.kind == "B" else Cut.NONE


async def test_a_client_that_vanishes_amid_a_statement_keeps_no_locks(databases: Databases) -> None:
    async with CuttingProxy(databases.state_dsn) as proxy:
        pool = await asyncpg.create_pool(proxy.dsn, min_size=1, max_size=1, init=end_transactions_after(1))
        other = await asyncpg.connect(databases.state_dsn)
        try:
            async with pool.acquire() as vanishing:
                await vanishing.execute("CREATE TABLE counter AS SELECT 1 AS value")
                await vanishing.execute(
                    "BEGIN; SET statement_timeout = 500; SELECT value FROM counter FOR UPDATE"
                )
                proxy.policy = HoldBetweenMessages()
                statement = asyncio.create_task(vanishing.fetch("SELECT $1::int + 1", 1))
                await asyncio.wait_for(proxy.held.wait(), 30)
                await asyncio.wait_for(other.execute("UPDATE counter SET value = 2"), 60)
                with pytest.raises(asyncpg.PostgresConnectionError):
                    await statement
        finally:
            await other.close()
            await pool.close()


async def test_every_pool_ends_transactions_of_vanished_clients(databases: Databases, tmp_path: Path) -> None:
    """State, catalogue and data: each limits its transactions, and sends keepalives."""
    shown = "SELECT current_setting('transaction_timeout') || ' ' || current_setting('tcp_keepalives_idle')"
    async with contextlib.AsyncExitStack() as opened:
        state = await db.open_pool(databases.state_dsn, min_size=1)
        opened.push_async_callback(state.close)
        catalog = await open_statement_pool(Secret(databases.state_dsn), 1, "test")
        opened.push_async_callback(catalog.close)
        hot = HotStore(Secret(databases.state_dsn))
        opened.push_async_callback(hot.close)
        async with hot.connection() as writer:
            found = [await state.fetchval(shown), await catalog.fetchval(shown), await writer.fetchval(shown)]
    assert found == ["40s 15", "40s 15", "11min 15"]
