"""Names and storages for the outputs that a DAG file leaves to the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tracelake.domain.dag.job_fields import JobDraft
from tracelake.domain.dag.model import DatasetName, JobOutput, JobSpec, OutputSpec, Storage
from tracelake.domain.operator_catalog import CATALOG


def resolve_outputs(drafts: Sequence[JobDraft]) -> list[tuple[OutputSpec, ...]]:
    by_name = {draft.spec.name: draft for draft in reversed(drafts)}
    return [_resolve(draft, by_name) for draft in drafts]


def _resolve(draft: JobDraft, by_name: Mapping[str, JobDraft]) -> tuple[OutputSpec, ...]:
    own = _own_names(draft)
    traits = CATALOG.get(draft.spec.operator)
    if traits is not None and traits.outputs_named_after_inputs:
        inherited = _names_of_what_is_read(draft.spec, by_name)
        if len(set(inherited)) == len(inherited):
            own = [*inherited[: len(own)], *own[len(inherited) :]]
    default = traits.storage if traits is not None else Storage.NONE
    return tuple(
        OutputSpec(index, output.name or own[index], output.storage or default)
        for index, output in enumerate(draft.outputs)
    )


def _own_names(draft: JobDraft) -> list[str]:
    traits = CATALOG.get(draft.spec.operator)
    known = traits.outputs if traits is not None and traits.outputs is not None else ()
    return [known[i] if i < len(known) else f"output_{i}" for i in range(len(draft.outputs))]


def _names_of_what_is_read(spec: JobSpec, by_name: Mapping[str, JobDraft]) -> list[str]:
    """One name for each input that is read.

    What only triggers is not read and gives no name: inputs with storage ``none``, and all triggering ones
    when there are others.
    """
    found: list[str] = []
    for edge in [edge for edge in spec.inputs if not edge.trigger] or spec.inputs:
        match edge.source:
            case DatasetName(dataset):
                found.append(dataset)
            case JobOutput(job, output) if job in by_name and job != spec.name:
                names = [
                    o.name or n for o, n in zip(by_name[job].outputs, _own_names(by_name[job]), strict=True)
                ]
                if output < len(names) and _storage(by_name[job], output) is not Storage.NONE:
                    found.append(names[output])
            case _:
                continue
    return found


def _storage(draft: JobDraft, output: int) -> Storage:
    traits = CATALOG.get(draft.spec.operator)
    return draft.outputs[output].storage or (traits.storage if traits is not None else Storage.NONE)
