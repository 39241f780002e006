"""The Dispatcher's metrics: counters and latencies of steps, and gauges of the state database.

Steps count after their commit. Loops refresh the gauges, so that a scrape costs the database nothing. A database is
read as a whole before a gauge is changed: no scrape comes in between and finds series missing. While it is away,
gauges keep their last values, but for ages, which grow; ``tracelake_observed_timestamp_seconds`` says since when.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tracelake.contracts.pressure import PressureReport
from tracelake.contracts.user_api import ChainStatus
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.domain.chain_status import ChainCondition
from tracelake.domain.pressure import PressureSettings, Tier
from tracelake.postgres import sqlfiles
from tracelake.queue.base import Queue, QueueDepth
from tracelake.store import chains, outbox, pressure, waiting
from tracelake.store.db import Database, DeployLock, Row, Transaction
from tracelake.store.outbox import OutboxLag
from tracelake.store.waiting import ServedRuntime

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
SQL = sqlfiles.load("tracelake.store.sql", "metrics.sql")
_ENDPOINT_STATE = re.compile(
    r"([A-Za-z0-9_][A-Za-z0-9_.:\-]{0,63}) (ok|suspect|resting|left out|unknown)(?:, |$)"
)
_MOST_ENDPOINTS = 16
_IN_ORDER = ("ok", "unknown")
_EMPTY = QueueDepth(0, 0, 0, 0, 0.0)
_OVERDUE_SECONDS = 15.0
"""Not at once: most of what waits at one refresh is gone at the next."""
_AGES = ("head_age_seconds", "known_age_seconds")
STATE, QUEUE = _STORES = ("state", "queue")


class StepMetrics:
    """Counters and latencies of the steps."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.step_seconds = Histogram(
            "tracelake_step_seconds", "Time of one step.", ["step"], buckets=_BUCKETS, registry=registry
        )
        self.claims = Counter("tracelake_claims_total", "Claims by answer.", ["answer"], registry=registry)
        self.completions = Counter(
            "tracelake_completions_total", "Completions by answer.", ["answer"], registry=registry
        )
        self.retries = Counter("tracelake_retries_total", "Tasks queued again.", registry=registry)
        self.lease_expiries = Counter(
            "tracelake_lease_expiries_total", "Attempts given up by the reaper.", registry=registry
        )
        self.events = Counter("tracelake_events_total", "Events by state.", ["state"], registry=registry)
        self.source_requests = Counter(
            "tracelake_source_requests_total",
            "Ticks, deliveries and triggers by answer; limited are calls of webhooks that were answered 429.",
            ["kind", "answer"],
            registry=registry,
        )
        self.tasks_created = Counter("tracelake_tasks_created_total", "Tasks created.", registry=registry)
        self.rewoken = Counter(
            "tracelake_rewoken_total", "Wake-ups repeated by the sweep.", registry=registry
        )
        self.reconciled = Counter(
            "tracelake_reconciled_total", "Tasks that the reconciler had to create.", registry=registry
        )
        self.skipped = Counter(
            "tracelake_scopes_skipped_total",
            "Scopes without a task, since no row of them can match the where of their job's triggering inputs.",
            registry=registry,
        )

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.step_seconds.labels(step).observe(perf_counter() - began)


@dataclass(frozen=True, slots=True)
class ObservedState:
    """What the gauges show of the state database, read in one transaction."""

    queued: Sequence[Row]
    pressure: PressureReport
    kept: Sequence[Row]
    dead_letters: Sequence[Row]
    runtimes: Sequence[ServedRuntime]
    deliveries: Sequence[Row]
    outbox: OutboxLag
    given_up: int
    chains: Sequence[ChainStatus]


