"""Connections to the state database end amid transactions, and between a commit and its answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tracelake.testing.cutting_proxy import ClientMessage, Cut, CuttingProxy, RandomCuts, pass_all
from tracelake.testing.load import Caller, Ledger, Load
from tracelake.testing.site import Databases, open_site

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


class NthCut:
    """Cuts the nth message that asks for an answer, once."""

    def __init__(self, number: int, cut: Cut) -> None:
        self._left = number
        self._cut = cut
        self.done = False

    def __call__(self, message: ClientMessage) -> Cut:
        if self.done or not message.asks_for_answer:
            return Cut.NONE
        if self._left:
            self._left -= 1
            return Cut.NONE
        self.done = True
        return self._cut


@pytest.mark.parametrize("cut", [Cut.BEFORE, Cut.AFTER])
async def test_every_statement_of_every_call_may_be_the_last_one_of_its_connection(
    databases: Databases, tmp_path: Path, cut: Cut
) -> None:
    """The whole conversation again and again, each time cut one statement later, until it ends uncut."""
    ledger = Ledger()
    async with (
        CuttingProxy(databases.state_dsn) as proxy,
        open_site(databases, tmp_path, state_dsn=proxy.dsn, replicas=1, environment=QUIET) as site,
    ):
        caller = Caller(site.replicas, ledger, seed=1)
        for number in range(200):
            policy = NthCut(number, cut)
            proxy.policy = policy
            await converse(caller, number)
            proxy.policy = pass_all
            if not policy.done:
                break
        await caller.close()
        assert number > 20
        assert ledger.repeats
    assert not ledger.surprises
    await databases.until(
        "SELECT count(*) = $1 AND bool_and(status = 'Completed') FROM task", 2 * (number + 1)
    )
    await databases.until("SELECT count(*) = $1 FROM attempt", 2 * (number + 1))
    await databases.until("SELECT count(*) = $1 FROM partition WHERE current", 3 * (number + 1))


DAG = """
name: dag{number}
jobs:
  - {{ name: src, activation: source, runtime: dispatcher, source: {{ kind: manual }}, outputs: 1 }}
  - name: first
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: src, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerPartition
    scaling: {{ max_concurrency: 1 }}
  - name: second
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: first, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerPartition
"""


async def converse(caller: Caller, number: int) -> None:
    """Deploy, trigger, and for both jobs claim, heartbeat and complete; every call until it is answered."""
    dag = f"dag{number}"
    deployed = await caller.say("user", "/v1/dags", content=DAG.format(number=number))
    assert deployed.status_code in (200, 201), deployed.text
    triggered = await caller.say("user", f"/v1/sources/{dag}/src/trigger", json={"start": 0, "end": 9})
    assert triggered.status_code == 202, triggered.text
    for job in ("first", "second"):
        listed = await caller.ask("user", f"/v1/tasks?dag={dag}&job={job}")
        [task] = listed.json()["tasks"]
        claim = {"task_id": task["task_id"], "worker_id": "w", "claim_key": dag}
        claimed = (await caller.say("internal", "/internal/task-claim", json=claim)).json()
        assert (claimed["status"], claimed["attempt"]) == ("Claimed", 1), claimed
        fence = {name: claimed[name] for name in ("task_id", "attempt", "lease_token")}
        beat = await caller.say("internal", "/internal/heartbeat", json=fence)
        assert beat.status_code == 200, beat.text
        output = {"output_index": 0, "start": 0, "end": 9, "row_count": 0}
        completion = {**fence, "status": "Completed", "outputs": [output]}
        completed = await caller.say("internal", "/internal/task-complete", json=completion)
        assert completed.status_code == 200, completed.text


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
        await site.verify(load.ledger, patience=90)
        proxy.freeze()
        await asyncio.gather(*(process.terminate() for process in site.replicas))
        assert [process.exit_code for process in site.replicas] == [0, 0]
