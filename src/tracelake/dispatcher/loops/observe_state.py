"""Refreshes the gauges, so that a scrape costs the database nothing."""

from __future__ import annotations

from collections.abc import Iterable

from tracelake import sqlfiles
from tracelake.dispatcher.metrics import StateGauges
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.queue.base import Queue, QueueDepth
from tracelake.store import outbox
from tracelake.store.db import Database, DeployLock, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "metrics.sql")
_EMPTY = QueueDepth(0, 0, 0, 0, 0.0)


async def observe_state(db: Database, queue: Queue, runtimes: RuntimeRegistry, gauges: StateGauges) -> None:
    async def work(tx: Transaction) -> None:
        gauges.queued.clear()
        gauges.queued_age.clear()
        for row in await tx.fetch(SQL.queued):
            labels = (row["runtime"], row["dag_name"], row["name"])
            gauges.queued.labels(*labels).set(row["waiting"])
            gauges.queued_age.labels(*labels).set(row["oldest_seconds"])
        gauges.in_flight.clear()
        for row in await tx.fetch(SQL.in_flight):
            gauges.in_flight.labels(row["operator"]).set(row["running"])
        gauges.dead_letters.clear()
        for row in await tx.fetch(SQL.dead_letters):
            gauges.dead_letters.labels(row["dataset"]).set(row["kept"])
        lag = await outbox.lag(tx)
        gauges.outbox_due.set(lag.due)
        gauges.outbox_lag.set(lag.oldest_seconds)
        for row in await tx.fetch(SQL.given_up):
            gauges.outbox_given_up.set(row["given_up"])

    await db.run(work, lock=DeployLock.NONE)
    await _observe_queues(queue, runtimes.queues(), gauges)


async def _observe_queues(queue: Queue, names: Iterable[str], gauges: StateGauges) -> None:
    depths = await queue.depths()
    # A buffer's queue is only known while it holds something.
    for each in (gauges.queue_visible, gauges.queue_in_flight, gauges.queue_age, gauges.queue_dead):
        each.clear()
    for name in {*names, *depths}:
        depth = depths.get(name, _EMPTY)
        gauges.queue_visible.labels(name).set(depth.visible)
        gauges.queue_in_flight.labels(name).set(depth.in_flight)
        gauges.queue_age.labels(name).set(depth.oldest_age_seconds or 0.0)
        gauges.queue_dead.labels(name).set(depth.dead)
