"""The auditor can fail: each bug planted here, in one step or query, is found within a bounded number of seeds.

A bug is a monkeypatch of a decision, a step or a query's text, and a focus: the mixture of faults and jobs in
which it matters, so that few seeds are enough. A patch that no longer fits the code fails loudly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import asyncpg
import pytest
import pytest_asyncio

from tests.support.databases import build_state_template
from tests.support.postgres import CloneDatabase
from tests.support.simulation import run
from tests.support.simulation.graph import Layout, Profile, closure
from tests.support.simulation.run import Simulation
from tests.support.simulation.scheduler import Odds
from tracelake.dispatcher.steps import (
    apply_backpressure,
    claim_task,
    commit_outputs,
    complete_task,
    count_events,
    deploy_dag,
    interventions,
    route_events,
    running_attempt,
)
from tracelake.domain import task as task_module
from tracelake.domain.dag.model import ExecutionStrategy
from tracelake.domain.task import ClaimGate, HeartbeatVerdict, Outcome, TaskKind, TaskStatus
from tracelake.postgres import sqlfiles
from tracelake.store import datasets, invalidations, jobs, outbox, pressure, tasks
from tracelake.store.datasets import Consumer
from tracelake.store.db import DeployLock

MOST_SEEDS = 300

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    plant: Plant
    jobs: tuple[str, ...]
    focus: dict[str, Any] = field(default_factory=dict)
    caps: dict[str, int] = field(default_factory=dict)
    odds: dict[str, Any] = field(default_factory=dict)
    without_revisions: bool = False
    depths: dict[str, int] = field(default_factory=dict)
    operators: dict[str, int] = field(default_factory=dict)
    bulk: tuple[str, ...] = ()
    first: int = 0
    """A seed that found it: the search begins there."""

    def adjust(self, drawn: Profile) -> Profile:
        layout = Layout(
            closure(frozenset(self.jobs)),
            self.caps,
            drawn.layout.tags,
            self.depths,
            frozenset(self.bulk),
            self.operators,
        )
        calm = {
            "lost_reply": 0.0, "duplicate": 0.0, "queue_loss": False, "deploys": False, "pauses": False,
            "cancels": False, "reorganizes": False, "crash": 0.0, "zombie": 0.0, "fails": 0.0, "releases": 0.0,
            "impostor": 0.0, "batches": False, "workers": 4, "turns": 700, "chain_pace": 15.0,
        }  # fmt: skip
        odds = Odds(
            **{
                "die": 0.0,
                "die_at_commit": 0.0,
                "stick": 0.5,
                "tick": 0.1,
                "longest_tick": 5.0,
                "starve": 0.0,
                **self.odds,
            }
        )
        return replace(drawn, layout=layout, odds=odds, **{**calm, **self.focus})


def query(queries: sqlfiles.Queries, name: str, old: str, new: str) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        text = getattr(queries, name)
        assert text.count(old) == 1, f"{name} no longer says {old!r} once"
        monkeypatch.setitem(queries._texts, name, text.replace(old, new))

    return plant


def patch(where: Any, name: str, what: Any) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        assert hasattr(where, name), f"{where} has no {name}"
        monkeypatch.setattr(where, name, what)

    return plant


def several(*plants: Plant) -> Plant:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        for one in plants:
            one(monkeypatch)

    return plant


async def nothing(*_: Any, **__: Any) -> Any:
    return []


class Silent:
    """An outbox that nothing enters."""

    wake = staticmethod(nothing)


async def nobody(*_: Any, **__: Any) -> set[Any]:
    return set()


async def only_revisions(tx: Any, completed: Any, versions: Any) -> set[Any]:
    return await original_with_changed_inputs(
        tx, [task for task in completed if task.state.kind is not TaskKind.CURSOR], versions
    ) | await invalidations.changed_meanwhile(
        tx,
        [
            used
            for task in completed
            if task.state.kind is TaskKind.CURSOR
            for used in commit_outputs._used(task)
            if versions[used.dataset_version].revision > used.revision
        ],
    )


async def no_cap_lock(tx: Any, rows: Any) -> Any:
    gated = [row for row in rows if row.gated]
    return await tasks.claim_gates(tx, gated) if gated else {}


class ClaimsOf:
    """``store.tasks`` as the claim sees it, with running tasks taken for queued ones."""

    def __init__(self, mistakes: Callable[[tasks.TaskRow], bool]) -> None:
        self._mistakes = mistakes

    async def lock(self, tx: Any, task_ids: Any) -> dict[Any, tasks.TaskRow]:
        rows = await tasks.lock(tx, task_ids)
        return {
            task_id: replace(row, state=replace(row.state, status=TaskStatus.QUEUED))
            if row.state.status is TaskStatus.RUNNING and self._mistakes(row)
            else row
            for task_id, row in rows.items()
        }

    def __getattr__(self, name: str) -> Any:
        return getattr(tasks, name)


original_with_changed_inputs = commit_outputs.with_changed_inputs
original_decide_ending = task_module.decide_ending
original_check_may_act = task_module.check_may_act
original_check_current = task_module._check_current


def no_token(task: Any, attempt: int, lease_token: Any) -> None:
    original_check_current(task, attempt, None)


def no_attempt(task: Any, attempt: int, lease_token: Any) -> None:
    original_check_current(task, task.attempt, lease_token)


def no_fence(task: Any, attempt: int, lease_token: Any) -> None:
    return None


def canceled_is_fine(task: Any, attempt: int, lease_token: Any) -> None:
    original_check_current(task, attempt, lease_token)
    if task.status is not TaskStatus.CANCELED:
        original_check_may_act(task, attempt, lease_token)


def releases_are_failures(task: Any, outcome: Outcome, **how: Any) -> Any:
    return original_decide_ending(task, Outcome.FAILED if outcome is Outcome.RELEASED else outcome, **how)


async def reap_without_looking_again(ctx: Any, listening_since: Any) -> int:
    """Gives up what it found a moment ago, renewed or not."""
    expired = await ctx.db.run(
        lambda tx: tasks.expired_leases(tx, listening_since, 200), lock=DeployLock.NONE
    )

    async def reap(tx: Any) -> int:
        rows = [r for r in (await tasks.lock(tx, expired)).values() if r.state.status is TaskStatus.RUNNING]
        await tasks.lock_gates(tx, (row.job_id for row in rows if row.gated))
        over = [complete_task.AttemptOver(row, Outcome.TIMED_OUT, "gone") for row in rows]
        await complete_task.end_attempts(ctx, tx, over)
        return len(rows)

    return await ctx.db.run(reap) if expired else 0


def only(strategy: bool, joins: bool) -> Any:
    def gated(consumer: Consumer) -> bool:
        per_update = consumer.strategy is ExecutionStrategy.PER_UPDATE
        return (strategy and per_update) or (joins and not per_update and consumer.trigger_count > 1)

    return property(gated)


async def never_cut(ctx: Any, tx: Any, *_: Any, **__: Any) -> list[Any]:
    return []


async def no_repeats(*_: Any, **__: Any) -> dict[int, Any]:
    return {}


MANUAL = ("ingest",)
CHAIN = ("derive", "compact")

FULL = {"sum": 1, "ingest": 2}

BUGS: dict[str, Bug] = {
    "claim: the job's row is not locked before counting": Bug(
        patch(claim_task, "_gates", no_cap_lock), MANUAL, {"batches": False}, {"ingest": 1}, {"stick": 0.0}
    ),
    "claim: the cap is not looked at": Bug(
        patch(ClaimGate, "closed", property(lambda gate: gate.earlier_cursor_task)), MANUAL, {}, {"ingest": 1}
    ),
    "claim: a running task is claimed again": Bug(
        patch(claim_task, "tasks", ClaimsOf(lambda row: True)), MANUAL, {"duplicate": 0.3}
    ),
    "claim: a source that runs is claimed again": Bug(
        patch(claim_task, "tasks", ClaimsOf(lambda row: row.state.kind is TaskKind.SOURCE)),
        ("derive",), {"duplicate": 0.3},
    ),
    "complete: the lease token is not compared": Bug(
        patch(task_module, "_check_current", no_token), MANUAL, {"impostor": 0.5}
    ),
    "complete: the attempt is not compared": Bug(
        patch(task_module, "_check_current", no_attempt), MANUAL, {"impostor": 0.5}
    ),
    "complete: a reply counts after a newer claim": Bug(
        patch(task_module, "_check_current", no_fence), MANUAL, {"zombie": 0.5}, {}, {"longest_tick": 40.0},
        first=9,
    ),
    "complete: a canceled task is completed": Bug(
        patch(complete_task, "check_may_act", canceled_is_fine), MANUAL, {"cancels": True, "zombie": 0.3}
    ),
    "complete: a repeat is refused": Bug(
        patch(complete_task, "_repeats", no_repeats), MANUAL, {"duplicate": 0.4}
    ),
    "complete: changed inputs are not noticed": Bug(
        patch(commit_outputs, "with_changed_inputs", nobody), CHAIN, {"reorganizes": True, "zombie": 0.2},
        first=5,
    ),
    "complete: a release counts as a failure": Bug(
        patch(complete_task, "decide_ending", releases_are_failures), MANUAL, {"releases": 0.5, "fails": 0.3},
        first=18,
    ),
    "end: nobody is woken for a slot that came free": Bug(
        several(patch(complete_task, "wake_next", nothing), patch(interventions, "wake_next", nothing)),
        MANUAL, {}, {"ingest": 1},
    ),
    "end: a retry is not woken": Bug(
        query(outbox.SQL, "add", "AS n(kind, runtime, task_id, payload, available_at)\n",
              "AS n(kind, runtime, task_id, payload, available_at) WHERE n.available_at IS NULL\n"),
        MANUAL, {"fails": 0.4},
    ),
    "reap: a renewed lease is reaped": Bug(
        several(
            patch(run, "reap_leases", reap_without_looking_again),
            query(tasks.SQL, "expired_leases", "t.lease_expires_at < tl_now()",
                  "tl_now() - make_interval(secs => j.heartbeat_timeout_seconds) > (SELECT a.claimed_at FROM"
                  " attempt a WHERE a.task_id = t.task_id AND a.attempt = t.attempt)"),
        ),
        ("derive",), {}, {}, {"longest_tick": 2.0, "tick": 0.03},
    ),
    "route: new tasks are not woken": Bug(patch(route_events.outbox, "wake", nothing), MANUAL),
    "route: cursor events are kept but not routed": Bug(
        patch(route_events, "_update_jobs", lambda *_: set()), ("derive",)
    ),
    "route: joins meet nobody on the job's row": Bug(
        patch(Consumer, "gated", only(True, False)), ("join",),
        {"people": 0}, {}, {"stick": 0.4, "slow_commit": 0.1},
        first=7,
    ),
    "route: updates meet nobody on the job's row": Bug(
        patch(Consumer, "gated", only(False, True)), ("derive", "derive2", "log", "ranges"),
        # The chain's next move would make up for what the last one lost.
        {"chain_pace": 5.0, "chain_moves": 2, "workers": 6, "turns": 350, "people": 0}, {},
        {"stick": 0.7, "slow_commit": 0.2},
        first=86,
    ),
    "route: a scope is one of a kind whatever its revisions": Bug(
        lambda _: None, CHAIN, {"reorganizes": True},
        without_revisions=True,
        first=4,
    ),
    "events: one of an older revision counts": Bug(
        patch(count_events, "_outdated", nobody), ("derive",),
        {"reorganizes": True, "duplicate": 1.0, "chain_pace": 4.0, "turns": 1000, "people": 0},
        {}, {"tick": 0.02, "longest_tick": 1.0},
        first=60,
    ),
    "events: one of an older version moves the cursor": Bug(
        patch(count_events, "_state", lambda event: count_events.EventState.COUNTED), ("derive",), {"deploys": True}
    ),
    "route: a gap filled in below sends nobody back": Bug(
        patch(datasets, "rewind_below_commit", nothing), ("tail",), {"fails": 0.4, "chain_pace": 5.0}
    ),
    "complete: neither the consumer's position nor its range is compared": Bug(
        patch(commit_outputs, "with_changed_inputs", only_revisions), ("tail",),
        {"fails": 0.4, "chain_pace": 5.0, "turns": 2000},
        first=11,
    ),
    "complete: a gap filled in meanwhile is not noticed": Bug(
        patch(datasets, "filled_in_since", nobody), ("gather",), {"fails": 0.3},
        first=306,
    ),
    "invalidate: consumers are not sent back": Bug(
        query(invalidations.SQL, "rewind_consumers", "WHERE ji.dataset_version = $1",
              "WHERE false AND ji.dataset_version = $1"),
        ("derive",), {"reorganizes": True},
    ),
    "invalidate: partitions stay committed": Bug(
        query(invalidations.SQL, "uncommit_partitions", "AND current", "AND current AND false"),
        ("compact",), {"reorganizes": True},
        first=135,
    ),
    "invalidate: what was made of it is not taken back": Bug(
        patch(count_events, "_invalidate_downstream", never_cut), ("compact",),
        {"reorganizes": True, "chain_pace": 6.0, "turns": 900},
        first=3,
    ),
    "rewake: lost messages are not made up for": Bug(
        query(tasks.SQL, "unwoken_tasks", "t.status = 'Queued'", "false AND t.status = 'Queued'"),
        MANUAL, {"queue_loss": True},
    ),
    "reconcile: nothing is ever missing": Bug(
        query(jobs.SQL, "missing_scopes", "AND ji.input_index = $2", "AND false AND ji.input_index = $2"),
        MANUAL, {"deploys": True},
    ),
    "heartbeat: a lease that is over is extended": Bug(
        patch(running_attempt, "decide_heartbeat", lambda task, fence: HeartbeatVerdict.EXTEND),
        MANUAL, {"duplicate": 0.5},
    ),
    "pause: a resumed job is not woken": Bug(
        several(patch(interventions.tasks, "wake_queued_of_jobs", nothing)), MANUAL,
        {"pauses": True, "people": 4, "workers": 2},
    ),
    "retry: what is tried again is not woken": Bug(
        patch(interventions, "outbox", Silent()), MANUAL, {"cancels": True}
    ),
    "outbox: what is taken is never taken again": Bug(
        query(outbox.SQL, "take_due", "tl_now() + make_interval(secs => $2)", "tl_now() + interval '1 year' * $2"),
        MANUAL, {}, {}, {"die": 0.02, "die_at_commit": 0.1},
        first=6,
    ),
    "deploy: nothing keeps routing out": Bug(
        patch(deploy_dag, "DeployLock", type("Open", (), {"NONE": DeployLock.NONE, "EXCLUSIVE": DeployLock.NONE})),
        MANUAL, {"deploys": True, "people": 3}, {}, {"stick": 0.0, "starve": 0.03},
        first=19,
    ),
    "pressure: claims don't look": Bug(
        query(tasks.SQL, "lock_tasks", "j.paused OR (t.bulk AND j.bulk_held) AS held", "false AS held"),
        ("sum",), depths=FULL,
    ),
    "pressure: routing doesn't look": Bug(
        query(tasks.SQL, "create_partition_tasks",
              "j.paused OR (m.bulk AND j.bulk_held) OR (j.backlog AND NOT $6) AS held", "false AND $6 AS held"),
        ("sum",), depths=FULL,
        first=9,
    ),
    "pressure: kept scopes are thrown away": Bug(
        query(tasks.SQL, "create_partition_tasks", "WHERE kept ORDER BY position", "WHERE kept AND false"),
        ("sum",), depths=FULL,
    ),
    "pressure: bulk work that was held is not routed when it is released": Bug(
        query(pressure.SQL, "take_scopes", "AND NOT (h.bulk AND $2)", "AND NOT (h.bulk OR $2)"),
        ("sum",), depths=FULL, bulk=("ingest",),
    ),
    "caps: a free slot of an operator wakes nobody": Bug(
        patch(tasks, "wake_parked_of_operators", nothing), ("sum",), operators={"pack": 1}
    ),
    "caps: claims don't count an operator's tasks": Bug(
        query(tasks.SQL, "read_gates", "AND k.operator = o.operator", "AND false AND k.operator = o.operator"),
        ("sum",), operators={"pack": 1},
    ),
    "pressure: kept events never count": Bug(
        patch(apply_backpressure, "_count_kept", nothing), ("sum",), depths=FULL
    ),
    "pressure: what was refused is not woken": Bug(
        patch(pressure, "wake_released", nothing), ("sum",), depths=FULL
    ),
    "pressure: a hold doesn't wait for what is under way": Bug(
        patch(apply_backpressure, "DeployLock",
              type("Open", (), {"NONE": DeployLock.NONE, "EXCLUSIVE": DeployLock.SHARED})),
        ("sum",), {"people": 3}, {}, {"stick": 0.0, "starve": 0.03}, depths=FULL,
        first=18,
    ),
}  # fmt: skip


@pytest_asyncio.fixture
async def simulation(clone_database: CloneDatabase) -> AsyncIterator[tuple[Simulation, str]]:
    dsn = await asyncio.to_thread(clone_database, "state", build_state_template)
    simulation = Simulation(dsn)
    await simulation.open()
    yield simulation, dsn
    await simulation.close()


@pytest.mark.parametrize("name", list(BUGS))
async def test_planted_bug_is_found(
    name: str, simulation: tuple[Simulation, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, dsn = simulation
    bug = BUGS[name]
    bug.plant(monkeypatch)
    if bug.without_revisions:
        await _without_revisions(dsn)
    for seed in range(bug.first, bug.first + MOST_SEEDS):
        outcome = await runs.run(seed, bug.adjust)
        if outcome.findings:
            return
    pytest.fail(f"{MOST_SEEDS} seeds did not find: {name}")


async def _without_revisions(dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        known = await connection.fetchval("SELECT to_regprocedure('scope_key(uuid, bigint, bigint)')")
        assert known is not None, "scope_key is gone"
        await connection.execute(
            "CREATE OR REPLACE FUNCTION scope_key(job uuid, first bigint, last bigint) RETURNS text"
            " LANGUAGE sql STABLE AS $$ SELECT '0'::text $$"
        )
    finally:
        await connection.close()
