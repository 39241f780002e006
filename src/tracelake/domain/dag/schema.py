"""JSON Schema of a DAG file, for editors.

It checks shapes and spellings; checks that need the other jobs, the other DAGs or the installation are left to
``parse_dag``. Defaults are the model's own. The settings of built-in operators come from their declarations
(``domain.operators``), so that an editor can complete and check ``config``.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import msgspec

from tracelake.domain.dag.deliveries import DELIVERY_NAME, MAX_DELIVERIES, SECRET_NAME
from tracelake.domain.dag.entries import COLUMN_NAME, DATASET_NAME, JOB_NAME, MAX_OUTPUTS, WriteMode
from tracelake.domain.dag.fields import MAX_COUNT, MAX_SECONDS, shown
from tracelake.domain.dag.model import (
    Activation,
    BackpressureMode,
    CatchUp,
    ColumnType,
    DeliveryTime,
    ExecutionStrategy,
    JobSettings,
    Priority,
    Signature,
    SourceKind,
    Storage,
    UpdateStrategy,
)
from tracelake.domain.operators.catalog import CATALOG
from tracelake.domain.operators.spec import OperatorSpec

JsonSchema = dict[str, Any]
_NAMED = tuple(spec for spec in CATALOG.values() if not spec.platform)
DURATION_FORMS = " Seconds, or 30s, 10m, 2h, 1d."
_LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
_LINK_ALONE = re.compile(r" \(\[[^\]]+\]\([^)]*\)\)")


def json_schema() -> JsonSchema:
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tracelake DAG",
        **_object(
            "Jobs, how they feed each other, and the datasets they publish.",
            {
                "name": _name(JOB_NAME, "Name of the DAG; a deploy replaces the version of that name."),
                "defaults": _object(
                    "Settings that hold for every job that does not say otherwise.",
                    {"runtime": _text("Runtime of jobs that name none."), **_settings()},
                ),
                "jobs": {
                    "type": "array",
                    "minItems": 1,
                    "items": {**_job(), "allOf": [_config_of(spec) for spec in _NAMED if spec.settings]},
                    "description": "The jobs of the DAG.",
                },
                "publish": {
                    "type": ["object", "null"],
                    "description": "Datasets under names that every DAG can read.",
                    "propertyNames": {"pattern": shown(DATASET_NAME)},
                    "additionalProperties": {"oneOf": [_published_output(), _buffered()]},
                },
                "deliver": {
                    "type": ["array", "null"],
                    "items": _delivery(),
                    "maxItems": MAX_DELIVERIES,
                    "description": "Rows of buffered datasets that are sent to people and machines.",
                },
            },
            required=("name", "jobs"),
        ),
    }


def schema_text() -> str:
    """The text of ``docs/dag.schema.json``."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _job() -> JsonSchema:
    return _object(
        "An operator with its inputs and outputs.",
        {
            "name": _name(JOB_NAME, "Unique within the DAG."),
            "activation": _choice(Activation, "source: starts by itself; reactive: runs when inputs change."),
            "runtime": _text(
                "A runtime that the installation has registered and the operator runs on, e.g. ecs_spark."
            ),
            "operator": {
                **_text("Operator: built-in or custom."),
                "examples": sorted(spec.name for spec in _NAMED),
            },
            "source": _object(
                "How a source is activated.",
                {
                    "kind": _choice(
                        SourceKind,
                        "always_on is kept running; cron follows a schedule; webhook and manual wait to be called.",
                    ),
                    "schedule": _text("Five fields in the form of cron; required for kind: cron."),
                    "timezone": _text("Time zone of the schedule, e.g. Europe/Berlin; UTC if not given."),
                    "catch_up": _choice(
                        CatchUp,
                        "Ticks that an outage missed: the latest, all, or none.",
                        default=CatchUp.LATEST,
                    ),
                    "signature": _choice(
                        Signature,
                        "For kind: webhook. How its caller proves that it knows the secret.",
                        default=Signature.STANDARD,
                    ),
                },
                required=("kind",),
            ),
            "inputs": {"type": ["array", "null"], "items": _input(), "description": "Inputs of the job."},
            "outputs": _outputs(),
            "execution_strategy": _choice(
                ExecutionStrategy,
                "PerUpdate: one task for all new data; PerPartition: one per range. Reactive jobs only.",
                default=ExecutionStrategy.PER_UPDATE,
            ),
            "update_strategy": _choice(
                UpdateStrategy,
                "replace rewrites a range; append adds rows and needs unique_key.",
                default=UpdateStrategy.REPLACE,
            ),
            "unique_key": _strings("Columns that identify a row; required for append."),
            "config": {"type": ["object", "null"], "description": "Settings of the operator."},
            "secrets": _strings("Names of secrets for the operator's environment; refused for UDF jobs."),
            "udf": _object(
                "User code for runtime: lambda: a bundle and its entrypoint.",
                {
                    "bundle": _text(
                        "Reference of the bundle: sha256:…, as `tracelake bundle push` prints it."
                    ),
                    "entrypoint": _text("Handler: module.function, as in AWS Lambda."),
                },
                required=("bundle", "entrypoint"),
            ),
            **_settings(),
        },
        required=("name", "activation"),
    )


