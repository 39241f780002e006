"""What is wrong with one job, given the installation: its source, operator, runtime, outputs and secrets."""

from __future__ import annotations

from tracelake.domain.bundle_entrypoint import REFERENCE, find_entrypoint
from tracelake.domain.dag.fields import did_you_mean
from tracelake.domain.dag.installation import Installation
from tracelake.domain.dag.job_fields import JobDraft
from tracelake.domain.dag.model import Activation, SourceKind, Storage, UpdateStrategy
from tracelake.domain.dag.problems import Problems
from tracelake.domain.errors import Invalid
from tracelake.domain.operator_catalog import (
    CATALOG,
    IN_PROCESS_OPERATORS,
    NOOP,
    PLATFORM_OPERATORS,
    UDF,
    config_problems,
)


def check_job(draft: JobDraft, installation: Installation, problems: Problems) -> None:
    _check_activation(draft, installation, problems)
    _check_runtime(draft, installation, problems)
    _check_operator(draft, problems)
    _check_outputs(draft, problems)
    _check_udf(draft, problems)
    _check_function(draft, installation, problems)
    if draft.spec.update_strategy is UpdateStrategy.APPEND and not draft.spec.unique_key:
        problems.add_unless_known((*draft.path, "unique_key"), "is required for update_strategy: append")


def _check_activation(draft: JobDraft, installation: Installation, problems: Problems) -> None:
    spec, inputs = draft.spec, (*draft.path, "inputs")
    if spec.activation is Activation.REACTIVE:
        if not spec.inputs:
            problems.add_unless_known(inputs, "a reactive job needs at least one input")
        elif not any(edge.trigger for edge in spec.inputs):
            problems.add_unless_known(inputs, "no input triggers the job: one needs trigger: true")
        return
    if spec.inputs:
        problems.add_unless_known(inputs, "a source has no inputs; use activation: reactive")
    if spec.source_kind is not None and spec.source_kind not in installation.source_kinds:
        served = ", ".join(sorted(installation.source_kinds))
        problems.add_unless_known(
            (*draft.path, "source", "kind"),
            f"{spec.source_kind} sources are not supported by this installation (it has {served})",
        )
    if not draft.outputs:
        problems.add_unless_known((*draft.path, "outputs"), "a source needs at least one output")
    if spec.source_kind is SourceKind.MANUAL:
        for declared, output in zip(draft.outputs, spec.outputs, strict=True):
            if output.storage is not Storage.NONE:
                problems.add_unless_known(
                    (*declared.path, "storage") if declared.storage else declared.path,
                    "a manual source makes events only: its storage is none",
                )


def _check_runtime(draft: JobDraft, installation: Installation, problems: Problems) -> None:
    spec = draft.spec
    traits = installation.runtimes.get(spec.runtime)
    if traits is None:
        known = ", ".join(sorted(installation.runtimes))
        problems.add_unless_known(
            (*draft.path, "runtime"), f"unknown runtime {spec.runtime!r}; known: {known}"
        )
        return
    if spec.udf is not None and not traits.untrusted_ok:
        problems.add_unless_known(
            (*draft.path, "runtime"), f"{spec.runtime} runs trusted operators only, not UDFs"
        )
    elif traits.in_process and spec.operator not in IN_PROCESS_OPERATORS:
        problems.add_unless_known(
            (*draft.path, "operator"),
            f"{spec.operator} is not available on {spec.runtime}; it runs {', '.join(IN_PROCESS_OPERATORS)}",
        )


def _check_operator(draft: JobDraft, problems: Problems) -> None:
    spec, config = draft.spec, (*draft.path, "config")
    traits = CATALOG.get(spec.operator)
    if traits is None:
        return
    if spec.operator in PLATFORM_OPERATORS:
        problems.add_unless_known(
            (*draft.path, "operator"),
            f"{spec.operator} is the platform's own: a buffered dataset brings it along",
        )
        return
    if traits.config is not None:
        for key in spec.config:
            if key not in traits.config:
                hint = did_you_mean(key, traits.config)
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
    """A runtime of functions runs a bundle that is here, at an entrypoint that the bundle has."""
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
        problems.add_unless_known(bundle, "is not here; push it first: `tracelake bundle push`")
    elif not problems.known(entrypoint):
        try:
            find_entrypoint(listing, udf.entrypoint)
        except Invalid as refused:
            problems.add(entrypoint, refused.message)
