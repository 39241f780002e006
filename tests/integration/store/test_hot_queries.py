"""What is finished costs nothing: every hot query keeps its index at a million finished tasks.

The steps themselves run, once each, on a database with a million finished tasks and another job's backlog.
Before each statement its plan is taken with the statement's own arguments, as a prepared statement's generic
plan, in a savepoint that is rolled back. A plan fails that reads a large table from end to end, or that reads
many rows of one to find few.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import asyncpg
import psycopg.sql
import pytest
import pytest_asyncio
from psycopg.types.json import Jsonb

from tests.support.conversation import Conversation, Lease, dag, reactive, source, taken_back
from tests.support.databases import ORG, build_state_template
from tests.support.postgres import SharedPostgres
from tracelake.contracts.dispatcher_api import (
    EventIn,
    HeartbeatRequest,
    OutputIn,
    TaskInputsQuery,
    TaskStateRequest,
)
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.interventions import cancel_task, pause_job, resume_job, retry_task
from tracelake.dispatcher.steps.running_attempt import fetch_task, heartbeat, list_inputs, save_state
from tracelake.dispatcher.steps.upkeep import reap_leases, rewake_queued, watch_sources
from tracelake.domain.backoff import Backoff
from tracelake.domain.block_range import BlockRange
from tracelake.domain.entropy import Entropy
from tracelake.objects.directory import DirectoryStore
from tracelake.postgres import sqlfiles
from tracelake.store import datasets, invalidations, jobs, outbox
from tracelake.store.db import Connection, Database, Row, open_pool
from tracelake.store.jobs import JobDefinitions
from tracelake.tokens.signing import PemKeyring

LOAD = sqlfiles.parse("load", (Path(__file__).parent / "hot_queries_load.sql").read_text(encoding="utf-8"))
LARGE = {"task", "attempt", "partition", "event", "outbox", "invalidation"}
MOST_ROWS = 1200
"""Read by one node: a page of the reconciler, and room for the few rows that a test leaves behind."""

HOT = {
    "tasks": "lock_tasks read_task lock_gates read_gates claim_inputs start_attempts extend_leases "
    "report_progress claimed_at end_attempts ended_attempts park_tasks wake_parked create_partition_tasks "
    "create_cursor_tasks requeue_task expired_leases unwoken_tasks cancel_tasks other_cursor_task "
    "live_tasks_of_jobs wake_queued_of_jobs save_state forget_state saved_state",
    "datasets": "share_versions hold_versions own_versions advance_cursors announce_scopes overlapping_partitions "
    "neighbours supersede_partitions commit_partitions consumers scopes_reached_by_cursor rewind_below_commit "
    "read_consumers filled_in_since advance_consumers committed_files is_current record_events",
    "invalidations": "known_invalidation known_invalidations downstream raise_revision record_invalidation "
    "rewind_producer uncommit_partitions rewind_consumers rewind_job consumers_with_outputs materialized_hull "
    "overlapping_invalidations scope_revisions",
    "outbox": "add take_due delivered failed lag",
    "jobs": "missing_scopes last_update idle_sources",
}
BY_HAND = {"tasks.wake_queued_of_jobs"}
"""What a person sets off now and then may read all that waits, though never what is finished."""
FUNCTIONS = ("scope_revision", "scope_key", "frontier", "has_updates")


@dataclass(frozen=True, slots=True)
class Read:
    """What one node of a plan read of a large table."""

    table: str
    node: str
    rows: float


def reads(plan: dict[str, Any]) -> Iterator[Read]:
    if plan.get("Relation Name") in LARGE and plan["Node Type"] not in ("ModifyTable", "LockRows"):
        removed = plan.get("Rows Removed by Filter", 0) + plan.get("Rows Removed by Index Recheck", 0)
        yield Read(
            plan["Relation Name"], plan["Node Type"], (plan["Actual Rows"] + removed) * plan["Actual Loops"]
        )
    for child in plan.get("Plans", ()):
        yield from reads(child)


def query_names() -> dict[str, str]:
    """Every named query of the store by its text."""
    names = {}
    for entry in resources.files("tracelake.store.sql").iterdir():
        if entry.name.endswith(".sql"):
            queries = sqlfiles.load("tracelake.store.sql", entry.name)
            stem = entry.name.removesuffix(".sql")
            names |= {getattr(queries, name): f"{stem}.{name}" for name in queries.names()}
    return names


class Plans:
    """The plans that were taken, by query."""

    def __init__(self) -> None:
        self._names = query_names()
        self.reads: dict[str, list[Read]] = {}

    async def take(self, connection: Connection, query: str, args: tuple[Any, ...]) -> None:
        name = self._names.get(query)
        if name is not None:
            await self.explain(connection, name, query, args)

    async def explain(self, connection: Connection, name: str, query: str, args: tuple[Any, ...]) -> None:
        values = ", ".join(_literal(arg) for arg in args)
        await connection.execute("SAVEPOINT explained")
        await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
        await connection.execute(f"PREPARE explained AS {query}")
        call = f"explained({values})" if args else "explained"
        [row] = await connection.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE {call}")
        await connection.execute("ROLLBACK TO SAVEPOINT explained")
        await connection.execute("DEALLOCATE explained")
        self.reads.setdefault(name, []).extend(reads(json.loads(row[0])[0]["Plan"]))


def _literal(arg: Any) -> str:
    if isinstance(arg, dict):
        arg = Jsonb(arg)
    elif isinstance(arg, list) and any(isinstance(item, dict | list) for item in arg):
        arg = [None if item is None else Jsonb(item) for item in arg]
    return psycopg.sql.Literal(arg).as_string(None)


class ExplainedConnection:
    def __init__(self, connection: Connection, plans: Plans) -> None:
        self._connection = connection
        self._plans = plans

    async def fetch(self, query: str, *args: Any) -> list[Row]:
        await self._plans.take(self._connection, query, args)
        return await self._connection.fetch(query, *args)

    async def execute(self, query: str, *args: Any) -> str:
        await self._plans.take(self._connection, query, args)
        return await self._connection.execute(query, *args)

    def is_closed(self) -> bool:
        return self._connection.is_closed()

    def terminate(self) -> None:
        self._connection.terminate()


class ExplainedConnections:
    def __init__(self, pool: asyncpg.Pool, plans: Plans) -> None:
        self._pool = pool
        self._plans = plans

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        async with self._pool.acquire() as connection:
            yield ExplainedConnection(connection, self._plans)


JOBS = (
    source(),
    source("head", kind="always_on", storage="postgres"),
    reactive("work", "src", storage="parquet"),
    reactive("capped", "src", scaling={"max_concurrency": 1}),
    reactive("next", "work"),
    reactive("join", "src", "head"),
    reactive("up", "work", strategy="PerUpdate"),
    reactive("tail", "head", strategy="PerUpdate", storage="parquet"),
    source("elsewhere"),
    reactive("other", "elsewhere"),
)


@pytest.fixture(scope="module")
def big_database(postgres_cluster: SharedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A state database with a million finished tasks, loaded once."""
    dsn = postgres_cluster.clone("state", build_state_template)

    async def load() -> None:
        pool = await open_pool(dsn, min_size=1, max_size=2)
        await Conversation(steps(pool, tmp_path_factory.mktemp("load"))).deploy(dag(*JOBS))
        await pool.close()
        connection = await asyncpg.connect(dsn)
        await connection.execute("SET synchronous_commit = off")
        await connection.execute("SET maintenance_work_mem = '256MB'")
        await connection.execute(LOAD.rows)
        await connection.execute(LOAD.analyze)
        await connection.close()

    asyncio.run(load())
    yield dsn
    postgres_cluster.drop(dsn)


