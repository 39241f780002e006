"""One entry of ``jobs`` to a draft of its ``JobSpec``.

Only what the entry itself decides is checked here; what depends on other jobs or on the installation is
left to ``checks``. Outputs stay without names and storages until all jobs are read, because an operator
may name its outputs after its inputs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tracelake.domain.dag.fields import Fields
from tracelake.domain.dag.model import (
    Activation,
    DatasetName,
    ExecutionStrategy,
    InputSpec,
    JobOutput,
    JobSettings,
    JobSpec,
    SourceKind,
    Storage,
    UdfSpec,
    UpdateStrategy,
)
from tracelake.domain.dag.node import Map, Seq, plain
from tracelake.domain.dag.problems import Path
from tracelake.domain.dag.settings_fields import SETTINGS_FIELDS, read_settings
from tracelake.domain.errors import Invalid
from tracelake.domain.operator_catalog import NOOP, UDF, complete_config, default_output_count
from tracelake.domain.where import Where
from tracelake.domain.where_parse import parse_where

DATASET_NAME = re.compile(r"^[a-z][a-z0-9_]{0,127}\Z")
JOB_NAME = re.compile(r"^[a-z][a-z0-9_-]{0,127}\Z")
MAX_OUTPUTS = 64

JOB_FIELDS = SETTINGS_FIELDS | {
    "name",
    "activation",
    "runtime",
    "operator",
    "source",
    "inputs",
    "outputs",
    "execution_strategy",
    "update_strategy",
    "unique_key",
    "config",
    "secrets",
    "udf",
}


@dataclass(frozen=True, slots=True)
class OutputDraft:
    path: Path
    name: str | None = None
    storage: Storage | None = None


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job as far as its own entry tells; ``spec.outputs`` is still empty."""

    path: Path
    spec: JobSpec
    outputs: tuple[OutputDraft, ...]
    input_paths: tuple[Path, ...]


def read_job(fields: Fields, defaults: JobSettings, default_runtime: str | None) -> JobDraft:
    activation = _read_activation(fields)
    udf = _read_udf(fields)
    kind = _read_source_kind(fields, activation)
    operator = _read_operator(fields, activation, kind, udf)
    inputs, input_paths = _read_inputs(fields)
    strategy = fields.choice("execution_strategy", ExecutionStrategy)
    if activation is Activation.REACTIVE:
        strategy = strategy or ExecutionStrategy.PER_UPDATE
    elif strategy is not None:
        fields.wrong("execution_strategy", "is for reactive jobs; a source runs on its own")
    spec = JobSpec(
        name=fields.string("name", pattern=JOB_NAME) or "",
        activation=activation,
        runtime=fields.string("runtime", required=default_runtime is None) or default_runtime or "",
        operator=operator,
        source_kind=kind,
        inputs=inputs,
        execution_strategy=strategy,
        update_strategy=fields.choice("update_strategy", UpdateStrategy) or UpdateStrategy.REPLACE,
        unique_key=fields.strings("unique_key"),
        config=complete_config(operator, fields.free_map("config")),
        secrets=fields.strings("secrets"),
        udf=udf,
        settings=read_settings(fields, defaults),
    )
    return JobDraft(fields.path, spec, _read_outputs(fields, operator), input_paths)


def _read_activation(fields: Fields) -> Activation:
    if not fields.has("activation"):
        fields.wrong("activation", "is required: source or reactive")
    chosen = fields.choice("activation", Activation)
    return chosen or (Activation.SOURCE if fields.has("source") else Activation.REACTIVE)


def _read_source_kind(fields: Fields, activation: Activation) -> SourceKind | None:
    source = fields.nested("source", {"kind"})
    if activation is Activation.REACTIVE:
        if fields.has("source"):
            fields.wrong("source", "is for jobs with activation: source")
        return None
    if source is None:
        fields.wrong("source", "is required for a source: {kind: always_on} or {kind: manual}")
        return None
    if not source.has("kind"):
        source.wrong("kind", "is required: always_on, cron, webhook or manual")
    return source.choice("kind", SourceKind)


def _read_operator(
    fields: Fields, activation: Activation, kind: SourceKind | None, udf: UdfSpec | None
) -> str:
    """A manual source runs nothing. One whose kind is unreadable may be manual: one problem, not two."""
    may_be_manual = activation is Activation.SOURCE and kind in (None, SourceKind.MANUAL)
    optional = may_be_manual or fields.has("udf")
    named = fields.string("operator", required=not optional)
    return named or (UDF if udf is not None else NOOP)


def _read_udf(fields: Fields) -> UdfSpec | None:
    udf = fields.nested("udf", {"bundle", "entrypoint"})
    if udf is None:
        return None
    return UdfSpec(udf.string("bundle") or "", udf.string("entrypoint") or "")


def _read_inputs(fields: Fields) -> tuple[tuple[InputSpec, ...], tuple[Path, ...]]:
    inputs: list[InputSpec] = []
    paths: list[Path] = []
    for entry in fields.items("inputs", {"from", "trigger", "where"}):
        source = _read_from(entry)
        where = _read_where(entry)
        trigger = entry.boolean("trigger", True)
        if source is not None:
            inputs.append(InputSpec(source, trigger, where))
            paths.append(entry.path)
    return tuple(inputs), tuple(paths)


def _read_from(entry: Fields) -> JobOutput | DatasetName | None:
    if not entry.has("from"):
        entry.wrong("from", "is required: {job, output} or {dataset}")
    origin = entry.nested("from", {"job", "output", "dataset"})
    if origin is None:
        return None
    if origin.has("dataset"):
        for other in ("job", "output"):
            if origin.has(other):
                origin.wrong(other, "can't stand beside dataset")
        dataset = origin.string("dataset", pattern=DATASET_NAME)
        return DatasetName(dataset) if dataset is not None else None
    return read_job_output(origin)


def read_job_output(origin: Fields) -> JobOutput | None:
    job = origin.string("job")
    output = origin.integer("output", 0, low=0, high=MAX_OUTPUTS - 1)
    return JobOutput(job, output) if job is not None else None


def _read_where(entry: Fields) -> Where | None:
    node = entry.node("where")
    if node is None:
        return None
    try:
        return parse_where(plain(node))
    except Invalid as refused:
        entry.wrong("where", refused.message)
        return None


def _read_outputs(fields: Fields, operator: str) -> tuple[OutputDraft, ...]:
    path = fields.at("outputs")
    node = fields.node("outputs")
    if node is None:
        return tuple(OutputDraft(path) for _ in range(default_output_count(operator)))
    if not isinstance(node, Seq | Map):
        count = fields.integer("outputs", 0, low=0, high=MAX_OUTPUTS)
        return tuple(OutputDraft(path) for _ in range(count))
    if isinstance(node, Seq) and len(node.items) > MAX_OUTPUTS:
        fields.wrong("outputs", f"more than {MAX_OUTPUTS} outputs")
        return ()
    return tuple(
        OutputDraft(
            entry.path,
            entry.string("name", required=False, pattern=DATASET_NAME),
            entry.choice("storage", Storage),
        )
        for entry in fields.items("outputs", {"name", "storage"})
    )
