"""What a job produces, as a hash: equal fingerprints, same data; a change anywhere upstream changes it.

It covers what decides the rows (operator, config, inputs and what feeds them, ``where``, outputs,
strategies, bundle, names of secrets) and leaves out how the job is run (runtime, scaling, timeouts,
retries, priority, queue limits). It is taken from the decoded spec and must not change when the spec
has been through ``jsonb``, which rewrites numbers and the order of keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import msgspec

from tracelake.domain.dag.cycles import topological
from tracelake.domain.dag.model import DagSpec, JobSpec
from tracelake.domain.dag.world import BufferedRef, JobKey, OutputRef, World


def fingerprints(world: Mapping[str, DagSpec]) -> dict[tuple[str, str], str]:
    """By (dag, job), for DAGs without cycles between them; ``plan_deploy`` refuses those that have any."""
    graph = World(world)
    found: dict[JobKey, str] = {}
    for key in topological(graph.parents()):
        job = graph.job(key)
        assert job is not None
        found[key] = _digest(_job_identity(key[0], job, graph, found))
    if len(found) != sum(1 for _ in graph.jobs()):
        raise ValueError("the DAGs feed each other in a cycle")
    return found


def canonical(value: Any) -> Any:
    """The value in the one form that all its spellings share after a round trip through ``jsonb``."""
    if isinstance(value, Mapping):
        return {key: canonical(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(Decimal(repr(value)))
    return value


def _digest(identity: Any) -> str:
    text = json.dumps(canonical(identity), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _job_identity(dag: str, job: JobSpec, graph: World, known: Mapping[JobKey, str]) -> dict[str, Any]:
    return {
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
        "secrets": sorted(job.secrets),
    }


def _source_identity(source: OutputRef | BufferedRef | None, known: Mapping[JobKey, str]) -> Any:
    match source:
        case OutputRef(dag, job, output):
            return ["output", dag, job, output, known[dag, job]]
        case BufferedRef(dag, dataset):
            # Its schema only ever grows, in place: nobody reads anything again because of a new column.
            return ["buffered", dag, dataset.name]
        case None:
            return None
