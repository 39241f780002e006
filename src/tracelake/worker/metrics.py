"""The metrics of a worker and of an invoker: what it runs, how much it could, and how attempts end.

Numbers that are there anyway are read when the page is made; only ends are counted. No label names a task or a job:
those are the Dispatcher's to show, which knows them all.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
DROPPED = "Dropped"
"""An attempt that ends without a report: another one has taken its place, or its task was canceled."""


class AttemptMetrics:
    def __init__(self, registry: CollectorRegistry, runtime: str, slots: int) -> None:
        self._registry = registry
        self._runtime = runtime
        self._gauge("attempt_slots", "Attempts that this process runs at once, sources aside.", lambda: slots)
        self._ended = Counter(
            "tracelake_attempts_ended_total",
            "Attempts of this process by how they ended.",
            ["runtime", "status"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tracelake_attempt_seconds",
            "Time from the start of an attempt to its end, sources included.",
            ["runtime"],
            buckets=SECONDS,
            registry=registry,
        )

    def watch(self, running: Callable[[], int], held: Callable[[], int]) -> None:
        """``held`` counts tasks from the claim until the report was answered."""
        self._gauge("attempts_running", "Attempts that run now, sources included.", running)
        self._gauge("attempts_held", "Tasks claimed here and not reported yet.", held)

    def watch_spark(self, starts: Callable[[], int]) -> None:
        self._gauge("spark_starts", "Starts of this worker's Spark server.", starts)

    def ended(self, status: str | None, seconds: float) -> None:
        self._ended.labels(self._runtime, status or DROPPED).inc()
        self._seconds.labels(self._runtime).observe(seconds)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        gauge = Gauge(f"tracelake_{name}", text, ["runtime"], registry=self._registry)
        gauge.labels(self._runtime).set_function(value)