def _config_of(spec: OperatorSpec[Any]) -> JsonSchema:
    """The settings of a built-in operator, for jobs that name it."""
    made = msgspec.json.schema(spec.config)["$defs"][spec.config.__name__]
    fields = {field.name: field for field in spec.settings}
    properties = {
        name: _described(inner, fields[name].setting.about) for name, inner in made["properties"].items()
    }
    config = {
        "type": ["object", "null"],
        "description": _without_links(spec.about),
        "properties": properties,
        "required": made["required"],
        "additionalProperties": not spec.refuses_unknown,
    }
    return {
        "if": {"properties": {"operator": {"const": spec.name}}, "required": ["operator"]},
        "then": {"properties": {"config": config}},
    }


def _described(field: Mapping[str, Any], about: str) -> JsonSchema:
    default = {"default": field["default"]} if field.get("default") is not None else {}
    rest = {key: value for key, value in field.items() if key != "default"}
    return {"description": _without_links(about), **rest, **default}


def _without_links(markdown: str) -> str:
    """Plain text: editors don't render Markdown, and relative links of the reference page wouldn't work there."""
    return _LINK.sub(r"\1", _LINK_ALONE.sub("", markdown))


def _settings() -> dict[str, JsonSchema]:
    usual = JobSettings()
    return {
        "max_attempts": _count(
            "Maximum number of attempts before a task fails.", 1, 1000, default=usual.max_attempts
        ),
        "timeout_seconds": _duration("Maximum duration of one attempt.", default=usual.timeout_seconds),
        "heartbeat_timeout_seconds": _duration(
            "Lease duration: maximum time without a heartbeat before the attempt expires.",
            default=usual.heartbeat_timeout_seconds,
        ),
        "priority": _choice(
            Priority, "Bulk waits behind normal work and is held first.", default=usual.priority
        ),
        "scaling": _object(
            "Limits on running tasks.", {"max_concurrency": _count("Maximum number of running tasks.", 1)}
        ),
        "max_queue_depth": _count("Waiting tasks from which on all producers upstream are held.", 1),
        "max_queue_age": _duration("Age of a waiting task from which on all producers upstream are held."),
        "backpressure": _choice(
            BackpressureMode,
            "Producers when the queue is full: held, until it is half empty.",
            default=usual.backpressure,
        ),
        "retry": _object(
            "Backoff between attempts: min(max, base * 2^n), with jitter.",
            {
                "base": _duration("First wait.", 0, default=usual.retry_base_seconds),
                "max": _duration("Maximum wait.", 0, default=usual.retry_max_seconds),
            },
        ),
        "idle_timeout": _duration("Minimum idle timeout of workers after a task of this job."),
    }


def _where(more: str = "") -> JsonSchema:
    scalar = {
        "type": ["string", "number", "boolean", "null"],
        "minimum": -sys.float_info.max,
        "maximum": sys.float_info.max,
    }
    return {
        "description": (
            "Rows to read: a predicate like severity = 'critical', or a map of columns to values." + more
        ),
        "anyOf": [
            {"type": ["string", "null"]},
            {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {
                    "anyOf": [scalar, {"type": "array", "minItems": 1, "items": scalar}]
                },
            },
        ],
    }


def _input() -> JsonSchema:
    return _object(
        "One input edge.",
        {
            "from": {
                "description": "Source of the rows.",
                "oneOf": [
                    _output_of("An output of a job of this DAG."),
                    _object(
                        "A published dataset of any DAG.",
                        {"dataset": _name(DATASET_NAME, "Its name.")},
                        required=("dataset",),
                        nullable=False,
                    ),
                ],
            },
            "trigger": {
                "type": ["boolean", "null"],
                "description": "false: read the committed state without triggering tasks.",
                "default": True,
            },
            "where": _where(
                " A PerPartition job gets no task for a partition that provably has no such row if its"
                " outputs all have storage none and trigger no job; any other job gets one, and reads"
                " no row (ADR 34)."
            ),
        },
        required=("from",),
        nullable=False,
    )


def _outputs() -> JsonSchema:
    entry = _object(
        "One output.",
        {
            "name": {**_name(DATASET_NAME, "Part of its file names."), "type": ["string", "null"]},
            "storage": _choice(Storage, "none: events only, no rows."),
        },
        nullable=False,
    )
    return {
        "description": "Number of outputs, or one entry per output; the default is the operator's.",
        "anyOf": [
            {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_OUTPUTS},
            {"type": "array", "maxItems": MAX_OUTPUTS, "items": entry},
        ],
    }