class StateGauges:
    """Numbers of waiting and running things, as of the last pass of the loops. Showing them begins by clearing:
    label sets that have gone would keep their last value forever."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tracelake_{name}", text, labels, registry=registry)

        self.queued = gauge("tasks_queued", "Tasks that wait, for any reason.", "runtime", "dag", "job")
        self.queued_age = gauge(
            "tasks_queued_oldest_seconds",
            "Age of the oldest task that waits.",
            "runtime",
            "dag",
            "job",
        )
        self.in_flight = gauge("tasks_in_flight", "Tasks that run.", "operator")
        self.workers = gauge(
            "workers",
            "Workers, registered or holding tasks.",
            "runtime",
        )
        self.worker_slots = gauge("worker_slots", "Tasks that they can run at once.", "runtime")
        self.worker_held = gauge("worker_tasks", "Tasks that they run, without sources.", "runtime")
        self.max_in_flight = gauge("tasks_max_in_flight", "Maximum number of them.", "operator")
        self.pressure = gauge("pressure", "Pressure of jobs with thresholds: 1 is full.", "dag", "job")
        self.held = gauge(
            "jobs_held",
            "Jobs that are held by the pressure of another: of tier bulk, only their bulk work.",
            *("dag", "job", "cause", "tier"),
        )
        self.kept = gauge(
            "kept",
            "Scopes, events and requests that are kept for a job that is paused, held or has no room, each counted"
            " up to 10,000.",
            *("dag", "job"),
        )
        self.outbox_due = gauge("outbox_due", "Outbox entries that are due.")
        self.outbox_lag = gauge("outbox_oldest_seconds", "How long the oldest due entry has waited.")
        self.outbox_given_up = gauge("outbox_given_up", "Outbox entries that were given up.")
        self.queue_visible = gauge("queue_visible", "Messages to receive.", "queue")
        self.queue_in_flight = gauge("queue_in_flight", "Messages received, not acked.", "queue")
        self.queue_age = gauge("queue_oldest_seconds", "Age of the oldest message.", "queue")
        self.queue_dead = gauge("queue_dead", "Dead letters.", "queue")
        self.dead_letters = gauge("buffer_dead_letters", "Messages that a sink gave up.", "dataset")
        labels = ("dag", "delivery")
        self.delivery = {
            "waiting": gauge("delivery_waiting", "Messages of a delivery that wait.", *labels),
            "dead": gauge("delivery_dead", "Messages of a delivery that were given up.", *labels),
            "failing": gauge(
                "delivery_failing", "1 while the receiver refuses or can't be reached.", *labels
            ),
            "behind": gauge("delivery_behind", "Positions that no message was made of yet.", *labels),
            "held_seconds": gauge(
                "delivery_held_seconds",
                "How long the same row has been the next of its producer, and its block isn't final.",
                *labels,
            ),
            "sent": gauge("delivery_sent", "Rows that the receiver has accepted.", *labels),
            "retracted": gauge("delivery_retracted", "Retractions that it has accepted.", *labels),
        }
        self.observed = gauge(
            "observed_timestamp_seconds",
            "When gauges of the state database, or of the queue, were refreshed last; 0 is never.",
            "store",
        )
        for store in _STORES:
            self.observed.labels(store).set(0)

    def show(self, found: ObservedState) -> None:
        _clear(self.queued, self.queued_age, self.kept, self.dead_letters, *self.delivery.values())
        for row in found.kept:
            self.kept.labels(row["dag_name"], row["name"]).set(row["kept"])
        for row in found.queued:
            labels = (row["runtime"], row["dag_name"], row["name"])
            self.queued.labels(*labels).set(row["waiting"])
            _show_age(self.queued_age.labels(*labels), row["oldest_seconds"])
        for row in found.dead_letters:
            self.dead_letters.labels(row["dataset"]).set(row["kept"])
        for row in found.deliveries:
            for name, each in self.delivery.items():
                each.labels(row["dag_name"], row["name"]).set(row[name])
        self._show_runtimes(found.runtimes)
        self._show_pressure(found.pressure)
        self.outbox_due.set(found.outbox.due)
        _show_age(self.outbox_lag, found.outbox.oldest_seconds if found.outbox.due else None)
        self.outbox_given_up.set(found.given_up)
        self.observed.labels(STATE).set_to_current_time()

    def _show_runtimes(self, runtimes: Sequence[ServedRuntime]) -> None:
        _clear(self.workers, self.worker_slots, self.worker_held)
        for served in runtimes:
            self.workers.labels(served.runtime).set(served.workers)
            self.worker_slots.labels(served.runtime).set(served.slots)
            self.worker_held.labels(served.runtime).set(served.held)

    def _show_pressure(self, report: PressureReport) -> None:
        _clear(self.in_flight, self.max_in_flight, self.pressure, self.held)
        for load in report.operators:
            self.in_flight.labels(load.operator).set(load.running)
            if load.max_in_flight is not None:
                self.max_in_flight.labels(load.operator).set(load.max_in_flight)
        for job in report.jobs:
            self.pressure.labels(job.dag_name, job.job).set(job.pressure)
        for hold in report.holds:
            cause = f"{hold.cause_dag}/{hold.cause_job}"
            tier = Tier.BULK if hold.bulk_only else Tier.NORMAL
            self.held.labels(hold.dag_name, hold.job, cause, tier.value).set(1)

    def show_queues(self, depths: Mapping[str, QueueDepth], names: Iterable[str]) -> None:
        """``names`` are those of runtimes, which always are; a buffer's queue is known while it holds something."""
        _clear(self.queue_visible, self.queue_in_flight, self.queue_age, self.queue_dead)
        for name in {*names, *depths}:
            depth = depths.get(name, _EMPTY)
            self.queue_visible.labels(name).set(depth.visible)
            self.queue_in_flight.labels(name).set(depth.in_flight)
            _show_age(self.queue_age.labels(name), depth.oldest_age_seconds or None)
            self.queue_dead.labels(name).set(depth.dead)
        self.observed.labels(QUEUE).set_to_current_time()