def steps(pool: asyncpg.Pool, folder: Path) -> StepContext:
    return StepContext(
        db=Database(pool),
        entropy=Entropy(),
        definitions=JobDefinitions(),
        objects=DirectoryStore(folder / "objects"),
        signer=PemKeyring(folder / "keys"),
        runtimes=RuntimeRegistry(),
        org_id=ORG,
    )


@pytest_asyncio.fixture
async def big_pool(big_database: str) -> AsyncIterator[asyncpg.Pool]:
    pool = await open_pool(big_database, min_size=1, max_size=4)
    yield pool
    await pool.close()


FAR = 20_000_000


async def a_day(talk: Conversation) -> None:
    """One of everything that happens all day, far from what is finished."""
    head, chain = await talk.lease("head"), await talk.dataset("head")
    await talk.beat(head)
    await tells_and_resumes(talk, head)
    for n in range(3):
        await talk.trigger(FAR + n * 10, FAR + n * 10 + 9)
    await talk.emit(head, EventIn(chain, cursor=FAR + 100, finalized=FAR, revision=0))
    first, second, third = await talk.queued("work")
    await talk.query(
        "UPDATE consumer_cursor c SET cursor = $1 FROM job WHERE job.job_id = c.job_id AND name = 'up'",
        FAR - 1,
    )
    lease = await talk.lease(first, key="k")
    await talk.claim(first, key="k")
    await talk.complete_scope(lease)
    await talk.complete_scope(lease)
    await lists_its_input(talk)
    await talk.complete(await talk.lease("up"))
    one, two, _ = await talk.queued("capped")
    held = await talk.lease(one)
    await talk.claim(two)
    await talk.complete_scope(held)
    update = await talk.lease("tail")
    await talk.fail(update, retryable=False)
    await retry_task(talk.ctx, update.task_id)
    update = await talk.lease(update.task_id)
    await talk.complete(update, OutputIn(0, start=0, end=FAR, row_count=0))
    joined = await talk.lease((await talk.queued("join"))[0])
    await talk.emit(head, taken_back(chain, FAR - 5, FAR + 100))
    await talk.emit(head, EventIn(chain, cursor=FAR, revision=0))
    with pytest.raises(Exception, match="invalidated"):
        await talk.complete_scope(joined)
    await cancel_task(talk.ctx, third)
    await fetch_task(talk.ctx, second)
    await pause_job(talk.ctx, "chain", "work")
    await resume_job(talk.ctx, "chain", "work")


