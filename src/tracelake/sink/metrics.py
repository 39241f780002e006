"""The metrics of a sink: what it has written since its start, and whether it can.

How many messages wait, and since when, is the Dispatcher's to show (``tracelake_queue_oldest_seconds``): it is also
true while there is no sink.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge


class SinkMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"tracelake_sink_{name}_total", text, registry=registry)

        self.messages = counter("messages", "Messages written.")
        self.rows = counter("rows", "Rows written.")
        self.retracted = counter("retracted_rows", "Rows marked as retracted.")
        self.dead_letters = counter("dead_letters", "Messages given up.")
        self.outages = counter(
            "outages", "Times that a dataset began to wait for a database or the Dispatcher."
        )
        self.lag = Gauge(
            "tracelake_sink_lag_seconds",
            "Time that the oldest message of the last commit had waited.",
            registry=registry,
        )
        self._datasets = Gauge(
            "tracelake_sink_datasets", "Buffered datasets that it serves.", registry=registry
        )

    def watch(self, datasets: Callable[[], int]) -> None:
        self._datasets.set_function(datasets)
