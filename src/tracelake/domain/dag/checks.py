"""Checks of a DAG against its installation: each job by itself, the edges between jobs, and ``publish``.

A job's source, operator, runtime, outputs and secrets must be ones that the installation has. Between the jobs,
names must be unique, edges must lead somewhere, and there must be no cycles. Published names must be free. The
parser is pure: its caller passes the registered runtimes and the published names as an
``Installation``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from tracelake.domain.buffers import BufferSchema, schema_problems
from tracelake.domain.bundles import REFERENCE, BundleListing, find_entrypoint
from tracelake.domain.dag.entries import JobDraft, PublishDraft
from tracelake.domain.dag.fields import did_you_mean
from tracelake.domain.dag.graph import find_cycles
from tracelake.domain.dag.model import (
    Activation,
    BufferedDataset,
    DatasetName,
    ExecutionStrategy,
    InputSpec,
    JobOutput,
    PublishedOutput,
    SourceKind,
    Storage,
    UpdateStrategy,
)
from tracelake.domain.dag.problems import Path, Problems
from tracelake.domain.errors import Invalid
from tracelake.domain.operators.catalog import (
    CATALOG,
    IN_PROCESS_OPERATORS,
    NOOP,
    UDF,
    config_problems,
)
from tracelake.domain.operators.in_process import RANGE_AGGREGATOR
from tracelake.domain.operators.spec import OperatorSpec
from tracelake.domain.runtimes import BUILT_IN, RuntimeTraits

_PLACE = re.compile(r"input_[0-9]+|scope_blocks")


class Installation(msgspec.Struct, frozen=True):
    """``published_elsewhere`` maps each published dataset name to the DAG that publishes it.

    Entries of the DAG being parsed are ignored: its new version declares them itself. ``bundles`` are those of the
    file's references that were pushed to this installation.
    """

    runtimes: Mapping[str, RuntimeTraits]
    published_elsewhere: Mapping[str, str] = MappingProxyType({})
    bundles: Mapping[str, BundleListing] = MappingProxyType({})


def check_job(draft: JobDraft, installation: Installation, problems: Problems) -> None:
    _check_activation(draft, problems)
    _check_runtime(draft, installation, problems)
    _check_operator(draft, problems)
    _check_outputs(draft, problems)
    _check_udf(draft, problems)
    _check_function(draft, installation, problems)
    if draft.spec.update_strategy is UpdateStrategy.APPEND and not draft.spec.unique_key:
        problems.add_unless_known((*draft.path, "unique_key"), "is required for update_strategy: append")


def _check_activation(draft: JobDraft, problems: Problems) -> None:
    spec, inputs = draft.spec, (*draft.path, "inputs")
    if not _fits_operator(draft, problems):
        # Inputs, outputs and triggers were meant for the other activation: messages about them would mislead.
        return
    if spec.activation is Activation.REACTIVE:
        if not spec.inputs:
            problems.add_unless_known(inputs, "a reactive job needs at least one input")
        elif not any(edge.trigger for edge in spec.inputs):
            problems.add_unless_known(inputs, "no input triggers the job: one needs trigger: true")
        return
    if spec.inputs:
        problems.add_unless_known(inputs, "a source has no inputs; use activation: reactive")
    if not draft.outputs:
        problems.add_unless_known((*draft.path, "outputs"), "a source needs at least one output")
    if spec.source_kind not in (None, SourceKind.ALWAYS_ON) and not spec.runs_code:
        for declared in draft.outputs[1:] if spec.source_kind is not SourceKind.MANUAL else ():
            problems.add_unless_known(
                declared.path, f"a {spec.source_kind} source without code has its events on output 0 only"
            )
        for declared, output in zip(draft.outputs, spec.outputs, strict=True):
            if output.storage is not Storage.NONE:
                problems.add_unless_known(
                    (*declared.path, "storage") if declared.storage else declared.path,
                    f"a {spec.source_kind} source without code makes events only: its storage is none",
                )


def _declared(draft: JobDraft) -> OperatorSpec[Any] | None:
    """The declaration of the operator that the job runs. None for a user's own, and for one that another check
    refuses by its name: a UDF job runs its bundle, and the platform's own operators are in no DAG."""
    declared = CATALOG.get(draft.spec.operator)
    return None if declared is None or declared.platform or draft.spec.udf is not None else declared


