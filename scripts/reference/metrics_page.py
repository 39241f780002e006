"""``docs/metrics.md``: every metric of every process, made from the registries that the processes fill.

``EXPORTED`` names, for each part, what makes its metrics; a test compares it with the modules that import
the Prometheus client, so a class that isn't listed is found. Alert rules and dashboard may use what is listed here
and nothing else (``tests/repo/test_monitoring.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

from prometheus_client import CollectorRegistry

from scripts.reference.markdown import cell, table
from tracelake.dispatcher.loops.deliver_outbox import BufferDelivery, OutboxDelivery
from tracelake.dispatcher.loops.invoke_functions import FunctionInvocations, InvocationSender
from tracelake.dispatcher.metrics import ChainGauges, StateGauges, StepMetrics
from tracelake.query.audit import QueryMetrics
from tracelake.scheduler.app import SchedulerMetrics
from tracelake.serving.metrics_port import process_registry
from tracelake.serving.surface import HttpMetrics
from tracelake.sink.metrics import SinkMetrics
from tracelake.worker.metrics import AttemptMetrics

NOBODY: Any = MagicMock()
"""In place of the services of an object that is made for its metrics alone."""
Fill = Callable[[CollectorRegistry], object]


def _http(registry: CollectorRegistry) -> None:
    # Its labels are those of the requests that it has seen.
    HttpMetrics(registry).record("user", "GET", "/healthz", 200, 0.0)


def _queries(registry: CollectorRegistry) -> None:
    QueryMetrics(registry).watch_slots(1, lambda: 1)


def _attempts(registry: CollectorRegistry) -> None:
    metrics = AttemptMetrics(registry, "ecs_spark", 1)
    metrics.watch(lambda: 0, lambda: 0)
    metrics.watch_spark(lambda: 1)


EXPORTED: Mapping[str, Sequence[Fill]] = {
    "dispatcher": (
        StepMetrics,
        StateGauges,
        ChainGauges,
        _http,
        lambda registry: OutboxDelivery(NOBODY, NOBODY, NOBODY, NOBODY, NOBODY, registry),
        lambda registry: BufferDelivery(NOBODY, NOBODY, registry),
        lambda registry: FunctionInvocations(NOBODY, NOBODY, NOBODY, NOBODY, registry),
        lambda registry: InvocationSender(NOBODY, NOBODY, NOBODY, NOBODY, registry),
    ),
    "worker": (_attempts,),
    "sink": (SinkMetrics,),
    "scheduler": (SchedulerMetrics,),
    "query": (_queries, _http),
}
"""By part, as ``tracelake_process_info`` names it; an invoker is a worker of the runtime ``lambda``."""
_EVERY = "every process"


@dataclass(frozen=True, slots=True)
class DocumentedMetric:
    """``name`` is that of the family; ``samples`` are the names that expressions use, each with these labels."""

    name: str
    kind: str
    text: str
    labels: tuple[str, ...]
    parts: tuple[str, ...]
    samples: Mapping[str, tuple[str, ...]]


def documented() -> list[DocumentedMetric]:
    found: dict[str, DocumentedMetric] = {}
    for part, fills in EXPORTED.items():
        registry = process_registry(part)
        for fill in fills:
            fill(registry)
        labels = _labels(registry)
        for family in registry.collect():
            own = labels.get(family.name) or tuple(
                dict.fromkeys(name for sample in family.samples for name in sample.labels if name != "le")
            )
            before = found[family.name].parts if family.name in found else ()
            found[family.name] = DocumentedMetric(
                family.name, family.type, family.documentation, own, (*before, part), _samples(family, own)
            )
    return sorted(found.values(), key=lambda each: each.name)


def _labels(registry: CollectorRegistry) -> dict[str, tuple[str, ...]]:
    """The labels of metrics that have no sample yet; the client keeps them to itself."""
    found = {}
    for collector in registry._collector_to_names:
        if (names := getattr(collector, "_labelnames", None)) and (name := getattr(collector, "_name", None)):
            found[str(name)] = tuple(names)
    return found


def _samples(family: Any, labels: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    match family.type:
        case "counter":
            return {f"{family.name}_total": labels}
        case "histogram":
            return {
                f"{family.name}_bucket": (*labels, "le"),
                f"{family.name}_sum": labels,
                f"{family.name}_count": labels,
            }
        case _:
            return {family.name: labels}


_INTRODUCTION = """\
# Metrics

Made from what the processes register by `python -m scripts.reference`. Where each part serves them, and how
Prometheus finds them, is in [the runbook](runbook.md#what-to-watch); alert rules and a dashboard are in
[deploy/monitoring](../deploy/monitoring/README.md).

Gauges about the state of the installation come from the Dispatcher, every five seconds; replicas show the same, so
take the maximum. While a database is away they keep their last values, but for ages, which grow, and
`tracelake_observed_timestamp_seconds` says since when. Labels are names of deployed things, of configured
endpoints, or from fixed sets.

"""


def metrics_page() -> str:
    metrics = documented()
    rows = [
        (f"`{_shown(each)}`", each.kind, _names(each.labels), _of(each.parts), cell(each.text))
        for each in metrics
    ]
    return _INTRODUCTION + table(("metric", "type", "labels", "of", "meaning"), rows)


def _shown(metric: DocumentedMetric) -> str:
    return next(iter(metric.samples)) if metric.kind == "counter" else metric.name


def _names(labels: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in labels)


def _of(parts: Sequence[str]) -> str:
    return _EVERY if set(parts) == set(EXPORTED) else ", ".join(parts)
