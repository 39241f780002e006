"""All DAGs of an installation as one graph: which jobs feed which, through published names too.

``check_world`` finds the problems of a DAG that appear only together with the other active DAGs. ``topological``
and ``find_cycles`` work on any graph of names. Nothing here recurses: a DAG may be a chain of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, TypeVar

from tracelake.domain.buffers import PLATFORM_COLUMNS, BufferSchema, additive_problems, literal_problems
from tracelake.domain.dag.deliveries import refused_by
from tracelake.domain.dag.model import (
    BufferedDataset,
    ColumnType,
    DagSpec,
    DatasetName,
    ExecutionStrategy,
    InputSpec,
    JobOutput,
    JobSpec,
    OutputSpec,
    PublishedOutput,
    Storage,
    UpdateStrategy,
)
from tracelake.domain.dag.problems import Mark, Path, format_path
from tracelake.domain.errors import DagProblem, InvalidDag
from tracelake.domain.operators.catalog import CATALOG

#: DAG and job.
JobKey: TypeAlias = tuple[str, str]
T = TypeVar("T")


class OutputRef(NamedTuple):
    dag: str
    job: str
    output: int

    @property
    def key(self) -> JobKey:
        return self.dag, self.job


class BufferedRef(NamedTuple):
    dag: str
    dataset: BufferedDataset


ProducerRef: TypeAlias = OutputRef | BufferedRef


class DagGraph:
    def __init__(self, dags: Mapping[str, DagSpec]) -> None:
        self.dags = dags
        self._jobs = {(dag, job.name): job for dag, spec in dags.items() for job in spec.jobs}
        self._published: dict[str, tuple[str, PublishedOutput | BufferedDataset]] = {}
        for dag, spec in dags.items():
            for entry in spec.publish:
                # Two publishers of one name are refused by ``_taken``; until then the first one counts.
                self._published.setdefault(entry.name, (dag, entry))

    def jobs(self) -> Iterator[tuple[JobKey, JobSpec]]:
        yield from self._jobs.items()

    def job(self, key: JobKey) -> JobSpec | None:
        return self._jobs.get(key)

    def publisher(self, dataset: str) -> str | None:
        found = self._published.get(dataset)
        return found[0] if found else None

    def producer(self, dag: str, edge: InputSpec) -> ProducerRef | None:
        """The producer of an input; None when there is none of that name."""
        match edge.source:
            case JobOutput(job, output):
                return self._existing(OutputRef(dag, job, output))
            case DatasetName(dataset):
                owner, entry = self._published.get(dataset, (None, None))
                if owner is None or entry is None:
                    return None
                if isinstance(entry, BufferedDataset):
                    return BufferedRef(owner, entry)
                return self._existing(OutputRef(owner, entry.job, entry.output))

    def output(self, ref: OutputRef) -> OutputSpec:
        return self._jobs[ref.key].outputs[ref.output]

    def parents(self) -> dict[JobKey, list[JobKey]]:
        """For each job the jobs that feed it. Writers of a buffered dataset don't count as parents of its
        readers."""
        found: dict[JobKey, list[JobKey]] = {}
        for (dag, name), job in self._jobs.items():
            producers = (self.producer(dag, edge) for edge in job.inputs)
            found[dag, name] = [ref.key for ref in producers if isinstance(ref, OutputRef)]
        return found

    def _existing(self, ref: OutputRef) -> OutputRef | None:
        job = self._jobs.get(ref.key)
        return ref if job is not None and ref.output < len(job.outputs) else None


def find_cycles(parents: Mapping[T, Iterable[T]]) -> list[list[T]]:
    """One cycle for each strongly connected part, ``[a, b, c]`` with a's parent b, b's parent c and c's parent a.

    A cycle begins at its first node in ``parents``.
    """
    left = {node: [parent for parent in found if parent in parents] for node, found in parents.items()}
    # What has an order is on no cycle, and not behind one.
    for node in topological(left):
        del left[node]
    # Every node that is left has a parent that is left, so the walk below never runs out.
    left = {node: [parent for parent in found if parent in left] for node, found in left.items()}
    cycles: list[list[T]] = []
    done: set[T] = set()
    rank = {node: index for index, node in enumerate(parents)}
    for start in left:
        walk: dict[T, None] = {}
        node = start
        while node not in walk and node not in done:
            walk[node] = None
            node = left[node][0]
        if node in walk:
            ring = list(walk)[list(walk).index(node) :]
            first = min(range(len(ring)), key=lambda index: rank[ring[index]])
            cycles.append(ring[first:] + ring[:first])
        done.update(walk)
    return cycles


def topological(parents: Mapping[T, Iterable[T]]) -> list[T]:
    """Every node after its parents, otherwise in the given order; nodes on or after a cycle are left out."""
    waiting = {node: set(found) for node, found in parents.items()}
    children: dict[T, list[T]] = {}
    for node, found in waiting.items():
        for parent in found:
            children.setdefault(parent, []).append(node)
    ready = [node for node, found in waiting.items() if not found]
    ordered: list[T] = []
    # The list grows while it is read: it is the queue.
    for node in ready:
        ordered.append(node)
        for child in children.get(node, ()):
            waiting[child].discard(node)
            if not waiting[child]:
                ready.append(child)
    return ordered


def check_world(
    new: DagSpec,
    before: DagGraph,
    after: DagGraph,
    locate: Callable[[Path], Mark],
    kept: Mapping[str, BufferSchema] = MappingProxyType({}),
) -> None:
    """``kept``: by name, the schemas of this DAG's buffered datasets that have rows."""
    found = [
        *_taken(new, before),
        *_unfed(new, after),
        *_cycles(new, after),
        *_scopeless(new, after),
        *_unpaired(new, after),
        *_by_position(new, after),
        *_never_matching(new, after),
        *_not_added(new, kept),
        *_undelivered(new, after),
    ]
    if found:
        raise InvalidDag([DagProblem(*locate(path), format_path(path), text) for path, text in found])


