"""Sources that are activated from outside: what they have accepted, their schedules, their secrets.

A source goes by the names of its DAG and its job, through all generations of that job. Its row is a lock: accepting
and routing requests of one source take turns under it, which makes their numbers rise and keeps their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec

from tracelake.contracts.sources import ScheduledSource, SourcePage, SourceSummary
from tracelake.domain.dag.model import CronSettings, SourceKind, SourceSettings, WebhookSettings
from tracelake.domain.errors import NotFound
from tracelake.postgres import sqlfiles
from tracelake.store import pressure
from tracelake.store.db import Row, Transaction
from tracelake.store.tasks import NewTask

SQL = sqlfiles.load("tracelake.store.sql", "sources.sql")
CLOCK_AHEAD_SECONDS = 60.0
"""A last tick that lies further in the future was made while the clock was ahead."""


@dataclass(frozen=True, slots=True)
class SourceRow:
    """A locked source. ``last_tick`` is the last one up to now, of which every later one is still to be made;
    ``allowance`` is what its rate limit left at ``allowed_at``."""

    last_tick: int | None
    last_number: int
    since: datetime
    allowance: float | None
    allowed_at: datetime | None
    now: datetime


@dataclass(frozen=True, slots=True)
class DeliveryRow:
    """What a webhook's caller sent. A body that isn't small is in the object store."""

    delivery_id: str
    content_type: str | None
    body: bytes | None
    body_location: str | None
    body_bytes: int


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    request_id: int
    kind: SourceKind
    number: int
    scope: dict[str, int]
    bulk: bool


@dataclass(frozen=True, slots=True)
class RequestGate:
    """Whether requests of a source may become tasks. ``room`` is what is left in its own queue, and ``normal_room``
    what normal work has of it, which doesn't wait for bulk tasks that may be held; None without a threshold."""

    paused: bool
    bulk_held: bool
    room: int | None
    normal_room: int | None
    any_waits: bool
    normal_waits: bool

    def keeps(self, *, bulk: bool) -> bool:
        """Whether a new request waits: it can't go, or would pass one that waits and can."""
        if not self.has_room(bulk=bulk) or self.normal_waits:
            return True
        # Bulk ones wait, if any.
        return self.any_waits and self.has_room(bulk=True)

    def routable(self, waiting: Sequence[WaitingRequest]) -> list[WaitingRequest]:
        """Those that become tasks now, in their order."""
        taken: list[WaitingRequest] = []
        for request in waiting:
            before = sum(1 for each in taken if request.bulk or not each.bulk)
            if self._room(bulk=request.bulk) > before:
                taken.append(request)
        return taken

    def has_room(self, *, bulk: bool) -> bool:
        """Whether any request of this kind may go."""
        return self._room(bulk=bulk) > 0

    def _room(self, *, bulk: bool) -> float:
        if self.paused or (bulk and self.bulk_held):
            return 0
        room = self.room if bulk else self.normal_room
        return math.inf if room is None else room


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """The request that a task is for."""

    kind: SourceKind
    number: int
    scope: dict[str, int]
    accepted_at: datetime
    delivery: DeliveryRow | None


@dataclass(frozen=True, slots=True)
class Webhook:
    """``secrets`` are those that are accepted now, the latest first."""

    job_id: UUID
    settings: WebhookSettings
    secrets: tuple[str, ...]
    now: datetime


def settings_of(stored: Any) -> SourceSettings | None:
    return None if stored is None else msgspec.convert(stored, SourceSettings)


async def keep(tx: Transaction, org_id: UUID, dag: str, job: str, source: SourceSettings | None) -> None:
    schedule = f"{source.schedule} {source.timezone}" if isinstance(source, CronSettings) else None
    await tx.execute(SQL.keep_source, dag, job, org_id, schedule)


async def forget_future_deploys(tx: Transaction, dag: str) -> None:
    await tx.execute(SQL.forget_future_deploys, dag, CLOCK_AHEAD_SECONDS)


async def retire_others(tx: Transaction, dag: str, jobs: Iterable[str]) -> None:
    await tx.execute(SQL.retire_sources, dag, list(jobs))


async def lock(tx: Transaction, dag: str, job: str) -> SourceRow:
    row = await tx.fetchrow(SQL.lock_source, dag, job, CLOCK_AHEAD_SECONDS)
    if row is None:
        raise NotFound("UnknownSource", f"there is no source {dag}/{job}")
    return SourceRow(**row)


