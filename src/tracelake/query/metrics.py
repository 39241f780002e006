"""What the Query Service counts: queries by how they ended, their time, their rows, and slots in use."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tracelake.query.audit import QueryOutcome

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class QueryMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._queries = Counter(
            "tracelake_queries",
            "Queries by who asked and how they ended.",
            ["caller", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "tracelake_query_seconds",
            "From the request to the result, waiting for a slot included.",
            ["caller"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._rows = Counter("tracelake_query_rows", "Rows that queries gave.", ["caller"], registry=registry)
        self._bytes = Counter(
            "tracelake_query_scanned_bytes",
            "Bytes that queries were attached to.",
            ["caller"],
            registry=registry,
        )

    def watch_slots(self, count: int, free: Callable[[], int]) -> None:
        registry = self._registry
        Gauge("tracelake_query_slots", "Queries that can run at a time.", registry=registry).set(count)
        busy = Gauge("tracelake_query_slots_busy", "Slots that aren't ready for a query.", registry=registry)
        busy.set_function(lambda: count - free())

    def record(self, caller: str, outcome: QueryOutcome, seconds: float, rows: int, scanned: int) -> None:
        self._queries.labels(caller, outcome.value).inc()
        self._seconds.labels(caller).observe(seconds)
        self._rows.labels(caller).inc(rows)
        self._bytes.labels(caller).inc(scanned)