def _taken(new: DagSpec, before: DagGraph) -> Iterator[tuple[Path, str]]:
    for entry in new.publish:
        owner = before.publisher(entry.name)
        if owner not in (None, new.name):
            yield ("publish", entry.name), f"{entry.name} is already published by DAG {owner}"


def _unfed(new: DagSpec, after: DagGraph) -> Iterator[tuple[Path, str]]:
    """Inputs without a producer: a mistake in the new DAG, or an input that another DAG would lose."""
    for (dag, name), job in after.jobs():
        for index, edge in enumerate(job.inputs):
            if after.producer(dag, edge) is not None:
                continue
            if dag == new.name:
                yield (*_input_path(new, name, index), "from"), f"{_what(edge)} does not exist"
            elif isinstance(edge.source, DatasetName):
                message = f"{edge.source.dataset} can't be unpublished: job {name} of DAG {dag} reads it"
                yield ("publish", edge.source.dataset), message


def _cycles(new: DagSpec, after: DagGraph) -> Iterator[tuple[Path, str]]:
    parents = after.parents()
    # A cycle is reported at its first node, which then has a place in the new file.
    own_first = sorted(parents, key=lambda key: key[0] != new.name)
    for cycle in find_cycles({key: parents[key] for key in own_first}):
        flow = " -> ".join(f"{dag}/{job}" for dag, job in [cycle[0], *reversed(cycle)])
        path = _edge_path(new, after, cycle[0], cycle[1 % len(cycle)])
        yield path, f"cycle: {flow}"


def _scopeless(new: DagSpec, after: DagGraph) -> Iterator[tuple[Path, str]]:
    """PerPartition jobs that would be triggered by cursors alone."""
    for (dag, name), job in after.jobs():
        if job.execution_strategy is not ExecutionStrategy.PER_PARTITION:
            continue
        triggers = [edge for edge in job.inputs if edge.trigger]
        if not triggers or not all(_storage(after, dag, edge) is Storage.POSTGRES for edge in triggers):
            continue
        if dag == new.name:
            path: Path = ("jobs", _index(new, name), "execution_strategy")
            yield path, "every triggering input is in postgres and moves by cursor; use PerUpdate"
        elif any(_is_published_by(new, edge) for edge in triggers):
            datasets = [edge.source.dataset for edge in triggers if isinstance(edge.source, DatasetName)]
            lost = next(dataset for dataset in datasets if new.published(dataset) is not None)
            yield ("publish", lost), f"job {name} of DAG {dag} runs PerPartition on it and needs partitions"


def _unpaired(new: DagSpec, after: DagGraph) -> Iterator[tuple[Path, str]]:
    """Compactions whose outputs don't each have one whole hot dataset as input."""
    for index, job in enumerate(new.jobs):
        traits = CATALOG.get(job.operator)
        if traits is None or not traits.outputs_named_after_inputs:
            continue
        hot = [
            (place, edge)
            for place, edge in enumerate(job.inputs)
            if _storage(after, new.name, edge) is Storage.POSTGRES
        ]
        if len(hot) != len(job.outputs):
            yield (
                ("jobs", index, "outputs"),
                f"{job.operator} has one output for each input in postgres: there are {len(job.outputs)} "
                f"outputs and {len(hot)} such inputs (one {{job, output}} with trigger: false stands for "
                "that job's further outputs too)",
            )
        for place, edge in hot:
            if edge.where is not None:
                path = (*_input_path(new, job.name, place), "where")
                yield path, f"{job.operator} keeps every row of its inputs"