async def request_gate(tx: Transaction, job_id: UUID) -> RequestGate:
    """Of a source whose requests become tasks. Under its job's lock it holds until the transaction ends."""
    row = await tx.fetchrow(SQL.request_gate, job_id)
    if row is None:
        raise NotFound("UnknownJob", f"there is no job {job_id}")
    return RequestGate(**row)


async def advance(
    tx: Transaction, dag: str, job: str, *, tick: int | None = None, number: int | None = None
) -> None:
    await tx.execute(SQL.advance_source, dag, job, tick, number)


async def take_allowance(tx: Transaction, dag: str, job: str, left: float) -> None:
    await tx.execute(SQL.take_allowance, dag, job, left)


async def add_request(
    tx: Transaction,
    org_id: UUID,
    dag: str,
    job: str,
    kind: SourceKind,
    number: int,
    scope: Mapping[str, int],
    delivery: DeliveryRow | None,
    *,
    bulk: bool,
    routed: bool,
) -> int:
    sent = delivery or DeliveryRow("", None, None, None, 0)
    row = await tx.fetchrow(
        SQL.add_request,
        org_id,
        dag,
        job,
        kind.value,
        number,
        dict(scope) or None,
        sent.delivery_id or None,
        sent.content_type,
        sent.body,
        sent.body_location,
        sent.body_bytes if delivery else None,
        bulk,
        routed,
    )
    assert row is not None
    request_id: int = row["request_id"]
    return request_id


async def number_of_delivery(tx: Transaction, dag: str, job: str, delivery_id: str) -> int | None:
    row = await tx.fetchrow(SQL.delivery, dag, job, delivery_id)
    return row["number"] if row else None


async def begin_body(tx: Transaction, location: str) -> None:
    await tx.execute(SQL.begin_body, location)


async def name_body(tx: Transaction, location: str) -> bool:
    """Whether a request may name the body: false when it was dropped."""
    return await tx.fetchrow(SQL.name_body, location) is not None


async def drop_body(tx: Transaction, location: str) -> bool:
    """Whether no request names the body, nor will."""
    return await tx.fetchrow(SQL.drop_body, location) is not None


async def drop_late_bodies(tx: Transaction, seconds: float, limit: int) -> list[str]:
    return [row["location"] for row in await tx.fetch(SQL.drop_late_bodies, seconds, limit)]


async def forget_bodies(tx: Transaction, locations: Sequence[str]) -> None:
    await tx.execute(SQL.forget_bodies, list(locations))


async def waiting_sources(tx: Transaction) -> list[tuple[str, str]]:
    return [(row["dag_name"], row["job_name"]) for row in await tx.fetch(SQL.waiting_sources)]


async def waiting_requests(
    tx: Transaction, dag: str, job: str, limit: int, *, with_bulk: bool
) -> list[WaitingRequest]:
    return [
        WaitingRequest(
            row["request_id"], SourceKind(row["kind"]), row["number"], row["scope"] or {}, row["bulk"]
        )
        for row in await tx.fetch(SQL.waiting_requests, dag, job, limit, with_bulk)
    ]


async def mark_routed(tx: Transaction, request_ids: Sequence[int]) -> None:
    await tx.execute(SQL.mark_routed, list(request_ids))


async def reopen(tx: Transaction, task_ids: Sequence[UUID]) -> None:
    """Requests of tasks that were shelved: the next generation of the job runs them."""
    if task_ids:
        await tx.execute(SQL.reopen_requests, list(task_ids))


async def take_over_kept(tx: Transaction, job_id: UUID, *, runs_code: bool) -> None:
    """Events that earlier generations of a source kept while they were held: this one routes them, or runs them."""
    await tx.execute(SQL.reopen_kept_events if runs_code else SQL.move_kept_events, job_id)


async def create_tasks(
    tx: Transaction, job_id: UUID, requests: Sequence[tuple[UUID, int, dict[str, Any]]]
) -> list[NewTask]:
    """``(new task id, request, cause)`` each, under the job's gate."""
    if not requests:
        return []
    rows = await tx.fetch(
        SQL.create_request_tasks,
        job_id,
        [request[0] for request in requests],
        [request[1] for request in requests],
        [request[2] for request in requests],
    )
    return [NewTask(row["task_id"], row["runtime"], row["wake"], row["bulk"]) for row in rows]


