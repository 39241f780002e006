"""Parses a DAG file to a ``DagSpec``, or reports every problem in it at once.

It also fills in what a file leaves out: names and storages of outputs, and implied inputs. An operator whose
outputs follow its inputs (``parquet_compact``) reads one dataset per output. If it has more outputs than inputs to
read, its last input stands for the producer's further outputs too: ``{job: follower, output: 0}`` with ``outputs:
3`` means outputs 0, 1 and 2 of the follower. They are written out here, so that all later steps (fingerprint,
deploy, payload, revisions) see ordinary inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from tracelake.domain.dag.checks import Installation, check_graph, check_job, check_publish
from tracelake.domain.dag.deliveries import check_deliveries, read_deliveries
from tracelake.domain.dag.entries import (
    JOB_FIELDS,
    JOB_NAME,
    SETTINGS_FIELDS,
    JobDraft,
    read_job,
    read_publish,
    read_settings,
)
from tracelake.domain.dag.fields import Fields
from tracelake.domain.dag.model import (
    DagSpec,
    DatasetName,
    InputSpec,
    JobOutput,
    JobSettings,
    JobSpec,
    OutputSpec,
    Storage,
)
from tracelake.domain.dag.problems import Map, Mark, Path, Problems, Scalar, Seq, fatal, kind_of
from tracelake.domain.dag.yaml_tree import read_tree
from tracelake.domain.operators.catalog import CATALOG

TOP_FIELDS = frozenset({"name", "defaults", "jobs", "publish", "deliver"})
DEFAULTS_FIELDS = SETTINGS_FIELDS | {"runtime"}
MAX_JOBS = 1000
#: Maximum number of characters of all ``where`` of a file: parsing takes a millisecond for a hundred of them.
MAX_PREDICATES = 131_072


def parse_dag(text: str | bytes, installation: Installation) -> DagSpec:
    """Raises ``InvalidDag`` with all problems, each with line, column and field."""
    root, found = read_tree(text)
    if not isinstance(root, Map):
        raise fatal(root.mark, f"must be a map with name and jobs, not {kind_of(root)}")
    problems = Problems(root, found)
    top = Fields(root, (), problems, TOP_FIELDS)
    name = top.string("name", pattern=JOB_NAME) or ""
    drafts = imply_inputs(_read_jobs(top))
    publish = read_publish(top)
    deliver = read_deliveries(top)
    outputs = resolve_outputs(drafts)
    drafts = [
        JobDraft(d.path, msgspec.structs.replace(d.spec, outputs=o), d.outputs, d.input_paths)
        for d, o in zip(drafts, outputs, strict=True)
    ]
    for draft in drafts:
        check_job(draft, installation, problems)
    check_graph(name, drafts, publish, installation, problems)
    check_publish(name, drafts, publish, installation, problems)
    elsewhere = {each for each, owner in installation.published_elsewhere.items() if owner != name}
    check_deliveries(deliver, publish, elsewhere, problems)
    # Only now: a person sees all problems of a file at once.
    problems.raise_if_any()
    return DagSpec(
        name,
        tuple(draft.spec for draft in drafts),
        tuple(draft.entry for draft in publish),
        tuple(draft.spec for draft in deliver),
    )


def locator(text: str | bytes) -> Callable[[Path], Mark]:
    """Finds the place of a path in a parsed file, for problems that are found later."""
    return Problems(read_tree(text)[0]).mark


def _read_jobs(top: Fields) -> list[JobDraft]:
    settings, runtime = JobSettings(), None
    defaults = top.nested("defaults", DEFAULTS_FIELDS)
    if defaults is not None:
        settings = read_settings(defaults, settings)
        runtime = defaults.string("runtime", required=False)
    if not top.has("jobs"):
        top.wrong("jobs", "is required: a list of jobs")
    drafts: list[JobDraft] = []
    predicates = 0
    for entry in top.items("jobs", JOB_FIELDS):
        if len(drafts) == MAX_JOBS:
            top.wrong("jobs", f"more than {MAX_JOBS} jobs")
            break
        for where in _wheres(entry):
            # Counted before it is parsed, since parsing is what costs the time.
            predicates += len(str(where.value))
            if predicates > MAX_PREDICATES:
                what = f"where: this file has more than {MAX_PREDICATES} characters of predicates"
                raise fatal(where.mark, what)
        drafts.append(read_job(entry, settings, runtime))
    if not drafts:
        top.wrong("jobs", "must not be empty")
    return drafts


def _wheres(job: Fields) -> Iterator[Scalar]:
    """Predicates that are text; those that are maps are bounded by the number of values."""
    inputs = job.node("inputs")
    for entry in inputs.items if isinstance(inputs, Seq) else ():
        where = entry.entries.get("where") if isinstance(entry, Map) else None
        if isinstance(where, Scalar):
            yield where


def imply_inputs(drafts: Sequence[JobDraft]) -> list[JobDraft]:
    # Reversed, so that the first of two jobs with one name is kept.
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

    Inputs that only trigger aren't read and give no name: those with storage ``none``, and all triggering ones when
    there are others.
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
