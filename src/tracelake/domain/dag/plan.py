"""The plan of a deploy, decided from specs alone.

``plan_deploy`` compares the active DAGs with those after the deploy and returns one change per job and per
published name. Deploy executes these objects and ``plan`` prints them, so the two can't disagree. A job that keeps
its fingerprint keeps its dataset versions; one that doesn't gets new ones, and so does everything downstream of it,
in other DAGs too.

A fingerprint is a hash of everything that decides a job's rows (operator, config, inputs and their producers,
``where``, outputs, strategies, bundle, names of secrets), so a change anywhere upstream changes it. It leaves out
how the job is run (runtime, scaling, timeouts, retries, priority, queue limits). It is computed from the decoded
spec and must not change when the spec has been through ``jsonb``, which rewrites numbers and the order of keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from difflib import get_close_matches
from enum import StrEnum
from itertools import zip_longest
from types import MappingProxyType
from typing import Any

import msgspec

from tracelake.domain.buffers import BufferSchema, added_columns
from tracelake.domain.dag.graph import BufferedRef, DagGraph, JobKey, OutputRef, check_world, topological
from tracelake.domain.dag.model import (
    BufferedDataset,
    DagSpec,
    DatasetName,
    DeliverySpec,
    InputSpec,
    JobOutput,
    JobSpec,
    OutputSpec,
    PublishedOutput,
    Storage,
)
from tracelake.domain.dag.problems import START, Mark, Path, format_path
from tracelake.domain.errors import DagProblem
from tracelake.domain.operators.catalog import CATALOG

MAX_SHOWN = 80
_PRODUCT_FIELDS = (
    "activation",
    "source_kind",
    "runs_code",
    "operator",
    "execution_strategy",
    "update_strategy",
    "unique_key",
    "udf",
    "secrets",
)
_ABSENT = object()
#: The similarity from which the name of an operator is taken for a misspelling of another.
_MISSPELT = 0.8


class ChangeKind(StrEnum):
    ADDED = "added"
    REPLACED = "replaced"
    RETUNED = "retuned"
    UNCHANGED = "unchanged"
    REMOVED = "removed"


class VersionChange(StrEnum):
    """The change of an output's dataset version."""

    NEW = "new"
    KEPT = "kept"
    RETIRED = "retired"


class PublishKind(StrEnum):
    PUBLISHED = "published"
    MOVED = "moved"
    EXTENDED = "extended"
    UNPUBLISHED = "unpublished"
    UNCHANGED = "unchanged"


class OutputChange(msgspec.Struct, frozen=True):
    index: int
    name: str
    storage: Storage
    dataset: str | None
    version: VersionChange


class JobChange(msgspec.Struct, frozen=True):
    """``fingerprint`` is the one after the deploy; for a removed job, its last one."""

    dag: str
    job: str
    kind: ChangeKind
    because: tuple[str, ...]
    outputs: tuple[OutputChange, ...]
    fingerprint: str


class PublishChange(msgspec.Struct, frozen=True):
    """``extended``: a buffered dataset gets further columns. ``moved``: the name gets another producer."""

    name: str
    kind: PublishKind
    before: str | None
    after: str | None
    because: tuple[str, ...] = ()


class DeliveryKind(StrEnum):
    ADDED = "added"
    CHANGED = "changed"
    REMOVED = "removed"
    UNCHANGED = "unchanged"


class DeliveryChange(msgspec.Struct, frozen=True):
    """A changed delivery goes on behind the rows that it has sent; with another dataset it begins anew."""

    name: str
    kind: DeliveryKind
    because: tuple[str, ...] = ()


class DeployPlan(msgspec.Struct, frozen=True):
    """Jobs upstream first, removed ones last; jobs of other DAGs only if the deploy changes them. ``warnings`` are
    places of the file that are valid and likely to be mistakes."""

    dag: str
    jobs: tuple[JobChange, ...]
    publish: tuple[PublishChange, ...]
    deliver: tuple[DeliveryChange, ...] = ()
    warnings: tuple[DagProblem, ...] = ()

    @property
    def changes_nothing(self) -> bool:
        return (
            all(change.kind is ChangeKind.UNCHANGED for change in self.jobs)
            and all(change.kind is PublishKind.UNCHANGED for change in self.publish)
            and all(change.kind is DeliveryKind.UNCHANGED for change in self.deliver)
        )