async def tells_and_resumes(talk: Conversation, lease: Lease) -> None:
    """What an attempt says between its claim and its end."""
    fence = (lease.task_id, lease.attempt, lease.token)
    await heartbeat(talk.ctx, HeartbeatRequest(*fence, {"rows": 1}))
    for state in (None, {"cursor": 1}):
        await save_state(talk.ctx, TaskStateRequest(*fence, state))


async def lists_its_input(talk: Conversation) -> None:
    """The first page, and one that goes on."""
    [row] = await talk.query("SELECT partition_id FROM partition WHERE stored AND range_start = $1", FAR)
    lease = await talk.lease("next")
    for query in (
        TaskInputsQuery(lease.task_id, lease.attempt, 0),
        TaskInputsQuery(lease.task_id, lease.attempt, 0, f"{row['partition_id']}-1"),
    ):
        await list_inputs(talk.ctx, query)


async def upkeep(talk: Conversation) -> None:
    db = talk.ctx.db
    running = await talk.lease((await talk.queued("work"))[0])
    await talk.query(
        "UPDATE task SET lease_expires_at = tl_now() - interval '1 s' WHERE task_id = $1", running.task_id
    )
    [long_ago] = await talk.query("SELECT tl_now() - interval '1 day' AS since")
    assert await reap_leases(talk.ctx, long_ago["since"]) == 1
    await rewake_queued(talk.ctx, 3600)
    await watch_sources(talk.ctx)
    taken = await db.run(lambda tx: outbox.take_due(tx, 10, 30))
    ids = [entry.outbox_id for entry in taken]
    await db.run(lambda tx: outbox.delivered(tx, ids[:5]))
    await db.run(lambda tx: outbox.failed(tx, ids[5:], "x", backoff=Backoff(1, 2), max_tries=9))
    await db.run(outbox.lag)
    [work] = await talk.query("SELECT job_id FROM job WHERE name = 'work'")
    [up] = await talk.query("SELECT job_id FROM job WHERE name = 'up'")
    await db.run(lambda tx: jobs.missing_scopes(tx, work["job_id"], 0, None, 1000))
    await db.run(lambda tx: jobs.last_update(tx, up["job_id"]))
    [made] = await talk.query("SELECT dataset_version FROM dataset_version WHERE job_id = $1", work["job_id"])
    beyond = BlockRange(FAR + 1000, FAR + 1009)
    await db.run(lambda tx: datasets.hold_versions(tx, [made["dataset_version"]]))
    await db.run(lambda tx: datasets.neighbours(tx, [(made["dataset_version"], beyond)]))
    await db.run(lambda tx: invalidations.known_ids(tx, made["dataset_version"], ["unlinked"]))
    await db.run(lambda tx: invalidations.rewind_consumers(tx, made["dataset_version"], beyond, 1))


