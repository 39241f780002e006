"""What a deploy will do, decided from specs alone.

``plan_deploy`` compares the world as it is with the world as it would be and writes down one change per
job and per published name. Deploy executes these objects and ``plan`` prints them, so the two can't
disagree. A job that keeps its fingerprint keeps its dataset versions; one that doesn't gets new ones, and
so does everything downstream of it, in other DAGs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from types import MappingProxyType

import msgspec

from tracelake.domain.buffer_schema import BufferSchema, added_columns
from tracelake.domain.dag.check_world import check_world
from tracelake.domain.dag.cycles import topological
from tracelake.domain.dag.diff import differences, tuning_differences
from tracelake.domain.dag.fingerprint import fingerprints
from tracelake.domain.dag.model import BufferedDataset, DagSpec, JobSpec, PublishedOutput, Storage
from tracelake.domain.dag.node import START, Mark
from tracelake.domain.dag.problems import Path
from tracelake.domain.dag.world import BufferedRef, JobKey, OutputRef, World


class ChangeKind(StrEnum):
    ADDED = "added"
    REPLACED = "replaced"
    RETUNED = "retuned"
    UNCHANGED = "unchanged"
    REMOVED = "removed"


class VersionChange(StrEnum):
    """What happens to an output's dataset version."""

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
    """``fingerprint`` is the one that holds afterwards; of a removed job, the one it had."""

    dag: str
    job: str
    kind: ChangeKind
    because: tuple[str, ...]
    outputs: tuple[OutputChange, ...]
    fingerprint: str


class PublishChange(msgspec.Struct, frozen=True):
    """``extended``: a buffered dataset gets further columns. ``moved``: the name means something else now."""

    name: str
    kind: PublishKind
    before: str | None
    after: str | None
    because: tuple[str, ...] = ()


class DeployPlan(msgspec.Struct, frozen=True):
    """Jobs upstream first, removed ones last; of other DAGs only those that the deploy reaches."""

    dag: str
    jobs: tuple[JobChange, ...]
    publish: tuple[PublishChange, ...]

    @property
    def changes_nothing(self) -> bool:
        return all(change.kind is ChangeKind.UNCHANGED for change in self.jobs) and all(
            change.kind is PublishKind.UNCHANGED for change in self.publish
        )


def _at_start(_: Path) -> Mark:
    return START


def plan_deploy(
    new: DagSpec,
    active: Mapping[str, DagSpec],
    locate: Callable[[Path], Mark] = _at_start,
    kept: Mapping[str, BufferSchema] = MappingProxyType({}),
) -> DeployPlan:
    """``active`` holds the active spec of each DAG by name. ``locate`` gives problems their place in the file.
    ``kept`` are the schemas of buffered datasets that this DAG has or once had: their rows are still there.

    Raises ``InvalidDag`` for what only shows in the company of the other DAGs and of what is stored: a name that
    is taken, a dataset that somebody reads and nobody would publish any more, a cycle through several DAGs, a
    schema that rows already written don't fit.
    """
    before, after = World(active), World({**active, new.name: new})
    kept = {**_buffered(active.get(new.name)), **kept}
    check_world(new, before, after, locate, kept)
    return _Planner(new.name, before, after, kept).plan()


def _buffered(spec: DagSpec | None) -> dict[str, BufferSchema]:
    entries = spec.publish if spec is not None else ()
    return {entry.name: BufferSchema.of(entry) for entry in entries if isinstance(entry, BufferedDataset)}


class _Planner:
    def __init__(self, dag: str, before: World, after: World, kept: Mapping[str, BufferSchema]) -> None:
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
        return DeployPlan(self._dag, (*kept, *removed), self._publish_changes())

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
            because = ("it was here before: its rows are taken up again", *because)
    elif now is None:
        kind = PublishKind.UNPUBLISHED
        if isinstance(was, BufferedDataset):
            because = ("its rows stay",)
    elif isinstance(was, BufferedDataset) and isinstance(now, BufferedDataset):
        kind = PublishKind.EXTENDED if because else PublishKind.UNCHANGED
    else:
        kind = PublishKind.UNCHANGED if was == now else PublishKind.MOVED
    return PublishChange(name, kind, _means(was), _means(now), because)


def _means(entry: PublishedOutput | BufferedDataset | None) -> str | None:
    match entry:
        case PublishedOutput(_, job, output):
            return f"{job}, output {output}"
        case BufferedDataset():
            return "a buffered dataset"
        case None:
            return None