def _fits_operator(draft: JobDraft, problems: Problems) -> bool:
    """Whether the operator can run as a source, or as a reactive job, as the entry asks for."""
    spec, declared = draft.spec, _declared(draft)
    if declared is None or declared.activation is None:
        return True
    if spec.activation is not declared.activation:
        other = (
            "reads no input" if declared.activation is Activation.SOURCE else "runs when its inputs change"
        )
        problems.add_unless_known(
            (*draft.path, "activation"),
            f"{spec.operator} {other}; use activation: {declared.activation}",
        )
        return False
    if declared.activation is Activation.SOURCE and spec.source_kind not in (None, SourceKind.ALWAYS_ON):
        problems.add_unless_known(
            (*draft.path, "source", "kind"),
            f"{spec.operator} has to run; use kind: {SourceKind.ALWAYS_ON}",
        )
        return False
    return True


def _check_runtime(draft: JobDraft, installation: Installation, problems: Problems) -> None:
    spec = draft.spec
    traits = installation.runtimes.get(spec.runtime)
    if traits is None:
        known = ", ".join(sorted(installation.runtimes))
        problems.add_unless_known(
            (*draft.path, "runtime"), f"unknown runtime {spec.runtime!r}; known: {known}"
        )
        return
    declared = _declared(draft)
    if spec.udf is not None and not traits.untrusted_ok:
        problems.add_unless_known(
            (*draft.path, "runtime"), f"{spec.runtime} runs trusted operators only, not UDFs"
        )
    elif traits.in_process and spec.operator not in IN_PROCESS_OPERATORS:
        problems.add_unless_known(
            (*draft.path, "operator"),
            f"{spec.operator} is not available on {spec.runtime}; it runs {', '.join(IN_PROCESS_OPERATORS)}",
        )
    # A runtime of functions has a check of its own; a registered one may have a worker of any kind.
    elif (
        declared is not None
        and declared.runtimes
        and not traits.invoked
        and spec.runtime in BUILT_IN.keys() - declared.runtimes
    ):
        problems.add_unless_known(
            (*draft.path, "runtime"),
            f"{spec.operator} doesn't run on {spec.runtime}; it runs on {', '.join(declared.runtimes)}",
        )


def _check_operator(draft: JobDraft, problems: Problems) -> None:
    spec, config = draft.spec, (*draft.path, "config")
    traits = CATALOG.get(spec.operator)
    if traits is None:
        return
    if traits.platform:
        problems.add_unless_known(
            (*draft.path, "operator"),
            f"{spec.operator} is the platform's own: a deploy adds its jobs by itself",
        )
        return
    if traits.refuses_unknown:
        for key in spec.config:
            if key not in traits.keys:
                hint = did_you_mean(key, traits.keys)
                problems.add_unless_known((*config, key), f"{spec.operator} has no such setting{hint}")
    for key, message in config_problems(spec.operator, spec.config):
        problems.add_unless_known((*config, key), message)
    if spec.activation is Activation.REACTIVE and traits.strategy not in (None, spec.execution_strategy):
        problems.add_unless_known(
            (*draft.path, "execution_strategy"), f"{spec.operator} only runs {traits.strategy}"
        )


def _check_outputs(draft: JobDraft, problems: Problems) -> None:
    spec, path = draft.spec, (*draft.path, "outputs")
    traits = CATALOG.get(spec.operator)
    if traits is not None and traits.outputs is not None and len(spec.outputs) > len(traits.outputs):
        problems.add_unless_known(
            path, f"{spec.operator} has {len(traits.outputs)} outputs ({', '.join(traits.outputs)})"
        )
    seen: dict[str, int] = {}
    for declared, output in zip(draft.outputs, spec.outputs, strict=True):
        if output.name in seen:
            at = (*declared.path, "name") if declared.name else declared.path
            problems.add_unless_known(at, f"output {seen[output.name]} is named {output.name!r} too")
        seen.setdefault(output.name, output.index)
        if traits is not None and traits.outputs_by_name and output.name not in (traits.outputs or ()):
            at = (*declared.path, "name") if declared.name else declared.path
            known = ", ".join(traits.outputs or ())
            problems.add_unless_known(at, f"{spec.operator} has no output {output.name!r}; it has {known}")
        if declared.storage is not None and traits is not None and declared.storage not in traits.storages:
            allowed = ", ".join(sorted(traits.storages))
            problems.add_unless_known((*declared.path, "storage"), f"{spec.operator} writes {allowed} only")