def _at_start(_: Path) -> Mark:
    return START


def plan_deploy(
    new: DagSpec,
    active: Mapping[str, DagSpec],
    locate: Callable[[Path], Mark] = _at_start,
    kept: Mapping[str, BufferSchema] = MappingProxyType({}),
) -> DeployPlan:
    """``active`` holds the active spec of each DAG by name. ``locate`` finds the place of a problem in the file.
    ``kept`` are the schemas of buffered datasets that this DAG has or once had: their rows still exist.

    Raises ``InvalidDag`` for problems with other DAGs and with stored rows: a name that is taken, a dataset that is
    read and would no longer be published, a cycle through several DAGs, a schema that stored rows don't fit.
    """
    before, after = DagGraph(active), DagGraph({**active, new.name: new})
    # What the database still has wins over the active spec: an unpublished dataset keeps its rows.
    kept = {**_buffered(active.get(new.name)), **kept}
    check_world(new, before, after, locate, kept)
    plan = _Planner(new.name, before, after, kept).plan()
    return msgspec.structs.replace(plan, warnings=tuple(_misspelt_operators(new, locate)))


def _misspelt_operators(new: DagSpec, locate: Callable[[Path], Mark]) -> Iterator[DagProblem]:
    """A worker may bring operators of any name, so an unknown one is no mistake by itself."""
    for index, job in enumerate(new.jobs):
        if job.operator in CATALOG or job.udf is not None:
            continue
        for meant in get_close_matches(job.operator[:80], sorted(CATALOG), n=1, cutoff=_MISSPELT):
            path = ("jobs", index, "operator")
            why = f"{job.operator} is no built-in operator; did you mean {meant}?"
            own = f"One of your own comes with tracelake worker --runtime {job.runtime} --operators FILE"
            yield DagProblem(*locate(path), format_path(path), f"{why} {own}")


def _buffered(spec: DagSpec | None) -> dict[str, BufferSchema]:
    entries = spec.publish if spec is not None else ()
    return {entry.name: BufferSchema.of(entry) for entry in entries if isinstance(entry, BufferedDataset)}


