"""Pressure as rows: the snapshot that ``domain/pressure.py`` decides from, trips and holds, and what is kept.

Waiting tasks are counted by triggers, as rows that are only added (``queue_count``): no claim waits for another one
because both change a number, and a million waiting tasks cost no more to count than ten.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from tracelake.contracts.pressure import HeldJob, JobPressure, KeptWork, OperatorLoad, PressureReport
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, SourceKind
from tracelake.domain.pressure import JobLoad, PressureDecision, PressureSettings, Tier, Trip
from tracelake.postgres import sqlfiles
from tracelake.store.db import Row, Transaction
from tracelake.store.tasks import NewTask

SQL = sqlfiles.load("tracelake.store.sql", "pressure.sql")


@dataclass(frozen=True, slots=True)
class Loads:
    """The jobs without their edges; ``backlogs`` are released jobs with something kept."""

    jobs: dict[UUID, JobLoad[UUID]]
    names: dict[UUID, str]
    backlogs: list[UUID]


@dataclass(frozen=True, slots=True)
class StoredHold:
    job: UUID
    cause: UUID
    bulk_only: bool


@dataclass(frozen=True, slots=True)
class ChangedJob:
    """A job that was held or released just now."""

    name: str
    held: bool
    bulk_held: bool


@dataclass(frozen=True, slots=True)
class ReleasedJob:
    """``room`` is what is left in its own queue, and ``room_below`` in the fullest one of its consumers; None where
    there is no threshold. ``kept`` says whether anything is kept that may go on."""

    paused: bool
    bulk_held: bool
    strategy: ExecutionStrategy | None
    source_kind: SourceKind | None
    room: int | None
    room_below: int | None
    kept: bool


async def loads(tx: Transaction) -> Loads:
    found = Loads({}, {}, [])
    for row in await tx.fetch(SQL.loads):
        job = row["job_id"]
        seconds = row["max_queue_age_seconds"]
        found.names[job] = f"{row['dag_name']}/{row['name']}"
        found.jobs[job] = JobLoad(
            bulk=row["bulk"],
            bulk_work=row["bulk_work"],
            paused_by_person=row["paused_by_person"],
            waiting=row["waiting"],
            oldest=row["oldest"],
            max_depth=row["max_queue_depth"],
            max_age=timedelta(seconds=seconds) if seconds else None,
        )
        if row["backlog"]:
            found.backlogs.append(job)
    return found


async def with_edges(tx: Transaction, jobs: dict[UUID, JobLoad[UUID]]) -> dict[UUID, JobLoad[UUID]]:
    producers: dict[UUID, list[UUID]] = {}
    for row in await tx.fetch(SQL.edges):
        producers.setdefault(row["consumer"], []).append(row["producer"])
    return {job: replace(load, producers=tuple(producers.get(job, ()))) for job, load in jobs.items()}


async def trips(tx: Transaction) -> dict[UUID, Trip]:
    return {
        row["job_id"]: Trip(Tier(row["tier"]), row["since"], row["changed_at"], row["over_since"])
        for row in await tx.fetch(SQL.trips)
    }


async def holds(tx: Transaction) -> set[StoredHold]:
    return {
        StoredHold(row["job_id"], row["caused_by"], row["bulk_only"]) for row in await tx.fetch(SQL.holds)
    }


async def apply(
    tx: Transaction, decision: PressureDecision[UUID], names: dict[UUID, str], before: Iterable[StoredHold]
) -> list[ChangedJob]:
    """Write trips and holds as decided; the deploy lock is held exclusively. Returns the jobs that it stopped or
    let go."""
    await tx.execute(SQL.end_trips, list(decision.trips))
    if decision.trips:
        trips = decision.trips.values()
        await tx.execute(
            SQL.set_trips,
            list(decision.trips),
            [trip.tier.value for trip in trips],
            [trip.since for trip in trips],
            [trip.changed_at for trip in trips],
            [trip.over_since for trip in trips],
        )
    wanted = decision.holds
    held, causes = [hold.job for hold in wanted], [hold.cause for hold in wanted]
    await tx.fetch(SQL.lift_holds, held, causes)
    if wanted:
        chains = [" ".join(names[each] for each in hold.chain) for hold in wanted]
        await tx.execute(SQL.add_holds, held, causes, [hold.bulk_only for hold in wanted], chains)
    touched = {hold.job for hold in before} | set(held)
    rows = await tx.fetch(SQL.flag_jobs, sorted(touched))
    return [ChangedJob(f"{row['dag_name']}/{row['name']}", row["paused"], row["bulk_held"]) for row in rows]


async def note_times(tx: Transaction, trips: dict[UUID, Trip]) -> None:
    """Of trips whose tier stays as it is; without the deploy lock, so another replica may change it meanwhile."""
    await tx.execute(SQL.note_times, list(trips), [trip.over_since for trip in trips.values()])


async def fold_counts(tx: Transaction, above: int) -> None:
    row = await tx.fetchrow(SQL.count_rows)
    if row is not None and row["rows"] > above:
        await tx.execute(SQL.fold_counts)


async def released_job(tx: Transaction, job_id: UUID) -> ReleasedJob | None:
    row = await tx.fetchrow(SQL.released_job, job_id)
    if row is None:
        return None
    strategy, source = row["execution_strategy"], row["source_kind"]
    return ReleasedJob(
        row["paused"],
        row["bulk_held"],
        ExecutionStrategy(strategy) if strategy else None,
        SourceKind(source) if source else None,
        row["room"],
        row["room_below"],
        row["kept"],
    )


async def wake_released(tx: Transaction, job_id: UUID, limit: int) -> list[NewTask]:
    rows = await tx.fetch(SQL.wake_released, job_id, limit)
    return [NewTask(row["task_id"], row["runtime"], bulk=row["bulk"]) for row in rows]


async def take_scopes(
    tx: Transaction, job_id: UUID, *, bulk_held: bool, limit: int
) -> list[tuple[BlockRange, dict[str, Any]]]:
    """Kept scopes that are routed now; they are kept no longer."""
    rows = await tx.fetch(SQL.take_scopes, job_id, bulk_held, limit)
    return [
        (BlockRange(row["range_start"], row["range_end"]), row["cause"])
        for row in sorted(rows, key=lambda row: row["seq"])
    ]


async def take_events(tx: Transaction, job_id: UUID, *, bulk_held: bool, limit: int) -> list[Row]:
    """Kept events of a source; ``settle_events`` ends their being kept."""
    return await tx.fetch(SQL.take_events, job_id, bulk_held, limit)


async def settle_events(tx: Transaction, settled: Sequence[tuple[int, str, int]]) -> None:
    """``(event id, state, revision)`` each."""
    await tx.execute(
        SQL.settle_events, [s[0] for s in settled], [s[1] for s in settled], [s[2] for s in settled]
    )


async def end_backlog(tx: Transaction, job_id: UUID) -> None:
    await tx.execute(SQL.end_backlog, job_id)


async def set_caps(tx: Transaction, caps: Mapping[str, int]) -> None:
    """These and no others, for all Dispatchers of the installation."""
    await tx.execute(SQL.end_caps, list(caps))
    await tx.execute(SQL.set_caps, list(caps), list(caps.values()))


async def report(tx: Transaction, settings: PressureSettings) -> PressureReport:
    """Jobs with thresholds, every hold with what ends it, and what is kept though nothing is held."""
    rows = {row["job_id"]: row for row in await tx.fetch(SQL.report)}
    return PressureReport(
        [_job_pressure(row) for row in rows.values()],
        [
            _held_job(row, rows[row["caused_by"]], settings)
            for row in await tx.fetch(SQL.held_jobs)
            if row["caused_by"] in rows
        ],
        [
            OperatorLoad(row["operator"], row["running"], row["max_in_flight"])
            for row in await tx.fetch(SQL.operators)
        ],
        await backlogs(tx),
    )


async def backlogs(tx: Transaction) -> list[KeptWork]:
    """Kept work of jobs that aren't held, and what it waits for."""
    return [_kept_work(row) for row in await tx.fetch(SQL.backlogs)]