def _check_udf(draft: JobDraft, problems: Problems) -> None:
    spec = draft.spec
    if spec.udf is None:
        if spec.operator == UDF:
            problems.add_unless_known((*draft.path, "udf"), "is required for operator: udf")
        return
    if spec.operator in CATALOG:
        problems.add_unless_known(
            (*draft.path, "operator"), f"{spec.operator} is built in; a UDF job runs its bundle, leave it out"
        )
    if spec.secrets:
        problems.add_unless_known((*draft.path, "secrets"), "UDF jobs get no secrets")
    for declared, output in zip(draft.outputs, spec.outputs, strict=True):
        if output.storage is not Storage.NONE:
            problems.add_unless_known(
                (*declared.path, "storage"),
                f"UDF jobs can't write {output.storage}: publish to a buffered dataset or emit events (none)",
            )


def _check_function(draft: JobDraft, installation: Installation, problems: Problems) -> None:
    """A runtime of functions needs a pushed bundle, and an entrypoint that the bundle has."""
    spec, udf = draft.spec, draft.spec.udf
    traits = installation.runtimes.get(spec.runtime)
    if traits is None or not traits.invoked:
        return
    if udf is None:
        if spec.operator not in (NOOP, UDF):
            problems.add_unless_known(
                (*draft.path, "operator"),
                f"{spec.runtime} runs functions: give udf: {{bundle, entrypoint}} instead, or operator: {NOOP}",
            )
        return
    bundle, entrypoint = (*draft.path, "udf", "bundle"), (*draft.path, "udf", "entrypoint")
    listing = installation.bundles.get(udf.bundle)
    if REFERENCE.match(udf.bundle) is None:
        problems.add_unless_known(
            bundle, "must be sha256: and 64 hex digits, as `tracelake bundle push` prints it"
        )
    elif listing is None:
        problems.add_unless_known(bundle, "isn't known; push it first: `tracelake bundle push`")
    elif not problems.known(entrypoint):
        try:
            find_entrypoint(listing, udf.entrypoint)
        except Invalid as refused:
            problems.add(entrypoint, refused.message)


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
    # Outputs that couldn't be read are reported already, and their number isn't known.
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
                (*path, "dataset"),
                f"there is no published dataset {dataset!r}{did_you_mean(dataset, datasets)}",
            )


def _producer(
    edge: InputSpec, published: Mapping[str, PublishedOutput | BufferedDataset]
) -> JobOutput | BufferedDataset | None:
    """The producer of an edge inside this DAG, through a published name or not."""
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
            f"use PerUpdate or put a {RANGE_AGGREGATOR.name} in between",
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
    # By their place in the file, so that a file always reports the same cycle.
    order = sorted(edges, key=lambda name: by_name[name].path[-1])
    for cycle in find_cycles({name: edges[name] for name in order}):
        flow = [cycle[0], *reversed(cycle)]
        problems.add(where[cycle[0], cycle[1 % len(cycle)]], f"cycle: {' -> '.join(flow)}")


def check_publish(
    dag: str,
    drafts: Sequence[JobDraft],
    publish: Sequence[PublishDraft],
    installation: Installation,
    problems: Problems,
) -> None:
    by_name = {draft.spec.name: draft for draft in reversed(drafts)}
    taken: dict[tuple[str, int], str] = {}
    for draft in publish:
        entry = draft.entry
        owner = installation.published_elsewhere.get(entry.name, dag)
        if owner != dag:
            problems.add_unless_known(draft.path, f"{entry.name} is already published by DAG {owner}")
        if _PLACE.fullmatch(entry.name):
            problems.add_unless_known(
                draft.path,
                f"{entry.name} is reserved in task SQL (input_0, input_1, …, scope_blocks): choose another name",
            )
        if not isinstance(entry, PublishedOutput):
            for path, message in schema_problems(BufferSchema.of(entry)):
                problems.add_unless_known((*draft.path, "schema", *path), message)
            continue
        if wrong := output_problem(JobOutput(entry.job, entry.output), by_name, problems):
            field, message = wrong
            problems.add_unless_known((*draft.path, "from", field), message)
            continue
        other = taken.setdefault((entry.job, entry.output), entry.name)
        if other != entry.name:
            problems.add_unless_known(
                (*draft.path, "from"), f"output {entry.output} of {entry.job} is already published as {other}"
            )
