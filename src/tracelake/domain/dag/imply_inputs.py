"""Inputs that a DAG file leaves out because another one stands for them.

An operator whose outputs follow its inputs (``parquet_compact``) reads one dataset per output. Where it has more
outputs than inputs to read, its last one stands for the producer's further outputs too: ``{job: follower, output:
0}`` with ``outputs: 3`` means outputs 0, 1 and 2 of the follower. They are written out here, so that everybody
downstream (fingerprint, deploy, payload, revisions) sees inputs like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tracelake.domain.dag.job_fields import JobDraft
from tracelake.domain.dag.model import InputSpec, JobOutput
from tracelake.domain.operator_catalog import CATALOG


def imply_inputs(drafts: Sequence[JobDraft]) -> list[JobDraft]:
    by_name = {draft.spec.name: draft for draft in reversed(drafts)}
    return [_imply(draft, by_name) for draft in drafts]


def _imply(draft: JobDraft, by_name: Mapping[str, JobDraft]) -> JobDraft:
    traits = CATALOG.get(draft.spec.operator)
    if traits is None or not traits.outputs_named_after_inputs:
        return draft
    read = [index for index, edge in enumerate(draft.spec.inputs) if not edge.trigger]
    if not read or not isinstance(source := draft.spec.inputs[read[-1]].source, JobOutput):
        return draft
    producer = by_name.get(source.job)
    available = 0 if producer is None else len(producer.outputs) - source.output - 1
    missing = min(len(draft.outputs) - len(read), available)
    implied = [
        InputSpec(JobOutput(source.job, source.output + place), trigger=False)
        for place in range(1, missing + 1)
    ]
    if not implied:
        return draft
    return JobDraft(
        draft.path,
        msgspec.structs.replace(draft.spec, inputs=(*draft.spec.inputs, *implied)),
        draft.outputs,
        (*draft.input_paths, *(draft.input_paths[read[-1]] for _ in implied)),
    )
