"""Reads the entries of a DAG file: a job to a draft of its ``JobSpec``, its settings, and ``publish``.

Only the entry itself is checked here; checks that need other jobs or the installation are in ``checks``. Outputs
have no names and storages until all jobs are read, because an operator may name its outputs after its inputs. The
settings of how a job is run are read alike in ``defaults`` and in a job. ``publish`` has outputs under a name, and
buffered datasets with their schema.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from tracelake.domain.dag.fields import Fields, did_you_mean, shown
from tracelake.domain.dag.model import (
    Activation,
    BackpressureMode,
    BufferedDataset,
    CatchUp,
    Column,
    ColumnType,
    CronSettings,
    DatasetName,
    ExecutionStrategy,
    InputSpec,
    JobOutput,
    JobSettings,
    JobSpec,
    Priority,
    PublishedOutput,
    Signature,
    SourceKind,
    SourceSettings,
    Storage,
    UdfSpec,
    UpdateStrategy,
    WebhookSettings,
)
from tracelake.domain.dag.problems import Map, Path, Seq, plain
from tracelake.domain.errors import Invalid
from tracelake.domain.operators.catalog import NOOP, UDF, complete_config, default_output_count
from tracelake.domain.runtimes import DISPATCHER, LAMBDA
from tracelake.domain.schedule import parse_schedule, parse_zone, zone_names
from tracelake.domain.where import Where
from tracelake.domain.where_parse import parse_where

SETTINGS_FIELDS = frozenset(
    {
        "max_attempts",
        "timeout_seconds",
        "heartbeat_timeout_seconds",
        "priority",
        "scaling",
        "max_queue_depth",
        "max_queue_age",
        "backpressure",
        "retry",
        "idle_timeout",
    }
)
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
# On a source that is nothing but its events they mean that its code was forgotten.
FIELDS_OF_CODE = ("config", "secrets", "idle_timeout", "unique_key")
CRON_FIELDS = frozenset({"schedule", "timezone", "catch_up"})
WEBHOOK_FIELDS = frozenset({"signature"})
SOURCE_FIELDS = frozenset({"kind"}) | CRON_FIELDS | WEBHOOK_FIELDS
#: Prefixes of the query engine's own relations: a dataset of such a name couldn't be queried.
THE_ENGINES = ("duckdb_", "pg_", "pragma_", "sqlite_")
COLUMN_NAME = re.compile(r"^[a-z_][a-z0-9_]{0,62}\Z")
MAX_COLUMNS = 500
BUFFERED_FIELDS = frozenset({"storage", "write_mode", "schema"})
PUBLISH_FIELDS = BUFFERED_FIELDS | {"from"}


def read_settings(fields: Fields, base: JobSettings) -> JobSettings:
    """``base``, overridden by the fields."""
    scaling = fields.nested("scaling", {"max_concurrency"})
    retry = fields.nested("retry", {"base", "max"})
    settings = JobSettings(
        max_attempts=fields.integer("max_attempts", base.max_attempts, low=1, high=1000),
        timeout_seconds=fields.seconds("timeout_seconds", base.timeout_seconds),
        heartbeat_timeout_seconds=fields.seconds("heartbeat_timeout_seconds", base.heartbeat_timeout_seconds),
        priority=fields.choice("priority", Priority) or base.priority,
        max_concurrency=(
            scaling.integer("max_concurrency", base.max_concurrency, low=1)
            if scaling
            else base.max_concurrency
        ),
        max_queue_depth=fields.integer("max_queue_depth", base.max_queue_depth, low=1),
        max_queue_age_seconds=fields.seconds("max_queue_age", base.max_queue_age_seconds),
        backpressure=fields.choice("backpressure", BackpressureMode) or base.backpressure,
        retry_base_seconds=(
            retry.seconds("base", base.retry_base_seconds, low=0) if retry else base.retry_base_seconds
        ),
        retry_max_seconds=(
            retry.seconds("max", base.retry_max_seconds, low=0) if retry else base.retry_max_seconds
        ),
        idle_timeout_seconds=fields.seconds("idle_timeout", base.idle_timeout_seconds),
    )
    if settings.retry_max_seconds < settings.retry_base_seconds:
        fields.wrong(
            "retry", f"max ({settings.retry_max_seconds}s) is below base ({settings.retry_base_seconds}s)"
        )
    return settings


@dataclass(frozen=True, slots=True)
class OutputDraft:
    path: Path
    name: str | None = None
    storage: Storage | None = None


@dataclass(frozen=True, slots=True)
class JobDraft:
    """A job as its own entry declares it; ``spec.outputs`` is still empty."""

    path: Path
    spec: JobSpec
    outputs: tuple[OutputDraft, ...]
    input_paths: tuple[Path, ...]


def read_job(fields: Fields, defaults: JobSettings, default_runtime: str | None) -> JobDraft:
    activation = _read_activation(fields)
    udf = _read_udf(fields)
    kind, source = _read_source(fields, activation)
    operator = _read_operator(fields, activation, kind, udf)
    runs_code = _runs_code(fields, kind, operator)
    # A source that is nothing but its events runs nowhere.
    if activation is Activation.SOURCE and kind not in (None, SourceKind.ALWAYS_ON) and not runs_code:
        default_runtime = default_runtime or DISPATCHER
        if kind is not SourceKind.MANUAL:
            _refuse_fields_of_code(fields, kind)
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
        source=source,
        runs_code=runs_code,
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
    # The likelier meaning, so that one mistake doesn't cause further messages.
    return chosen or (Activation.SOURCE if fields.has("source") else Activation.REACTIVE)


def _read_source(fields: Fields, activation: Activation) -> tuple[SourceKind | None, SourceSettings | None]:
    source = fields.nested("source", SOURCE_FIELDS)
    if activation is Activation.REACTIVE:
        if fields.has("source"):
            fields.wrong("source", "is for jobs with activation: source")
        return None, None
    if source is None:
        fields.wrong("source", "is required for a source: {kind: always_on, cron, webhook or manual}")
        return None, None
    if not source.has("kind"):
        source.wrong("kind", "is required: always_on, cron, webhook or manual")
    kind = source.choice("kind", SourceKind)
    # A kind that can't be read is one problem; fields of another kind are none of their own then.
    if kind is not None:
        own = {SourceKind.CRON: CRON_FIELDS, SourceKind.WEBHOOK: WEBHOOK_FIELDS}.get(kind, frozenset())
        for name in sorted(SOURCE_FIELDS - own - {"kind"}):
            if source.has(name):
                source.wrong(name, f"isn't for kind: {kind}")
    match kind:
        case SourceKind.CRON:
            return kind, _read_cron(source)
        case SourceKind.WEBHOOK:
            return kind, WebhookSettings(source.choice("signature", Signature) or Signature.STANDARD)
        case _:
            return kind, None


def _read_cron(source: Fields) -> CronSettings:
    schedule = source.string("schedule") or ""
    zone = source.string("timezone", required=False) or "UTC"
    known = True
    try:
        parse_zone(zone)
    except Invalid as refused:
        known = False
        near = [name for name in zone_names() if name[:1].lower() == zone[:1].lower()]
        source.wrong("timezone", f"{refused.message}{did_you_mean(zone, near)}")
    # Its problem, if it has none yet: fields keep the first one. Whether it fires may depend on the zone.
    if schedule:
        try:
            parse_schedule(schedule, zone if known else "UTC")
        except Invalid as refused:
            source.wrong("schedule", refused.message)
    return CronSettings(
        " ".join(schedule.split()), zone, source.choice("catch_up", CatchUp) or CatchUp.LATEST
    )


def _runs_code(fields: Fields, kind: SourceKind | None, operator: str) -> bool:
    """Whether each tick, delivery or trigger is a task. A manual source may name the no-op and still has only its
    events, as it always had."""
    if kind not in (SourceKind.CRON, SourceKind.WEBHOOK, SourceKind.MANUAL):
        return False
    if kind is SourceKind.MANUAL and operator == NOOP:
        return False
    return fields.has("operator") or fields.has("udf")


def _refuse_fields_of_code(fields: Fields, kind: SourceKind) -> None:
    """They would seem to do something; most likely the code was forgotten."""
    useless = [name for name in FIELDS_OF_CODE if fields.has(name)]
    if fields.has("runtime") and fields.string("runtime") == LAMBDA:
        useless.append("runtime")
    for name in useless:
        fields.wrong(
            name, f"has no effect on a {kind} source without code: name an operator or udf, or leave it out"
        )


def _read_operator(
    fields: Fields, activation: Activation, kind: SourceKind | None, udf: UdfSpec | None
) -> str:
    """Only an always-on source needs code. One whose kind is invalid may need none: it gets no second problem."""
    needs_none = activation is Activation.SOURCE and kind is not SourceKind.ALWAYS_ON
    optional = needs_none or fields.has("udf")
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
        where = read_where(entry)
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
                origin.wrong(other, "can't be given together with dataset")
        dataset = origin.string("dataset", pattern=DATASET_NAME)
        return DatasetName(dataset) if dataset is not None else None
    return read_job_output(origin)


def read_job_output(origin: Fields) -> JobOutput | None:
    job = origin.string("job")
    output = origin.integer("output", 0, low=0, high=MAX_OUTPUTS - 1)
    return JobOutput(job, output) if job is not None else None


def read_where(entry: Fields) -> Where | None:
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


class WriteMode(StrEnum):
    BUFFERED = "buffered"


@dataclass(frozen=True, slots=True)
class PublishDraft:
    path: Path
    entry: PublishedOutput | BufferedDataset


def read_publish(top: Fields) -> list[PublishDraft]:
    publish = top.nested("publish", _AnyName())
    if publish is None:
        return []
    drafts = []
    for name, _ in list(top.entries("publish")):
        if not DATASET_NAME.match(name):
            publish.wrong(name, f"dataset names match {shown(DATASET_NAME)}")
        if name.startswith(THE_ENGINES):
            publish.wrong(name, f"dataset names don't begin with {', '.join(THE_ENGINES)}")
        entry = publish.nested(name, PUBLISH_FIELDS)
        if entry is None:
            publish.wrong(name, "needs {from: {job, output}} or a buffered dataset's schema")
            continue
        found = _read_published(name, entry) if entry.has("from") else _read_buffered(name, entry)
        if found is not None:
            drafts.append(PublishDraft(entry.path, found))
    return drafts


class _AnyName(frozenset[str]):
    """Contains every name: the keys of ``publish`` and of ``columns`` are the author's own."""

    def __contains__(self, item: object) -> bool:
        return True