def _job_pressure(row: Row) -> JobPressure:
    depth = row["waiting"] / row["max_queue_depth"] if row["max_queue_depth"] else 0.0
    seconds, most = row["oldest_seconds"], row["max_queue_age_seconds"]
    age = seconds / most if most and seconds is not None else 0.0
    return JobPressure(
        dag_name=row["dag_name"],
        job=row["job"],
        priority=row["priority"],
        pressure=0.0 if row["paused_by_person"] else round(max(depth, age), 3),
        waiting=row["waiting"],
        max_queue_depth=row["max_queue_depth"],
        oldest_seconds=seconds,
        max_queue_age_seconds=most,
        paused_by_person=row["paused_by_person"],
        holds=row["tier"],
        since=row["since"],
    )


def _held_job(row: Row, cause: Row, settings: PressureSettings) -> HeldJob:
    depth, seconds = cause["max_queue_depth"], cause["max_queue_age_seconds"]
    below = math.ceil(depth * settings.low_mark) if depth else None
    below_seconds = seconds * settings.low_mark if seconds else None
    at_least = max(0.0, settings.min_hold.total_seconds() - (cause["unchanged_seconds"] or 0.0))
    return HeldJob(
        dag_name=row["dag_name"],
        job=row["job"],
        cause_dag=row["cause_dag"],
        cause_job=row["cause_job"],
        bulk_only=row["bulk_only"],
        since=row["since"],
        chain=row["chain"],
        released_below=below,
        released_below_seconds=below_seconds,
        at_least_seconds=at_least,
        message=_story(row, cause, below, below_seconds, math.ceil(at_least)),
    )


