"""Backpressure applied: hold the producers of jobs whose queues are full, and release them when these are not.

``balance`` looks, decides by ``domain/pressure.py`` and, only if something changes, acts in one transaction that
holds the deploy lock exclusively: every claim and every routing comes either before the hold and is done, or after
it and reads it from the job's row. It decides again in there, so any number of replicas may look at once and the
first one acts. Trips and holds are rows, so a restart changes nothing.

What a held job would have been given is kept: scopes of PerPartition jobs (``held_scope``), events of sources that
have no tasks of their own (state ``held``), wake-ups that claims used up (``parked``). ``drain`` gives a released
job these in their order, no more at a time than its queue, or its consumers', has room for: a release never fills a
queue beyond its threshold. Until then new events of the job queue up behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

import structlog

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.count_events import Gates, count_events, open_gates
from tracelake.dispatcher.steps.produced_events import ProducedEvent, Producer
from tracelake.dispatcher.steps.route_events import create_updates
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, SourceKind, Storage
from tracelake.domain.events import CursorScope, PartitionScope
from tracelake.domain.pressure import PressureDecision, PressureSnapshot, Tier, decide, pressure_of
from tracelake.store import db, outbox, pressure, tasks
from tracelake.store.db import DeployLock, Row, Transaction
from tracelake.store.pressure import ChangedJob, Loads, StoredHold

BATCH = 500
FOLD_ABOVE = 2_000
"""Rows of counts that are added up at every look; above, they are folded to one per job."""

_FAR = 2**31

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Balance:
    """``more`` says that a backlog could be worked off further. ``look_again`` is when time alone may change the
    decision, in seconds from now. ``until_full`` new tasks may fill a queue, ``until_empty`` claims may empty
    one."""

    look_again: float | None = None
    more: bool = False
    changed: Sequence[ChangedJob] = ()
    until_full: int = _FAR
    until_empty: int = _FAR


@dataclass(frozen=True, slots=True)
class _Look:
    loads: Loads
    decision: PressureDecision[UUID]
    holds: set[StoredHold]
    now: datetime
    settled: bool


async def balance(ctx: StepContext) -> Balance:
    """Look once, act if needed, and work off backlogs of what is released."""
    look = await ctx.db.run(lambda tx: _look(ctx, tx), lock=DeployLock.NONE, durable=False)
    changed: Sequence[ChangedJob] = ()
    if not look.settled:
        with ctx.metrics.timed("backpressure"):
            look, changed = await ctx.db.run(lambda tx: _act(ctx, tx), lock=DeployLock.EXCLUSIVE)
        for job in changed:
            log.info("backpressure", job=job.name, held=job.held, bulk_held=job.bulk_held)
        if any(not job.held for job in changed):
            ctx.waiting_requests.set()
    backlogs = set(look.loads.backlogs)
    names = {name: job for job, name in look.loads.names.items()}
    backlogs |= {names[job.name] for job in changed if not job.held and job.name in names}
    more = [await drain(ctx, job) for job in sorted(backlogs)]
    again = look.decision.look_again
    return Balance(
        look_again=None if again is None else max(0.0, (again - look.now).total_seconds()),
        more=any(more),
        changed=changed,
        until_full=_until_full(look),
        until_empty=_until_empty(ctx, look, backlogs),
    )


def _until_full(look: _Look) -> int:
    """The least number of tasks from here to a trip, or to the normal tier of one that has tripped."""
    rooms = []
    for job, load in look.loads.jobs.items():
        if load.max_depth is not None:
            trip = look.decision.trips.get(job)
            if trip is None:
                rooms.append(load.max_depth - load.waiting)
            elif trip.tier is Tier.BULK:
                rooms.append(2 * load.max_depth - load.waiting)
    return max(1, min(rooms, default=_FAR))


def _until_empty(ctx: StepContext, look: _Look, backlogs: set[UUID]) -> int:
    """The least number of claims from here to below a low mark. A backlog goes on with every claim."""
    if backlogs:
        return 1
    jobs = look.loads.jobs
    above = [
        jobs[job].waiting - int((jobs[job].max_depth or 0) * ctx.pressure.low_mark)
        for job in look.decision.trips
        if job in jobs
    ]
    return max(1, min(above, default=_FAR))


async def _look(ctx: StepContext, tx: Transaction) -> _Look:
    now = await db.database_now(tx)
    loads, trips = await pressure.loads(tx), await pressure.trips(tx)
    jobs = loads.jobs
    # The graph matters only where something is full, which is rare.
    if trips or any(pressure_of(load, now) >= 1 for load in jobs.values()):
        jobs = await pressure.with_edges(tx, jobs)
    decision = decide(PressureSnapshot(jobs, trips, ctx.pressure), now)
    holds = await pressure.holds(tx)
    wanted = {StoredHold(hold.job, hold.cause, hold.bulk_only) for hold in decision.holds}
    same_trips = {job: trip.tier for job, trip in trips.items()} == {
        job: trip.tier for job, trip in decision.trips.items()
    }
    settled = same_trips and holds == wanted
    if settled:
        if retimed := {job: trip for job, trip in decision.trips.items() if trips[job] != trip}:
            await pressure.note_times(tx, retimed)
        await pressure.fold_counts(tx, FOLD_ABOVE + len(jobs))
    return _Look(loads, decision, holds, now, settled)


async def _act(ctx: StepContext, tx: Transaction) -> tuple[_Look, Sequence[ChangedJob]]:
    # Decided again under the lock: another replica may have acted, and nothing changes from here on.
    look = await _look(ctx, tx)
    if look.settled:
        return look, ()
    return look, await pressure.apply(tx, look.decision, look.loads.names, look.holds)


async def drain(ctx: StepContext, job_id: UUID) -> bool:
    """Give a released job what was kept for it, as far as there is room; returns whether to go on at once."""

    async def work(tx: Transaction) -> bool:
        job = await pressure.released_job(tx, job_id)
        if job is None or job.paused:
            return False
        below = _up_to(job.room_below)
        events = []
        if job.source_kind is not None:
            events = await pressure.take_events(tx, job_id, bulk_held=job.bulk_held, limit=below)
        produced = [_produced(job_id, row) for row in events]
        gates = await open_gates(tx, produced, own_jobs=[job_id])
        # Again under the lock, which a pause by a person takes too.
        job = await pressure.released_job(tx, job_id)
        if job is None or job.paused:
            return False
        woken = await pressure.wake_released(tx, job_id, BATCH)
        await outbox.wake(tx, woken)
        left, full = len(woken) == BATCH, False
        if job.source_kind is not None and job.source_kind is not SourceKind.ALWAYS_ON:
            await _count_kept(ctx, tx, events, produced, gates)
            left, full = left or 0 < below == len(events), job.kept and below == 0
        elif job.strategy is ExecutionStrategy.PER_UPDATE:
            await outbox.wake(tx, await create_updates(ctx, tx, [job_id]))
        elif job.strategy is ExecutionStrategy.PER_PARTITION:
            room = _up_to(job.room)
            scopes = await pressure.take_scopes(tx, job_id, bulk_held=job.bulk_held, limit=room)
            created = await tasks.create_partition_tasks(
                tx, [(ctx.entropy.uuid(), job_id, span, cause) for span, cause in scopes], kept=True
            )
            await outbox.wake(tx, created)
            left, full = left or 0 < room == len(scopes), job.kept and room == 0
        # A full queue keeps back only what is kept: with nothing kept, what comes now is routed as ever.
        if not (left or full):
            await pressure.end_backlog(tx, job_id)
        return left

    return await ctx.db.run(work)


def _up_to(room: int | None) -> int:
    return BATCH if room is None else max(0, min(BATCH, room))


async def _count_kept(
    ctx: StepContext, tx: Transaction, events: Sequence[Row], produced: Sequence[ProducedEvent], gates: Gates
) -> None:
    if not produced:
        return
    counted = await count_events(ctx, tx, produced, gates)
    await pressure.settle_events(
        tx,
        [
            (row["event_id"], kept.state.value, kept.revision)
            for row, kept in zip(events, counted.kept, strict=True)
        ],
    )


def _produced(job_id: UUID, row: Row) -> ProducedEvent:
    """A kept event again, as its source sent it."""
    scope = (
        CursorScope(row["range_end"], None)
        if row["kind"] == "cursor"
        else PartitionScope(BlockRange(row["range_start"], row["range_end"]))
    )
    producer = Producer(row["org_id"], job_id, active=True, bulk=row["bulk"])
    return ProducedEvent(
        producer, row["dataset_version"], Storage(row["storage"]), scope, event_id=row["event_id"]
    )