class ChainGauges:
    """Followers, as of the last pass of the loop. A number that isn't known has no sample."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tracelake_chain_{name}", text, ("dag", "job", *labels), registry=registry)

        self._of_field = {
            "head": gauge("head_block", "The newest block of the chain, as last read."),
            "tip": gauge("tip_block", "The last block in the tables."),
            "finalized": gauge("finalized_block", "The last block that is announced as final."),
            "lag": gauge("lag_blocks", "Blocks that the chain has beyond the tables."),
            "lag_seconds": gauge(
                "lag_seconds", "Time between the last block in the tables and the newest one."
            ),
            "head_age_seconds": gauge("head_age_seconds", "Age of the newest block's own timestamp."),
            "known_age_seconds": gauge("known_age_seconds", "Time since the chain's head was read last."),
            "reorgs": gauge("reorgs", "Reorganizations that the follower has followed."),
            "deepest_reorg": gauge("deepest_reorg_blocks", "Depth of the deepest one."),
            "blocks_per_second": gauge("blocks_per_second", "Speed of a follower that is catching up."),
        }
        self._condition = gauge("condition", "1 for the follower's condition, 0 for others.", "condition")
        self._endpoint = Gauge(
            "tracelake_rpc_endpoint_ok",
            "1 for an endpoint of a follower's RPC pool that is in order, 0 for one that isn't.",
            ("dag", "job", "endpoint"),
            registry=registry,
        )

    def show(self, chains: Sequence[ChainStatus]) -> None:
        _clear(*self._of_field.values(), self._condition, self._endpoint)
        for chain in chains:
            labels = (chain.dag_name, chain.job)
            for name, gauge in self._of_field.items():
                value = getattr(chain, name)
                if value is not None and name in _AGES:
                    _show_age(gauge.labels(*labels), value)
                elif value is not None:
                    gauge.labels(*labels).set(value)
            for condition in ChainCondition:
                self._condition.labels(*labels, condition.value).set(condition == chain.condition)
            for endpoint, state in endpoint_states(chain.endpoint_states):
                self._endpoint.labels(*labels, endpoint).set(state in _IN_ORDER)


def _clear(*gauges: Gauge) -> None:
    for gauge in gauges:
        gauge.clear()


def endpoint_states(reported: str | None) -> list[tuple[str, str]]:
    """Names and states of endpoints from a follower's report. It is text of an operator: anything that isn't the
    name of an endpoint, and more of them than a pool has, would be labels without end."""
    found = _ENDPOINT_STATE.findall(reported or "")
    return found[:_MOST_ENDPOINTS]


async def observe_state(db: Database, gauges: StateGauges, followers: ChainGauges) -> None:
    """Refresh what the state database knows."""
    found = await db.run(_read_state, lock=DeployLock.NONE)
    gauges.show(found)
    followers.show(found.chains)


async def observe_queues(queue: Queue, runtimes: RuntimeRegistry, gauges: StateGauges) -> None:
    """Refresh what the queue knows, which may be there while the state database isn't."""
    gauges.show_queues(await queue.depths(), runtimes.queues())


async def _read_state(tx: Transaction) -> ObservedState:
    return ObservedState(
        queued=await tx.fetch(SQL.queued),
        pressure=await pressure.report(tx, PressureSettings()),
        kept=await tx.fetch(SQL.kept),
        dead_letters=await tx.fetch(SQL.dead_letters),
        runtimes=list((await waiting.served_runtimes(tx)).values()),
        deliveries=await tx.fetch(SQL.deliveries),
        outbox=await outbox.lag(tx),
        given_up=(await tx.fetch(SQL.given_up))[0]["given_up"],
        chains=(await chains.chains(tx)).chains,
    )


def _show_age(gauge: Gauge, seconds: float | None) -> None:
    """An age as observed now, 0 of nothing; it grows when it isn't observed again in time."""
    observed = monotonic()

    def age() -> float:
        if seconds is None:
            return 0.0
        passed = monotonic() - observed
        return max(0.0, seconds + (passed if passed > _OVERDUE_SECONDS else 0.0))

    gauge.set_function(age)