class _Planner:
    def __init__(self, dag: str, before: DagGraph, after: DagGraph, kept: Mapping[str, BufferSchema]) -> None:
        self._kept = kept
        self._dag = dag
        self._before = before
        self._after = after
        self._old = fingerprints(before.dags)
        self._new = fingerprints(after.dags)

    def plan(self) -> DeployPlan:
        changes = [self._change(key) for key in topological(self._after.parents())]
        reached = {change.dag for change in changes if change.kind is not ChangeKind.UNCHANGED} | {self._dag}
        removed = [
            JobChange(dag, job.name, ChangeKind.REMOVED, (), self._retired(job, 0), self._old[dag, job.name])
            for (dag, _), job in self._before.jobs()
            if dag == self._dag and self._after.job((dag, job.name)) is None
        ]
        kept = [change for change in changes if change.dag in reached]
        old = self._before.dags.get(self._dag)
        deliver = _delivery_changes(old, self._after.dags[self._dag])
        return DeployPlan(self._dag, (*kept, *removed), self._publish_changes(), deliver)

    def _change(self, key: JobKey) -> JobChange:
        job, old = self._after.job(key), self._before.job(key)
        assert job is not None
        kind, because = self._verdict(key, old, job)
        fresh = kind in (ChangeKind.ADDED, ChangeKind.REPLACED)
        version = VersionChange.NEW if fresh else VersionChange.KEPT
        outputs = self._outputs(key[0], job, version)
        retired = self._retired(old, len(outputs)) if old is not None else ()
        return JobChange(*key, kind, because, (*outputs, *retired), self._new[key])

    def _verdict(self, key: JobKey, old: JobSpec | None, job: JobSpec) -> tuple[ChangeKind, tuple[str, ...]]:
        if old is None:
            return ChangeKind.ADDED, ()
        if self._old[key] != self._new[key]:
            return ChangeKind.REPLACED, self._reasons(key, old, job)
        because = tuning_differences(old, job)
        return (ChangeKind.RETUNED if because else ChangeKind.UNCHANGED), because

    def _reasons(self, key: JobKey, old: JobSpec, job: JobSpec) -> tuple[str, ...]:
        reasons = list(differences(old, job))
        for index, (was, now) in enumerate(zip(old.inputs, job.inputs, strict=False)):
            one, two = self._before.producer(key[0], was), self._after.producer(key[0], now)
            if isinstance(one, OutputRef) and isinstance(two, OutputRef):
                name = two.job if two.dag == key[0] else f"{two.dag}/{two.job}"
                if one == two and self._old[one.key] != self._new[two.key]:
                    reasons.append(f"input {index}: {name} is replaced")
                elif one != two and was.source == now.source:
                    reasons.append(f"input {index}: now comes from {name}, output {two.output}")
            elif isinstance(two, BufferedRef) and was.source == now.source:
                if not isinstance(one, BufferedRef) or one.dag != two.dag:
                    reasons.append(f"input {index}: now comes from buffered dataset {two.dataset.name}")
            elif isinstance(two, OutputRef) and was.source == now.source:
                reasons.append(f"input {index}: now comes from {two.job}, output {two.output}")
        return (*reasons, *tuning_differences(old, job))

    def _outputs(self, dag: str, job: JobSpec, version: VersionChange) -> tuple[OutputChange, ...]:
        names = {
            (entry.job, entry.output): entry.name
            for entry in self._after.dags[dag].publish
            if isinstance(entry, PublishedOutput)
        }
        return tuple(
            OutputChange(out.index, out.name, out.storage, names.get((job.name, out.index)), version)
            for out in job.outputs
        )

    @staticmethod
    def _retired(job: JobSpec, kept: int) -> tuple[OutputChange, ...]:
        return tuple(
            OutputChange(out.index, out.name, out.storage, None, VersionChange.RETIRED)
            for out in job.outputs[kept:]
        )

    def _publish_changes(self) -> tuple[PublishChange, ...]:
        old = self._before.dags.get(self._dag)
        was = {entry.name: entry for entry in old.publish} if old is not None else {}
        now = {entry.name: entry for entry in self._after.dags[self._dag].publish}
        return tuple(
            _publish_change(name, was.get(name), now.get(name), self._kept.get(name))
            for name in {**now, **was}
        )


def _publish_change(
    name: str,
    was: PublishedOutput | BufferedDataset | None,
    now: PublishedOutput | BufferedDataset | None,
    kept: BufferSchema | None,
) -> PublishChange:
    because: tuple[str, ...] = ()
    if isinstance(now, BufferedDataset) and kept is not None:
        added = added_columns(kept, BufferSchema.of(now))
        because = tuple(f"column {column.name} {column.type.value} is added" for column in added)
    if was is None:
        kind = PublishKind.PUBLISHED
        if kept is not None and isinstance(now, BufferedDataset):
            because = ("it was published before: its existing rows are kept", *because)
    elif now is None:
        kind = PublishKind.UNPUBLISHED
        if isinstance(was, BufferedDataset):
            because = ("its rows are kept",)
    elif isinstance(was, BufferedDataset) and isinstance(now, BufferedDataset):
        kind = PublishKind.EXTENDED if because else PublishKind.UNCHANGED
    else:
        kind = PublishKind.UNCHANGED if was == now else PublishKind.MOVED
    return PublishChange(name, kind, _means(was), _means(now), because)


def _delivery_changes(old: DagSpec | None, new: DagSpec) -> tuple[DeliveryChange, ...]:
    was = {each.name: each for each in old.deliver} if old is not None else {}
    now = {each.name: each for each in new.deliver}
    return tuple(_delivery_change(name, was.get(name), now.get(name)) for name in {**now, **was})


def _delivery_change(name: str, was: DeliverySpec | None, now: DeliverySpec | None) -> DeliveryChange:
    if was is None:
        return DeliveryChange(name, DeliveryKind.ADDED)
    if now is None:
        return DeliveryChange(name, DeliveryKind.REMOVED, ("what it hasn't sent yet is dropped",))
    fields: list[str] = []
    for field in ("dataset", "when", "template", "key"):
        fields += _changed(field, getattr(was, field), getattr(now, field))
    fields += _changed("to", _plain(was.to), _plain(now.to))
    fields += _changed("where", was.where and was.where.text, now.where and now.where.text)
    return DeliveryChange(name, DeliveryKind.CHANGED if fields else DeliveryKind.UNCHANGED, tuple(fields))