async def functions(pool: asyncpg.Pool, plans: Plans) -> None:
    """The queries inside of the SQL functions, which a caller's plan doesn't show."""
    async with pool.acquire() as connection:
        [work] = await connection.fetch(
            "SELECT job_id, dataset_version FROM job JOIN dataset_version USING (job_id) WHERE name = 'work'"
        )
        [up] = await connection.fetch("SELECT job_id FROM job WHERE name = 'up'")
        spoken = await connection.fetchval("SELECT max(dataset_version::text)::uuid FROM invalidation")
        calls = {
            "scope_revision": (spoken, 19_990, 20_010),
            "scope_key": (work["job_id"], FAR, FAR + 9),
            "frontier": (work["dataset_version"], 5_000_009),
            "has_updates": (up["job_id"],),
        }
        for name in FUNCTIONS:
            [found] = await connection.fetch(LOAD.function, name)
            body = found["prosrc"].strip()
            for position, parameter in enumerate(found["proargnames"], 1):
                body = re.sub(rf"(?<![.\w]){parameter}\b", f"${position}", body)
            types = ", ".join(found["types"])
            await connection.execute("BEGIN")
            await connection.execute("SET LOCAL plan_cache_mode = force_generic_plan")
            await connection.execute(f"PREPARE inner_query({types}) AS {body}")
            values = ", ".join(_literal(value) for value in calls[name])
            [row] = await connection.fetch(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE inner_query({values})")
            await connection.execute("ROLLBACK")
            await connection.execute("DEALLOCATE inner_query")
            plans.reads[f"function.{name}"] = list(reads(json.loads(row[0])[0]["Plan"]))


async def test_every_hot_query_keeps_its_index_at_a_million_finished_tasks(
    big_pool: asyncpg.Pool, tmp_path: Path
) -> None:
    ctx, plans = steps(big_pool, tmp_path), Plans()
    talk = Conversation(replace(ctx, db=Database(ExplainedConnections(big_pool, plans))))
    await a_day(talk)
    await upkeep(talk)
    await functions(big_pool, plans)
    wanted = {f"{file}.{name}" for file, names in HOT.items() for name in names.split()}
    wanted |= {f"function.{name}" for name in FUNCTIONS}
    assert wanted - set(plans.reads) == set(), "these were never run"
    scans = [
        f"{name}: {read}"
        for name, taken in plans.reads.items()
        for read in taken
        if read.node == "Seq Scan" or (read.rows > MOST_ROWS and name not in BY_HAND)
    ]
    assert not scans, "\n".join(scans)


async def test_a_query_without_its_index_is_found(big_pool: asyncpg.Pool) -> None:
    plans = Plans()
    async with big_pool.acquire() as connection:
        await connection.execute("BEGIN")
        await plans.explain(connection, "by worker", "SELECT 1 FROM task WHERE worker_id = $1", ("nobody",))
        ended = "SELECT 1 FROM task WHERE job_id = (SELECT job_id FROM job WHERE name = $1) AND epoch = 0"
        await plans.explain(connection, "by epoch", ended, ("work",))
        await connection.execute("ROLLBACK")
    for taken in plans.reads.values():
        assert any(read.node == "Seq Scan" or read.rows > MOST_ROWS for read in taken)