def _story(row: Row, cause: Row, below: int | None, below_seconds: float | None, at_least: int) -> str:
    """`ingest is held by pressure of erc20/transfers (1,204 of 1,000 waiting, oldest 11 min), since 12:03, through
    logs → transfers; released below 500, in 4 s at the earliest`: jobs of the cause's DAG without its name. The
    time is UTC, with its date once that is a day ago."""
    dag = f"{row['cause_dag']}/"
    who = ("bulk work of " if row["bulk_only"] else "") + f"{row['dag_name']}/{row['job']}".removeprefix(dag)
    of = f" of {cause['max_queue_depth']:,}" if cause["max_queue_depth"] else ""
    oldest = "" if cause["oldest_seconds"] is None else f", oldest {_span(cause['oldest_seconds'])}"
    through = " → ".join(each.removeprefix(dag) for each in row["chain"][1:])
    ends = [f"below {below:,}"] if below is not None else []
    ends += [f"when the oldest has waited for less than {_span(below_seconds)}"] if below_seconds else []
    # The queue may be empty enough already: then this alone is what is waited for.
    earliest = f", in {at_least} s at the earliest" if at_least else ""
    since = f"{row['since']:%Y-%m-%d %H:%MZ}" if row["long_held"] else f"{row['since']:%H:%M}"
    return (
        f"{who} is held by pressure of {dag}{row['cause_job']} ({cause['waiting']:,}{of} waiting{oldest}), "
        f"since {since}, through {through}; released {' and '.join(ends) or 'at once'}{earliest}"
    )


def _kept_work(row: Row) -> KeptWork:
    """`12 kept scopes of transfers wait for room in its queue (3 of 3 waiting, 24 more for a retry time)`."""
    kinds = [
        f"{row[kind]:,} kept {kind if row[kind] > 1 else kind[:-1]}"
        for kind in ("scopes", "events", "requests")
        if row[kind]
    ]
    kept = row["scopes"] + row["events"] + row["requests"]
    what = f"{' and '.join(kinds)} of {row['dag_name']}/{row['job']}"
    if row["full_job"] is None:
        message = f"{what} {'are' if kept > 1 else 'is'} being routed"
    else:
        own = (row["full_dag"], row["full_job"]) == (row["dag_name"], row["job"])
        where = "its queue" if own else f"the queue of {row['full_dag']}/{row['full_job']}"
        later = f", {row['later']:,} more for a retry time" if row["later"] else ""
        message = (
            f"{what} {'wait' if kept > 1 else 'waits'} for room in {where} "
            f"({row['waiting']:,} of {row['max_queue_depth']:,} waiting{later})"
        )
    return KeptWork(
        dag_name=row["dag_name"],
        job=row["job"],
        kept=kept,
        full_dag=row["full_dag"],
        full_job=row["full_job"],
        message=message,
    )


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