def _read_published(name: str, entry: Fields) -> PublishedOutput | None:
    for field in sorted(BUFFERED_FIELDS):
        if entry.has(field):
            entry.wrong(field, "can't be given together with from: the job's output declares it")
    origin = entry.nested("from", {"job", "output"})
    source = read_job_output(origin) if origin is not None else None
    return PublishedOutput(name, source.job, source.output) if source is not None else None


def _read_buffered(name: str, entry: Fields) -> BufferedDataset:
    storage = entry.choice("storage", Storage)
    if storage is None:
        entry.wrong("storage", "is required: postgres (or give from: {job, output})")
    elif storage is not Storage.POSTGRES:
        entry.wrong("storage", "a buffered dataset is stored in postgres")
    if entry.choice("write_mode", WriteMode) is None:
        entry.wrong("write_mode", "is required: buffered")
    schema = entry.nested("schema", {"columns", "unique"})
    if schema is None:
        entry.wrong("schema", "is required: {columns, unique}")
        # Empty rather than missing: inputs that name it needn't be reported as well.
        return BufferedDataset(name, (), ())
    columns = _read_columns(schema)
    unique = schema.strings("unique")
    if not unique:
        schema.wrong("unique", "is required: the columns that identify a record")
    for column in unique:
        if column not in {known.name for known in columns}:
            schema.wrong("unique", f"{column!r} is not among the columns")
    return BufferedDataset(name, columns, unique)


def _read_columns(schema: Fields) -> tuple[Column, ...]:
    columns = schema.nested("columns", _AnyName())
    if columns is None:
        schema.wrong("columns", "is required: a map of names to types")
        return ()
    found = []
    for name, _ in list(schema.entries("columns")):
        if not COLUMN_NAME.match(name):
            columns.wrong(name, f"column names match {shown(COLUMN_NAME)}")
        if not columns.has(name):
            columns.wrong(name, "needs a type")
        found.append(Column(name, columns.choice(name, ColumnType) or ColumnType.TEXT))
    if not found or len(found) > MAX_COLUMNS:
        schema.wrong("columns", f"must be 1 to {MAX_COLUMNS} columns")
    return tuple(found)