async def requests_of(tx: Transaction, task_ids: Sequence[UUID]) -> dict[UUID, TaskRequest]:
    if not task_ids:
        return {}
    return {row["task_id"]: _request(row) for row in await tx.fetch(SQL.requests_of_tasks, list(task_ids))}


def _request(row: Row) -> TaskRequest:
    kind = SourceKind(row["kind"])
    delivery = None
    if kind is SourceKind.WEBHOOK:
        delivery = DeliveryRow(
            row["delivery_id"], row["content_type"], row["body"], row["body_location"], row["body_bytes"]
        )
    return TaskRequest(kind, row["number"], row["scope"] or {}, row["accepted_at"], delivery)


async def schedules(tx: Transaction) -> list[ScheduledSource]:
    found = []
    for row in await tx.fetch(SQL.schedules, CLOCK_AHEAD_SECONDS):
        source = settings_of(row["source"])
        assert isinstance(source, CronSettings)
        after = row["since"]
        if row["last_tick"] is not None:
            after = max(after, datetime.fromtimestamp(row["last_tick"], after.tzinfo))
        found.append(
            ScheduledSource(
                row["dag_name"], row["job"], source.schedule, source.timezone, source.catch_up, after
            )
        )
    return found


async def take_scheduler_lease(tx: Transaction, scheduler_id: str, seconds: float) -> bool:
    return await tx.fetchrow(SQL.take_scheduler_lease, scheduler_id, seconds) is not None


async def release_scheduler_lease(tx: Transaction, scheduler_id: str) -> None:
    await tx.execute(SQL.release_scheduler_lease, scheduler_id)


async def page(tx: Transaction, org_id: UUID, after: str, limit: int, now: datetime) -> SourcePage:
    """Active sources by name; ``after`` is the ``next`` of the page before, DAG/JOB."""
    dag, _, job = after.partition("/")
    rows = await tx.fetch(SQL.list_sources, org_id, dag, job, limit + 1, CLOCK_AHEAD_SECONDS)
    reasons = {}
    # A paused source has its reason in its pause.
    if any(row["waiting"] and not row["paused"] for row in rows):
        reasons = {(kept.dag_name, kept.job): kept.message for kept in await pressure.backlogs(tx)}
    found = [_summary({**row, "waiting_for": _waits_for(row, reasons)}) for row in rows[:limit]]
    last = f"{found[-1].dag_name}/{found[-1].job}" if len(rows) > limit else None
    return SourcePage(now, found, last)


def _waits_for(row: Row, reasons: Mapping[tuple[str, str], str]) -> str | None:
    reason = reasons.get((row["dag_name"], row["job"]))
    if reason is None and row["waiting"] and not row["paused"] and row["bulk_causes"]:
        return f"bulk work is held by {', '.join(row['bulk_causes'])}"
    return reason


def _summary(row: Mapping[str, Any]) -> SourceSummary:
    fields = {name: value for name, value in row.items() if name != "source"}
    source = settings_of(row["source"])
    own = msgspec.to_builtins(source) if source is not None else {}
    return msgspec.convert({**own, **fields}, SourceSummary)


async def webhook(tx: Transaction, dag: str, job: str) -> Webhook | None:
    row = await tx.fetchrow(SQL.webhook, dag, job)
    if row is None:
        return None
    source = settings_of(row["source"])
    assert isinstance(source, WebhookSettings)
    return Webhook(row["job_id"], source, tuple(row["secrets"]), row["now"])


async def has_secret(tx: Transaction, dag: str, job: str) -> bool:
    return await tx.fetchrow(SQL.has_secret, dag, job) is not None


async def add_secret(tx: Transaction, dag: str, job: str, secret: str, *, shown: bool) -> None:
    await tx.execute(SQL.add_secret, dag, job, secret, shown)


async def show_secret(tx: Transaction, dag: str, job: str) -> str | None:
    """None when it was shown before."""
    row = await tx.fetchrow(SQL.show_secret, dag, job)
    return row["secret"] if row else None


async def expire_secrets(tx: Transaction, dag: str, job: str, overlap_seconds: int) -> list[datetime]:
    """Until when each one that is left is accepted; the latest of them is the one before the rotation."""
    rows = await tx.fetch(SQL.expire_secrets, dag, job, float(overlap_seconds))
    return sorted(row["expires_at"] for row in rows)


async def forget_secrets(tx: Transaction, dag: str, webhooks: Iterable[str]) -> None:
    """Those of all other sources of the DAG."""
    await tx.execute(SQL.forget_secrets, dag, list(webhooks))