def _by_position(new: DagSpec, after: DagGraph) -> Iterator[tuple[Path, str]]:
    """Jobs that would use positions of a buffered dataset as blocks."""
    for (dag, name), job in after.jobs():
        for index, edge in enumerate(job.inputs):
            source = after.producer(dag, edge)
            if not isinstance(source, BufferedRef):
                continue
            if (spec := CATALOG.get(job.operator)) is not None and spec.reads_blocks:
                why = f"{job.operator} works on blocks, and a buffered dataset has none"
            elif edge.trigger and job.execution_strategy is ExecutionStrategy.PER_PARTITION:
                why = "a buffered dataset grows by position and has no partitions; use PerUpdate"
            elif edge.trigger and _replaces_rows(job):
                why = "the job replaces rows in postgres by blocks, and a buffered dataset has none"
            else:
                continue
            if dag == new.name:
                yield (*_input_path(new, name, index), "from"), f"{source.dataset.name}: {why}"
            elif source.dag == new.name:
                yield ("publish", source.dataset.name), f"job {name} of DAG {dag} reads it: {why}"


def _never_matching(new: DagSpec, after: DagGraph) -> Iterator[tuple[Path, str]]:
    """Conditions on rows of a buffered dataset, whose types are declared, that hold for none."""
    for job in new.jobs:
        for index, edge in enumerate(job.inputs):
            source = after.producer(new.name, edge)
            if isinstance(source, BufferedRef) and edge.where is not None:
                types = {name: ColumnType(kind) for name, kind in PLATFORM_COLUMNS.items()}
                types |= {column.name: column.type for column in source.dataset.columns}
                for message in literal_problems(edge.where.tree, types, of_input=True):
                    yield (*_input_path(new, job.name, index), "where"), message


def _replaces_rows(job: JobSpec) -> bool:
    stored = any(output.storage is Storage.POSTGRES for output in job.outputs)
    return stored and job.update_strategy is UpdateStrategy.REPLACE


def _not_added(new: DagSpec, kept: Mapping[str, BufferSchema]) -> Iterator[tuple[Path, str]]:
    """Schemas that would change stored rows by more than added columns."""
    for entry in new.publish:
        if isinstance(entry, BufferedDataset) and entry.name in kept:
            for path, message in additive_problems(kept[entry.name], BufferSchema.of(entry)):
                yield ("publish", entry.name, "schema", *path), message


def _undelivered(new: DagSpec, after: DagGraph) -> Iterator[tuple[Path, str]]:
    """Deliveries of other DAGs' datasets that don't fit these, and of datasets that other DAGs would lose."""
    published = {entry.name: entry for spec in after.dags.values() for entry in spec.publish}
    for dag, spec in after.dags.items():
        for index, delivery in enumerate(spec.deliver):
            for field, message in refused_by(published, delivery):
                if dag == new.name:
                    yield ("deliver", index, *field), message
                else:
                    yield (
                        ("publish", delivery.dataset),
                        f"delivery {delivery.name} of DAG {dag} sends its rows: {message}",
                    )


def _storage(world: DagGraph, dag: str, edge: InputSpec) -> Storage | None:
    source = world.producer(dag, edge)
    if source is None:
        return None
    return Storage.POSTGRES if isinstance(source, BufferedRef) else world.output(source).storage


def _is_published_by(spec: DagSpec, edge: InputSpec) -> bool:
    return isinstance(edge.source, DatasetName) and spec.published(edge.source.dataset) is not None


def _what(edge: InputSpec) -> str:
    match edge.source:
        case DatasetName(dataset):
            return f"dataset {dataset}"
        case JobOutput(job, output):
            return f"output {output} of job {job}"


def _index(spec: DagSpec, job: str) -> int:
    return next(index for index, known in enumerate(spec.jobs) if known.name == job)


def _input_path(spec: DagSpec, job: str, index: int) -> Path:
    return ("jobs", _index(spec, job), "inputs", index)


def _edge_path(new: DagSpec, world: DagGraph, child: JobKey, parent: JobKey) -> Path:
    job = new.job(child[1])
    if child[0] != new.name or job is None:
        return ()
    for index, edge in enumerate(job.inputs):
        source = world.producer(new.name, edge)
        if source is not None and not isinstance(source, BufferedRef) and source.key == parent:
            return (*_input_path(new, child[1], index), "from")
    return ("jobs", _index(new, child[1]))