def _means(entry: PublishedOutput | BufferedDataset | None) -> str | None:
    match entry:
        case PublishedOutput(_, job, output):
            return f"{job}, output {output}"
        case BufferedDataset():
            return "a buffered dataset"
        case None:
            return None


def fingerprints(world: Mapping[str, DagSpec]) -> dict[tuple[str, str], str]:
    """Fingerprints by (dag, job), for DAGs without cycles; ``plan_deploy`` refuses cycles before."""
    graph = DagGraph(world)
    found: dict[JobKey, str] = {}
    # Parents first, since a job's identity contains theirs.
    for key in topological(graph.parents()):
        job = graph.job(key)
        assert job is not None
        found[key] = _digest(_job_identity(key[0], job, graph, found))
    if len(found) != sum(1 for _ in graph.jobs()):
        raise ValueError("the DAGs feed each other in a cycle")
    return found


def canonical(value: Any) -> Any:
    """The value in a form that is the same before and after a round trip through ``jsonb``."""
    if isinstance(value, Mapping):
        return {key: canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        # jsonb returns 1e3 as 1000: both spellings need one hash.
        return int(Decimal(repr(value)))
    return value


def _digest(identity: Any) -> str:
    # NaN and infinity aren't JSON, and jsonb would refuse the spec later.
    text = json.dumps(canonical(identity), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _job_identity(dag: str, job: JobSpec, graph: DagGraph, known: Mapping[JobKey, str]) -> dict[str, Any]:
    # Only where it is true: a job from before there were such sources keeps its fingerprint.
    runs_code = {"runs_code": True} if job.runs_code else {}
    return {
        **runs_code,
        "activation": job.activation.value,
        "source_kind": job.source_kind.value if job.source_kind else None,
        "operator": job.operator,
        "config": job.config,
        "inputs": [
            {
                "source": _source_identity(graph.producer(dag, edge), known),
                "trigger": edge.trigger,
                "where": msgspec.to_builtins(edge.where.tree) if edge.where else None,
            }
            for edge in job.inputs
        ],
        "outputs": [[output.name, output.storage.value] for output in job.outputs],
        "execution_strategy": job.execution_strategy.value if job.execution_strategy else None,
        "update_strategy": job.update_strategy.value,
        "unique_key": list(job.unique_key),
        "udf": [job.udf.bundle, job.udf.entrypoint] if job.udf else None,
        # The order in which a file lists them doesn't change any row.
        "secrets": sorted(job.secrets),
    }


def _source_identity(source: OutputRef | BufferedRef | None, known: Mapping[JobKey, str]) -> Any:
    match source:
        case OutputRef(dag, job, output):
            return ["output", dag, job, output, known[dag, job]]
        case BufferedRef(dag, dataset):
            # The schema is left out: it only ever gains columns, and a new column needs no new read.
            return ["buffered", dag, dataset.name]
        case None:
            return None


def differences(old: JobSpec, new: JobSpec) -> Iterator[str]:
    """Changes in a job's own spec that change its rows, in words: ``config.range_size: 1000 -> 500``."""
    for name in _PRODUCT_FIELDS:
        yield from _changed(name, _plain(getattr(old, name)), _plain(getattr(new, name)))
    yield from _changed("config", canonical(old.config), canonical(new.config))
    for index, (was, now) in enumerate(zip_longest(old.inputs, new.inputs)):
        yield from _input_changed(f"input {index}", was, now)
    for index, (out, after) in enumerate(zip_longest(old.outputs, new.outputs)):
        yield from _output_changed(f"output {index}", out, after)


def tuning_differences(old: JobSpec, new: JobSpec) -> tuple[str, ...]:
    """Changes that affect only how a job is run."""
    found = list(_changed("runtime", old.runtime, new.runtime))
    if old.source_kind is new.source_kind:
        found += _changed("source", _plain(old.source), _plain(new.source))
    before, after = _plain(old.settings), _plain(new.settings)
    for name in before:
        found += _changed(name, before[name], after[name])
    return tuple(found)


def _input_changed(label: str, was: InputSpec | None, now: InputSpec | None) -> Iterator[str]:
    if was is None or now is None:
        edge = was or now
        assert edge is not None
        yield f"{label}: {_source(edge)} {'added' if was is None else 'removed'}"
        return
    if was.source != now.source:
        yield f"{label}: {_source(was)} -> {_source(now)}"
    yield from _changed(f"{label}: trigger", was.trigger, now.trigger)
    if (was.where and was.where.tree) != (now.where and now.where.tree):
        yield f"{label}: where: {_where(was)} -> {_where(now)}"


def _output_changed(label: str, was: OutputSpec | None, now: OutputSpec | None) -> Iterator[str]:
    if was is None or now is None:
        output = was or now
        assert output is not None
        yield f"{label}: {output.name} {'added' if was is None else 'removed'}"
        return
    yield from _changed(f"{label}: name", was.name, now.name)
    yield from _changed(f"{label}: storage", was.storage.value, now.storage.value)


def _source(edge: InputSpec) -> str:
    match edge.source:
        case JobOutput(job, output):
            return f"{job}, output {output}"
        case DatasetName(dataset):
            return f"dataset {dataset}"


def _where(edge: InputSpec) -> str:
    return _shorten(edge.where.text) if edge.where is not None else "(none)"


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value)


def _changed(label: str, was: Any, now: Any) -> Iterator[str]:
    """Maps are compared key by key, other values as a whole. True and 1 differ, as they do in JSON."""
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in sorted({*was, *now}):
            yield from _changed(f"{label}.{key}", was.get(key, _ABSENT), now.get(key, _ABSENT))
    elif _show(was) != _show(now):
        yield f"{label}: {_shorten(_show(was))} -> {_shorten(_show(now))}"


def _show(value: Any) -> str:
    if value is _ABSENT or value is None:
        return "(none)"
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"


_SIGNS = {
    ChangeKind.ADDED: "+",
    ChangeKind.REPLACED: "!",
    ChangeKind.RETUNED: "~",
    ChangeKind.UNCHANGED: " ",
    ChangeKind.REMOVED: "-",
}


_PUBLISH_SIGNS = {
    PublishKind.PUBLISHED: "+",
    PublishKind.MOVED: "!",
    PublishKind.EXTENDED: "~",
    PublishKind.UNPUBLISHED: "-",
    PublishKind.UNCHANGED: " ",
}


_DELIVERY_SIGNS = {
    DeliveryKind.ADDED: "+",
    DeliveryKind.CHANGED: "~",
    DeliveryKind.REMOVED: "-",
    DeliveryKind.UNCHANGED: " ",
}


def render(plan: DeployPlan) -> str:
    return "\n".join(_lines(plan)) + "\n"


def _lines(plan: DeployPlan) -> Iterator[str]:
    if plan.changes_nothing:
        yield f"DAG {plan.dag}: nothing changes"
        return
    yield f"DAG {plan.dag}"
    dag = plan.dag
    for change in sorted(plan.jobs, key=lambda job: (job.dag != plan.dag, job.dag)):
        if change.dag != dag:
            dag = change.dag
            yield f"DAG {dag} (downstream)"
        yield from _job_lines(change)
    if plan.publish:
        yield "Published names"
        for entry in plan.publish:
            yield _publish_line(entry)
            yield from (f"      {reason}" for reason in entry.because)
    if plan.deliver:
        yield "Deliveries"
        for delivery in plan.deliver:
            yield f"  {_DELIVERY_SIGNS[delivery.kind]} {delivery.name}: {delivery.kind}"
            yield from (f"      {reason}" for reason in delivery.because)


def _job_lines(change: JobChange) -> Iterator[str]:
    yield f"  {_SIGNS[change.kind]} {change.job}: {change.kind}"
    yield from (f"      because {reason}" for reason in change.because)
    if change.kind in (ChangeKind.UNCHANGED, ChangeKind.RETUNED):
        return
    for output in change.outputs:
        known_as = f" ({output.dataset})" if output.dataset else ""
        yield f"      output {output.index} {output.name}{known_as}: {output.version} version"


def _publish_line(change: PublishChange) -> str:
    means = {
        PublishKind.MOVED: f": {change.before} -> {change.after}",
        PublishKind.PUBLISHED: f": {change.after}",
    }.get(change.kind, "")
    return f"  {_PUBLISH_SIGNS[change.kind]} {change.name}: {change.kind}{means}"
