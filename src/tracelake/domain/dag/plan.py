"""What a deploy will do, decided from specs alone.

``plan_deploy`` compares the world as it is with the world as it would be and writes down one change per
job and per published name. Deploy executes these objects and ``plan`` prints them, so the two can't
disagree. A job that keeps its fingerprint keeps its dataset versions; one that doesn't gets new ones, and
so does everything downstream of it, in other DAGs too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec

from tracelake.domain.dag.check_world import check_world
from tracelake.domain.dag.cycles import topological
from tracelake.domain.dag.diff import differences, tuning_differences
from tracelake.domain.dag.fingerprint import buffered_fingerprint, fingerprints
from tracelake.domain.dag.model import BufferedDataset, DagSpec, JobSpec, PublishedOutput, Storage
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
    REPLACED = "replaced"
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
    """``replaced``: a buffered dataset has another schema. ``moved``: the name means something else now."""

    name: str
    kind: PublishKind
    before: str | None
    after: str | None


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


def _first_line(_: Path) -> int:
    return 1


def plan_deploy(
    new: DagSpec, active: Mapping[str, DagSpec], locate: Callable[[Path], int] = _first_line
) -> DeployPlan:
    """``active`` holds the active spec of each DAG by name. ``locate`` gives problems their line in the file.

    Raises ``InvalidDag`` for what only shows in the company of the other DAGs: a name that is taken, a
    dataset that somebody reads and nobody would publish any more, a cycle through several DAGs.
    """
    before, after = World(active), World({**active, new.name: new})
    check_world(new, before, after, locate)
    return _Planner(new.name, before, after).plan()


class _Planner:
    def __init__(self, dag: str, before: World, after: World) -> None:
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
            elif isinstance(two, BufferedRef) and one != two and was.source == now.source:
                reasons.append(f"input {index}: dataset {two.dataset.name} is replaced")
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
        return tuple(_publish_change(name, was.get(name), now.get(name)) for name in {**now, **was})


def _publish_change(
    name: str, was: PublishedOutput | BufferedDataset | None, now: PublishedOutput | BufferedDataset | None
) -> PublishChange:
    if was is None:
        kind = PublishKind.PUBLISHED
    elif now is None:
        kind = PublishKind.UNPUBLISHED
    elif isinstance(was, BufferedDataset) and isinstance(now, BufferedDataset):
        same = buffered_fingerprint(was) == buffered_fingerprint(now)
        kind = PublishKind.UNCHANGED if same else PublishKind.REPLACED
    else:
        kind = PublishKind.UNCHANGED if was == now else PublishKind.MOVED
    return PublishChange(name, kind, _means(was), _means(now))


def _means(entry: PublishedOutput | BufferedDataset | None) -> str | None:
    match entry:
        case PublishedOutput(_, job, output):
            return f"{job}, output {output}"
        case BufferedDataset():
            return "a buffered dataset"
        case None:
            return None
