"""What is wrong between the jobs of one DAG: names, edges that lead nowhere, cycles, scopes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracelake.domain.dag.cycles import find_cycles
from tracelake.domain.dag.fields import did_you_mean
from tracelake.domain.dag.installation import Installation
from tracelake.domain.dag.job_fields import JobDraft
from tracelake.domain.dag.model import (
    BufferedDataset,
    DatasetName,
    ExecutionStrategy,
    InputSpec,
    JobOutput,
    PublishedOutput,
    Storage,
)
from tracelake.domain.dag.problems import Path, Problems
from tracelake.domain.dag.publish_fields import PublishDraft


def check_graph(
    dag: str,
    drafts: Sequence[JobDraft],
    publish: Sequence[PublishDraft],
    installation: Installation,
    problems: Problems,
) -> None:
    by_name = {draft.spec.name: draft for draft in reversed(drafts)}
    published = {draft.entry.name: draft.entry for draft in publish}
    elsewhere = {name for name, owner in installation.published_elsewhere.items() if owner != dag}
    for draft in drafts:
        if by_name[draft.spec.name] is not draft and draft.spec.name:
            first = problems.mark(by_name[draft.spec.name].path).line
            problems.add_unless_known(
                (*draft.path, "name"), f"{draft.spec.name!r} is the name of the job on line {first} too"
            )
        for edge, path in zip(draft.spec.inputs, draft.input_paths, strict=True):
            _check_edge(draft, edge, (*path, "from"), by_name, {*published, *elsewhere}, problems)
        _check_scope(draft, by_name, published, problems)
    _check_cycles(by_name, published, problems)


def output_problem(
    source: JobOutput, by_name: Mapping[str, JobDraft], problems: Problems
) -> tuple[str, str] | None:
    """Why an output can't be read or published, as field (job or output) and message."""
    producer = by_name.get(source.job)
    if producer is None:
        return "job", f"there is no job {source.job!r}{did_you_mean(source.job, [n for n in by_name if n])}"
    count = len(producer.spec.outputs)
    if source.output < count or problems.known((*producer.path, "outputs")):
        return None
    has = "no outputs" if count == 0 else "only output 0" if count == 1 else f"outputs 0 to {count - 1}"
    return "output", f"{source.job} has {has}"


def _check_edge(
    draft: JobDraft,
    edge: InputSpec,
    path: Path,
    by_name: Mapping[str, JobDraft],
    datasets: set[str],
    problems: Problems,
) -> None:
    match edge.source:
        case JobOutput(job, _) if by_name.get(job) is draft:
            problems.add_unless_known((*path, "job"), "a job can't be its own input")
        case JobOutput() as source:
            if wrong := output_problem(source, by_name, problems):
                problems.add_unless_known((*path, wrong[0]), wrong[1])
        case DatasetName(dataset) if dataset not in datasets:
            problems.add_unless_known(
                (*path, "dataset"), f"nobody publishes a dataset {dataset!r}{did_you_mean(dataset, datasets)}"
            )


def _producer(
    edge: InputSpec, published: Mapping[str, PublishedOutput | BufferedDataset]
) -> JobOutput | BufferedDataset | None:
    """What feeds an edge inside this DAG, through a published name or not."""
    if isinstance(edge.source, JobOutput):
        return edge.source
    entry = published.get(edge.source.dataset)
    return JobOutput(entry.job, entry.output) if isinstance(entry, PublishedOutput) else entry


def _check_scope(
    draft: JobDraft,
    by_name: Mapping[str, JobDraft],
    published: Mapping[str, PublishedOutput | BufferedDataset],
    problems: Problems,
) -> None:
    if draft.spec.execution_strategy is not ExecutionStrategy.PER_PARTITION:
        return
    storages = [_storage(edge, by_name, published) for edge in draft.spec.inputs if edge.trigger]
    if storages and all(storage is Storage.POSTGRES for storage in storages):
        problems.add_unless_known(
            (*draft.path, "execution_strategy"),
            "every triggering input is in postgres and moves by cursor, so there is no partition to run per; "
            "use PerUpdate or put a range_aggregator in between",
        )


def _storage(
    edge: InputSpec,
    by_name: Mapping[str, JobDraft],
    published: Mapping[str, PublishedOutput | BufferedDataset],
) -> Storage | None:
    source = _producer(edge, published)
    if isinstance(source, BufferedDataset):
        return Storage.POSTGRES
    if source is None or source.job not in by_name:
        return None
    outputs = by_name[source.job].spec.outputs
    return outputs[source.output].storage if source.output < len(outputs) else None


def _check_cycles(
    by_name: Mapping[str, JobDraft],
    published: Mapping[str, PublishedOutput | BufferedDataset],
    problems: Problems,
) -> None:
    edges: dict[str, list[str]] = {}
    where: dict[tuple[str, str], Path] = {}
    for name, draft in by_name.items():
        edges[name] = []
        for edge, path in zip(draft.spec.inputs, draft.input_paths, strict=True):
            source = _producer(edge, published)
            if isinstance(source, JobOutput) and source.job in by_name and source.job != name:
                edges[name].append(source.job)
                where.setdefault((name, source.job), (*path, "from"))
            elif (
                isinstance(source, JobOutput) and source.job == name and isinstance(edge.source, DatasetName)
            ):
                problems.add_unless_known((*path, "from", "dataset"), "a job can't be its own input")
    order = sorted(edges, key=lambda name: by_name[name].path[-1])
    for cycle in find_cycles({name: edges[name] for name in order}):
        flow = [cycle[0], *reversed(cycle)]
        problems.add(where[cycle[0], cycle[1 % len(cycle)]], f"cycle: {' -> '.join(flow)}")
