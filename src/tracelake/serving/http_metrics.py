"""HTTP metrics that a hot request can afford: plain numbers, turned into metric families when scraped.

The client library's histogram takes locks and walks its buckets on every observation; here an observation
is a binary search and a few additions, all of them on the event loop's thread.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

_PARAMETER_TYPE = re.compile(r":[a-z]+}")


class _Route:
    """One route's requests with one status."""

    __slots__ = ("buckets", "count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)


class HttpMetrics(Collector):
    """Requests by route template, never by path: a path has as many values as there are tasks."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._routes: dict[tuple[str, str, str, int], _Route] = {}
        registry.register(self)

    def record(self, surface: str, method: str, route: str, status: int, seconds: float) -> None:
        key = (surface, method, route, status)
        seen = self._routes.get(key)
        if seen is None:
            seen = self._routes[key] = _Route()
        seen.count += 1
        seen.seconds += seconds
        seen.buckets[bisect_left(BUCKETS, seconds)] += 1

    def collect(self) -> Iterator[Metric]:
        labels = ["surface", "method", "route", "status"]
        requests = CounterMetricFamily("tracelake_http_requests", "Requests answered.", labels=labels)
        seconds = HistogramMetricFamily(
            "tracelake_http_request_seconds",
            "Time from the head of a request to the end of its answer.",
            labels=labels,
        )
        for (surface, method, route, status), seen in list(self._routes.items()):
            values = [surface, method, _PARAMETER_TYPE.sub("}", route), str(status)]
            requests.add_metric(values, seen.count)
            bounds = [*(str(bound) for bound in BUCKETS), "+Inf"]
            totals = [(bound, float(n)) for bound, n in zip(bounds, accumulate(seen.buckets), strict=True)]
            seconds.add_metric(values, buckets=totals, sum_value=seen.seconds)
        yield requests
        yield seconds
