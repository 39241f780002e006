"""What the Dispatcher counts. Steps count after their commit; gauges are refreshed by a loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


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
        self.tasks_created = Counter("tracelake_tasks_created_total", "Tasks created.", registry=registry)
        self.rewoken = Counter(
            "tracelake_rewoken_total", "Wake-ups repeated by the sweep.", registry=registry
        )
        self.reconciled = Counter(
            "tracelake_reconciled_total", "Tasks that the reconciler had to create.", registry=registry
        )

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        began = perf_counter()
        try:
            yield
        finally:
            self.step_seconds.labels(step).observe(perf_counter() - began)


class StateGauges:
    """How much waits and runs right now."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tracelake_{name}", text, labels, registry=registry)

        self.queued = gauge("tasks_queued", "Tasks that wait.", "runtime", "dag", "job")
        self.queued_age = gauge("tasks_queued_oldest_seconds", "Age of the oldest.", "runtime", "dag", "job")
        self.in_flight = gauge("tasks_in_flight", "Tasks that run.", "operator")
        self.outbox_due = gauge("outbox_due", "Outbox entries that are due.")
        self.outbox_lag = gauge("outbox_oldest_seconds", "How long the oldest due entry has waited.")
        self.outbox_given_up = gauge("outbox_given_up", "Outbox entries that were given up.")
        self.queue_visible = gauge("queue_visible", "Messages to receive.", "queue")
        self.queue_in_flight = gauge("queue_in_flight", "Messages received, not acked.", "queue")
        self.queue_age = gauge("queue_oldest_seconds", "Age of the oldest message.", "queue")
        self.queue_dead = gauge("queue_dead", "Dead letters.", "queue")
        self.dead_letters = gauge("buffer_dead_letters", "Messages that a sink gave up.", "dataset")
