"""All DAGs of an installation as one graph: who feeds whom, through published names too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeAlias

from tracelake.domain.dag.model import (
    BufferedDataset,
    DagSpec,
    DatasetName,
    InputSpec,
    JobOutput,
    JobSpec,
    OutputSpec,
    PublishedOutput,
)

JobKey: TypeAlias = tuple[str, str]
"""DAG and job."""


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


Producer: TypeAlias = OutputRef | BufferedRef


class World:
    def __init__(self, dags: Mapping[str, DagSpec]) -> None:
        self.dags = dags
        self._jobs = {(dag, job.name): job for dag, spec in dags.items() for job in spec.jobs}
        self._published: dict[str, tuple[str, PublishedOutput | BufferedDataset]] = {}
        for dag, spec in dags.items():
            for entry in spec.publish:
                self._published.setdefault(entry.name, (dag, entry))

    def jobs(self) -> Iterator[tuple[JobKey, JobSpec]]:
        yield from self._jobs.items()

    def job(self, key: JobKey) -> JobSpec | None:
        return self._jobs.get(key)

    def publisher(self, dataset: str) -> str | None:
        found = self._published.get(dataset)
        return found[0] if found else None

    def producer(self, dag: str, edge: InputSpec) -> Producer | None:
        """What feeds an input; None when nothing of that name exists."""
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
        """For each job the jobs that feed it; buffered datasets have no parents, whoever writes them."""
        found: dict[JobKey, list[JobKey]] = {}
        for (dag, name), job in self._jobs.items():
            producers = (self.producer(dag, edge) for edge in job.inputs)
            found[dag, name] = [ref.key for ref in producers if isinstance(ref, OutputRef)]
        return found

    def _existing(self, ref: OutputRef) -> OutputRef | None:
        job = self._jobs.get(ref.key)
        return ref if job is not None and ref.output < len(job.outputs) else None
