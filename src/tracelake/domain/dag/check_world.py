"""What is wrong with a DAG only in the company of the other active ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from tracelake.domain.buffer_schema import BufferSchema, additive_problems
from tracelake.domain.dag.cycles import find_cycles
from tracelake.domain.dag.model import (
    BufferedDataset,
    DagSpec,
    DatasetName,
    ExecutionStrategy,
    InputSpec,
    JobOutput,
    JobSpec,
    Storage,
    UpdateStrategy,
)
from tracelake.domain.dag.node import Mark
from tracelake.domain.dag.problems import Path, format_path
from tracelake.domain.dag.world import BufferedRef, JobKey, World
from tracelake.domain.errors import DagProblem, InvalidDag
from tracelake.domain.operator_catalog import CATALOG, READS_BLOCKS


def check_world(
    new: DagSpec,
    before: World,
    after: World,
    locate: Callable[[Path], Mark],
    kept: Mapping[str, BufferSchema] = MappingProxyType({}),
) -> None:
    """``kept`` are the schemas that this DAG's buffered datasets have rows of, by name."""
    found = [
        *_taken(new, before),
        *_unfed(new, after),
        *_cycles(new, after),
        *_scopeless(new, after),
        *_unpaired(new, after),
        *_by_position(new, after),
        *_not_added(new, kept),
    ]
    if found:
        raise InvalidDag([DagProblem(*locate(path), format_path(path), text) for path, text in found])


def _taken(new: DagSpec, before: World) -> Iterator[tuple[Path, str]]:
    for entry in new.publish:
        owner = before.publisher(entry.name)
        if owner not in (None, new.name):
            yield ("publish", entry.name), f"{entry.name} is already published by DAG {owner}"


def _unfed(new: DagSpec, after: World) -> Iterator[tuple[Path, str]]:
    """Inputs without a producer: in the new DAG a mistake, in another one something it is about to lose."""
    for (dag, name), job in after.jobs():
        for index, edge in enumerate(job.inputs):
            if after.producer(dag, edge) is not None:
                continue
            if dag == new.name:
                yield (*_input_path(new, name, index), "from"), f"{_what(edge)} does not exist"
            elif isinstance(edge.source, DatasetName):
                message = f"{edge.source.dataset} can't be unpublished: job {name} of DAG {dag} reads it"
                yield ("publish", edge.source.dataset), message


def _cycles(new: DagSpec, after: World) -> Iterator[tuple[Path, str]]:
    parents = after.parents()
    own_first = sorted(parents, key=lambda key: key[0] != new.name)
    for cycle in find_cycles({key: parents[key] for key in own_first}):
        flow = " -> ".join(f"{dag}/{job}" for dag, job in [cycle[0], *reversed(cycle)])
        path = _edge_path(new, after, cycle[0], cycle[1 % len(cycle)])
        yield path, f"cycle: {flow}"


def _scopeless(new: DagSpec, after: World) -> Iterator[tuple[Path, str]]:
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


def _unpaired(new: DagSpec, after: World) -> Iterator[tuple[Path, str]]:
    """Compactions whose outputs don't each have a hot dataset to be made of, whole."""
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
                yield path, f"{job.operator} keeps every row of what it reads"


def _by_position(new: DagSpec, after: World) -> Iterator[tuple[Path, str]]:
    """Jobs that would take positions of a buffered dataset for blocks."""
    for (dag, name), job in after.jobs():
        for index, edge in enumerate(job.inputs):
            source = after.producer(dag, edge)
            if not isinstance(source, BufferedRef):
                continue
            if job.operator in READS_BLOCKS:
                why = f"{job.operator} works on blocks, and a buffered dataset has none"
            elif edge.trigger and job.execution_strategy is ExecutionStrategy.PER_PARTITION:
                why = "a buffered dataset grows by position and has no partitions; use PerUpdate"
            elif edge.trigger and _replaces_rows(job):
                why = "what the job replaces in postgres goes by blocks, and a buffered dataset has none"
            else:
                continue
            if dag == new.name:
                yield (*_input_path(new, name, index), "from"), f"{source.dataset.name}: {why}"
            elif source.dag == new.name:
                yield ("publish", source.dataset.name), f"job {name} of DAG {dag} reads it: {why}"


def _replaces_rows(job: JobSpec) -> bool:
    stored = any(output.storage is Storage.POSTGRES for output in job.outputs)
    return stored and job.update_strategy is UpdateStrategy.REPLACE


def _not_added(new: DagSpec, kept: Mapping[str, BufferSchema]) -> Iterator[tuple[Path, str]]:
    """Schemas that would do more than add columns to what is stored."""
    for entry in new.publish:
        if isinstance(entry, BufferedDataset) and entry.name in kept:
            for path, message in additive_problems(kept[entry.name], BufferSchema.of(entry)):
                yield ("publish", entry.name, "schema", *path), message


def _storage(world: World, dag: str, edge: InputSpec) -> Storage | None:
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


def _edge_path(new: DagSpec, world: World, child: JobKey, parent: JobKey) -> Path:
    job = new.job(child[1])
    if child[0] != new.name or job is None:
        return ()
    for index, edge in enumerate(job.inputs):
        source = world.producer(new.name, edge)
        if source is not None and not isinstance(source, BufferedRef) and source.key == parent:
            return (*_input_path(new, child[1], index), "from")
    return ("jobs", _index(new, child[1]))