def _output_of(description: str) -> JsonSchema:
    return _object(
        description,
        {
            "job": _text("Name of the job."),
            "output": _count("Index of the output.", 0, MAX_OUTPUTS - 1, default=0),
        },
        required=("job",),
        nullable=False,
    )


def _published_output() -> JsonSchema:
    return _object(
        "A job's output under a name.",
        {"from": _output_of("The output.")},
        required=("from",),
        nullable=False,
    )


def _delivery() -> JsonSchema:
    def secret(about: str) -> JsonSchema:
        return {"type": "string", "pattern": shown(SECRET_NAME), "description": about}

    webhook = _object(
        "A POST of JSON, with the headers of Standard Webhooks.",
        {
            "url_secret": secret("Name of the secret with the address."),
            "signing_secret": {
                **secret("Name of the secret that messages are signed with."),
                "type": ["string", "null"],
            },
        },
        required=("url_secret",),
        nullable=False,
    )
    slack = _object(
        "A message in a channel.",
        {"url_secret": secret("Name of the secret with the incoming webhook's address.")},
        required=("url_secret",),
        nullable=False,
    )
    email = _object(
        "A mail.",
        {
            "smtp_secret": secret("Name of the secret with the mail server, smtps://user:password@host."),
            "from": _text("Address of the sender."),
            "to": _strings("Addresses of the recipients."),
        },
        required=("smtp_secret", "from", "to"),
        nullable=False,
    )
    targets = {"webhook": webhook, "slack": slack, "email": email}
    return _object(
        "Sends the rows of one dataset to one receiver.",
        {
            "name": _name(DELIVERY_NAME, "Unique within the DAG."),
            "from": _object(
                "Source of the rows.",
                {"dataset": _name(DATASET_NAME, "A buffered dataset of any DAG.")},
                required=("dataset",),
                nullable=False,
            ),
            "where": _where(),
            "to": {
                **_object("The receiver: exactly one.", targets, nullable=False),
                "minProperties": 1,
                "maxProperties": 1,
            },
            "when": _choice(
                DeliveryTime,
                "instant: when the row is committed; finalized: when its block is final.",
                default=DeliveryTime.INSTANT,
            ),
            "template": _text("Text of a message: {{column}}, or {{column.key}} in JSON."),
            "key": _text("A column: rows with the same value are sent in order."),
        },
        required=("name", "from", "to"),
        nullable=False,
    )


def _buffered() -> JsonSchema:
    return _object(
        "A dataset that jobs publish records to and the platform writes.",
        {
            "storage": {"const": Storage.POSTGRES.value, "description": "Storage of the rows."},
            "write_mode": _choice(WriteMode, "Records go through a durable buffer."),
            "schema": _object(
                "Columns and unique key.",
                {
                    "columns": {
                        "type": "object",
                        "minProperties": 1,
                        "propertyNames": {"pattern": shown(COLUMN_NAME)},
                        "additionalProperties": {"enum": [kind.value for kind in ColumnType]},
                        "description": "Names and types.",
                    },
                    "unique": _strings("Columns of the dataset's key."),
                },
                required=("columns", "unique"),
                nullable=False,
            ),
        },
        required=("storage", "write_mode", "schema"),
        nullable=False,
    )


def _object(
    description: str,
    properties: dict[str, JsonSchema],
    required: tuple[str, ...] = (),
    *,
    nullable: bool = True,
) -> JsonSchema:
    return {
        "type": ["object", "null"] if nullable else "object",
        "description": description,
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _name(pattern: re.Pattern[str], description: str) -> JsonSchema:
    return {"type": "string", "pattern": shown(pattern), "description": description}


def _text(description: str) -> JsonSchema:
    return {"type": ["string", "null"], "minLength": 1, "maxLength": 2048, "description": description}


def _strings(description: str) -> JsonSchema:
    one = {"type": "string", "minLength": 1, "maxLength": 256}
    many = {"type": "array", "items": one, "uniqueItems": True}
    return {"anyOf": [{**one, "type": ["string", "null"]}, many], "description": description}


def _choice(kind: type[StrEnum], description: str, *, default: StrEnum | None = None) -> JsonSchema:
    choice: JsonSchema = {"enum": [*[member.value for member in kind], None], "description": description}
    return choice if default is None else {**choice, "default": default.value}


def _count(description: str, low: int, high: int = MAX_COUNT, *, default: int | None = None) -> JsonSchema:
    count: JsonSchema = {
        "type": ["integer", "null"],
        "minimum": low,
        "maximum": high,
        "description": description,
    }
    return count if default is None else {**count, "default": default}


def _duration(description: str, low: int = 1, *, default: int | None = None) -> JsonSchema:
    duration: JsonSchema = {
        "description": f"{description}{DURATION_FORMS}",
        "anyOf": [
            {"type": ["integer", "null"], "minimum": low, "maximum": MAX_SECONDS},
            {"type": "string", "pattern": "^[0-9]{1,9}[smhd]$"},
        ],
    }
    return duration if default is None else {**duration, "default": default}
