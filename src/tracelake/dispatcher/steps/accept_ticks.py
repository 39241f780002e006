"""Ticks of cron sources: a scheduler learns what is scheduled, and sends the ticks that it found due.

The Dispatcher evaluates no schedule, but for what is due when a person makes a tick. It makes sure that a tick
exists once: one that isn't later than the last is known and changes nothing, whatever scheduler sends it, however
often, and whatever the clock does meanwhile; one from the future is refused. Ticks that were made while the clock
was ahead are known when their time comes, and until then those before them are made as ever. One scheduler acts at
a time, by a lease that spares the others the work; that each tick exists once doesn't depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import structlog

from tracelake.contracts.sources import (
    SCHEDULER_LEASE_SECONDS,
    SchedulesRequest,
    SchedulesResponse,
    SourceRan,
    TickIn,
    TickOut,
    TickState,
)
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.source_requests import (
    AcceptedRequest,
    SourceRequest,
    accept_request,
    answered,
    counted,
)
from tracelake.domain.dag.model import SourceKind
from tracelake.domain.errors import Conflict
from tracelake.domain.schedule import due_ticks, parse_schedule
from tracelake.store import dags, jobs, sources
from tracelake.store.db import DeployLock, Transaction, database_now
from tracelake.store.sources import SourceRow

TICKS_AT_ONCE = 100
"""Ticks that one transaction makes: it holds its source's lock, and keeps deploys away, for no longer."""

log = structlog.get_logger(__name__)


async def schedules(ctx: StepContext, request: SchedulesRequest) -> SchedulesResponse:
    """The schedules for the scheduler that acts; the others learn the time only."""

    async def work(tx: Transaction) -> SchedulesResponse:
        now = await database_now(tx)
        if request.release:
            await sources.release_scheduler_lease(tx, request.scheduler_id)
            return SchedulesResponse(False, now)
        if not await sources.take_scheduler_lease(tx, request.scheduler_id, SCHEDULER_LEASE_SECONDS):
            return SchedulesResponse(False, now)
        return SchedulesResponse(True, now, await sources.schedules(tx))

    # A lease that a crash of the database forgets is taken again.
    return await ctx.db.run(work, lock=DeployLock.NONE, durable=False)


async def accept_ticks(ctx: StepContext, ticks: Sequence[TickIn]) -> list[TickOut]:
    """Each tick in a transaction of its own, in the order given."""
    return [await _accept_tick(ctx, tick) for tick in ticks]


async def _accept_tick(ctx: StepContext, tick: TickIn) -> TickOut:
    async def work(tx: Transaction) -> AcceptedRequest | TickState:
        job = await jobs.find_active(tx, tick.dag_name, tick.job)
        if job is None or job.source_kind is not SourceKind.CRON:
            return "unknown"
        row = await sources.lock(tx, tick.dag_name, tick.job)
        if tick.tick <= _last(row):
            return "known"
        if tick.tick > row.now.timestamp():
            return "early"
        return await accept_request(ctx, tx, job, SourceRequest(SourceKind.CRON, tick.tick))

    with ctx.metrics.timed("tick"):
        done = await ctx.db.run(work, hot=True)
    if not isinstance(done, AcceptedRequest):
        answered(ctx, SourceKind.CRON, done)
        return TickOut(tick.dag_name, tick.job, tick.tick, done)
    counted(ctx, SourceKind.CRON, done)
    state: TickState = "kept" if done.kept else "accepted"
    return TickOut(tick.dag_name, tick.job, tick.tick, state, done.event_id, done.tasks_created)


def _last(row: SourceRow) -> float:
    """Ticks up to here exist already, or are from before the deploy."""
    return max(-1 if row.last_tick is None else row.last_tick, row.since.timestamp())


async def run_source(ctx: StepContext, dag: str, name: str, actor: str) -> SourceRan:
    """Make a tick of this second, as if the source were scheduled now. What the schedulers have missed is made
    first: afterwards it would be older than the last tick, and known."""
    tick: int | None = None

    async def work(tx: Transaction) -> list[AcceptedRequest]:
        nonlocal tick
        tick = None
        job = await jobs.active(tx, dag, name)
        if job.source_kind is not SourceKind.CRON:
            raise Conflict("NotCron", f"{dag}/{name} is not a cron source")
        row = await sources.lock(tx, dag, name)
        this_second = int(row.now.timestamp())
        if row.last_tick is not None and this_second <= row.last_tick:
            raise Conflict("TickExists", f"{dag}/{name} has a tick of this second, or a later one; try again")
        # Up to the same time as the tick, under the same lock: none can become due in between.
        ticks = [*(each for each in await _due(tx, dag, name, row.now) if each < this_second), this_second]
        if len(ticks) <= TICKS_AT_ONCE:
            tick = this_second
            await dags.audit(tx, ctx.org_id, actor, "run source", {"job": f"{dag}/{name}", "tick": tick})
        return [
            await accept_request(ctx, tx, job, SourceRequest(SourceKind.CRON, each))
            for each in ticks[:TICKS_AT_ONCE]
        ]

    # Many missed ticks take several transactions, of which the last one makes this one.
    while True:
        accepted = await ctx.db.run(work, hot=True)
        for each in accepted:
            counted(ctx, SourceKind.CRON, each)
        if tick is not None:
            break
    done = accepted[-1]
    log.info("source run", job=f"{dag}/{name}", tick=tick, actor=actor)
    return SourceRan(dag, name, tick, done.kept, done.event_id, done.tasks_created)


async def _due(tx: Transaction, dag: str, name: str, now: datetime) -> list[int]:
    """The ticks that a scheduler would send now, if one acted."""
    for source in await sources.schedules(tx):
        if (source.dag_name, source.job) == (dag, name):
            schedule = parse_schedule(source.schedule, source.timezone)
            return due_ticks(schedule, source.after, now, source.catch_up).ticks
    return []
