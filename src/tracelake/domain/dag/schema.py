"""JSON Schema of a DAG file, for editors.

It knows shapes and spellings; what needs the other jobs, the other DAGs or the installation is left to
``parse_dag``. Defaults are the model's own.
"""

from __future__ import annotations

import json
import re
import sys
from enum import StrEnum
from typing import Any

from tracelake.domain.dag.fields import MAX_COUNT, MAX_SECONDS, shown
from tracelake.domain.dag.job_fields import DATASET_NAME, JOB_NAME, MAX_OUTPUTS
from tracelake.domain.dag.model import (
    Activation,
    BackpressureMode,
    ColumnType,
    ExecutionStrategy,
    JobSettings,
    Priority,
    SourceKind,
    Storage,
    UpdateStrategy,
)
from tracelake.domain.dag.publish_fields import COLUMN_NAME, WriteMode
from tracelake.domain.operator_catalog import CATALOG, PLATFORM_OPERATORS

Schema = dict[str, Any]
DURATION_FORMS = " Seconds, or 30s, 10m, 2h, 1d."


def json_schema() -> Schema:
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
                    "items": _job(),
                    "description": "The jobs of the DAG.",
                },
                "publish": {
                    "type": ["object", "null"],
                    "description": "Datasets under names that every DAG can read.",
                    "propertyNames": {"pattern": shown(DATASET_NAME)},
                    "additionalProperties": {"oneOf": [_published_output(), _buffered()]},
                },
            },
            required=("name", "jobs"),
        ),
    }


def schema_text() -> str:
    """The schema as it stands in ``docs/dag.schema.json``."""
    return json.dumps(json_schema(), indent=2) + "\n"


def _job() -> Schema:
    return _object(
        "One job: an operator, what it reads and what it makes.",
        {
            "name": _name(JOB_NAME, "Unique within the DAG."),
            "activation": _choice(Activation, "source: starts by itself; reactive: runs when inputs change."),
            "runtime": _text("A runtime that the installation has registered, e.g. ecs_spark."),
            "operator": {
                **_text("What to run: a built-in operator, or the name of one's own."),
                "examples": sorted(CATALOG.keys() - PLATFORM_OPERATORS),
            },
            "source": _object(
                "How a source is kept going.",
                {
                    "kind": _choice(
                        SourceKind,
                        "always_on is kept running, manual waits for a trigger call; the others aren't served yet.",
                    )
                },
                required=("kind",),
            ),
            "inputs": {"type": ["array", "null"], "items": _input(), "description": "What the job reads."},
            "outputs": _outputs(),
            "execution_strategy": _choice(
                ExecutionStrategy,
                "PerUpdate: one task for all that is new; PerPartition: one each. Reactive jobs only.",
                default=ExecutionStrategy.PER_UPDATE,
            ),
            "update_strategy": _choice(
                UpdateStrategy,
                "replace rewrites a range; append adds rows and needs unique_key.",
                default=UpdateStrategy.REPLACE,
            ),
            "unique_key": _strings("Columns that make a row the same row; required for append."),
            "config": {"type": ["object", "null"], "description": "Settings of the operator."},
            "secrets": _strings("Names of secrets for the operator's environment; refused for UDF jobs."),
            "udf": _object(
                "User code for runtime: lambda: a bundle and where it starts.",
                {
                    "bundle": _text(
                        "Reference of the bundle: sha256:…, as `tracelake bundle push` prints it."
                    ),
                    "entrypoint": _text("Where it starts: module.function, as in AWS Lambda."),
                },
                required=("bundle", "entrypoint"),
            ),
            **_settings(),
        },
        required=("name", "activation"),
    )


def _settings() -> dict[str, Schema]:
    usual = JobSettings()
    return {
        "max_attempts": _count("Claims before a task fails for good.", 1, 1000, default=usual.max_attempts),
        "timeout_seconds": _duration("Longest run of one attempt.", default=usual.timeout_seconds),
        "heartbeat_timeout_seconds": _duration(
            "Lease: silence after which an attempt is lost.", default=usual.heartbeat_timeout_seconds
        ),
        "priority": _choice(
            Priority, "For backpressure: bulk is held first. No effect yet.", default=usual.priority
        ),
        "scaling": _object(
            "Limits on running tasks.", {"max_concurrency": _count("Most tasks running at a time.", 1)}
        ),
        "max_queue_depth": _count("Waiting tasks beyond which to pause producers. No effect yet.", 1),
        "max_queue_age": _duration("Age of a waiting task beyond which to pause producers. No effect yet."),
        "backpressure": _choice(
            BackpressureMode,
            "What a full queue does to producers. No effect yet.",
            default=usual.backpressure,
        ),
        "retry": _object(
            "Backoff between attempts: min(max, base * 2^n), with jitter.",
            {
                "base": _duration("First wait.", 0, default=usual.retry_base_seconds),
                "max": _duration("Longest wait.", 0, default=usual.retry_max_seconds),
            },
        ),
        "idle_timeout": _duration(
            "A worker that may end when idle stays at least so long after a task of this job."
        ),
    }


def _input() -> Schema:
    scalar = {
        "type": ["string", "number", "boolean", "null"],
        "minimum": -sys.float_info.max,
        "maximum": sys.float_info.max,
    }
    return _object(
        "One input edge.",
        {
            "from": {
                "description": "Where the rows come from.",
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
                "description": "false: read as it is, wait for nothing.",
                "default": True,
            },
            "where": {
                "description": (
                    "Rows to read: a predicate like severity = 'critical', or a map of columns to values."
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
            },
        },
        required=("from",),
        nullable=False,
    )


def _outputs() -> Schema:
    entry = _object(
        "One output.",
        {
            "name": {**_name(DATASET_NAME, "Part of its file names."), "type": ["string", "null"]},
            "storage": _choice(Storage, "none: the event is all there is."),
        },
        nullable=False,
    )
    return {
        "description": "How many outputs, or one entry each; the operator's own defaults hold otherwise.",
        "anyOf": [
            {"type": ["integer", "null"], "minimum": 0, "maximum": MAX_OUTPUTS},
            {"type": "array", "maxItems": MAX_OUTPUTS, "items": entry},
        ],
    }


def _output_of(description: str) -> Schema:
    return _object(
        description,
        {
            "job": _text("Name of the job."),
            "output": _count("Index of the output.", 0, MAX_OUTPUTS - 1, default=0),
        },
        required=("job",),
        nullable=False,
    )


def _published_output() -> Schema:
    return _object(
        "A job's output under a name.",
        {"from": _output_of("The output.")},
        required=("from",),
        nullable=False,
    )


def _buffered() -> Schema:
    return _object(
        "A dataset that jobs publish records to and the platform writes.",
        {
            "storage": {"const": Storage.POSTGRES.value, "description": "Where the rows are kept."},
            "write_mode": _choice(WriteMode, "Records go through a durable buffer."),
            "schema": _object(
                "Columns, and what makes a record the same record.",
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
    description: str, properties: dict[str, Schema], required: tuple[str, ...] = (), *, nullable: bool = True
) -> Schema:
    return {
        "type": ["object", "null"] if nullable else "object",
        "description": description,
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def _name(pattern: re.Pattern[str], description: str) -> Schema:
    return {"type": "string", "pattern": shown(pattern), "description": description}


def _text(description: str) -> Schema:
    return {"type": ["string", "null"], "minLength": 1, "maxLength": 2048, "description": description}


def _strings(description: str) -> Schema:
    one = {"type": "string", "minLength": 1, "maxLength": 256}
    many = {"type": "array", "items": one, "uniqueItems": True}
    return {"anyOf": [{**one, "type": ["string", "null"]}, many], "description": description}


def _choice(kind: type[StrEnum], description: str, *, default: StrEnum | None = None) -> Schema:
    choice: Schema = {"enum": [*[member.value for member in kind], None], "description": description}
    return choice if default is None else {**choice, "default": default.value}


def _count(description: str, low: int, high: int = MAX_COUNT, *, default: int | None = None) -> Schema:
    count: Schema = {
        "type": ["integer", "null"],
        "minimum": low,
        "maximum": high,
        "description": description,
    }
    return count if default is None else {**count, "default": default}


def _duration(description: str, low: int = 1, *, default: int | None = None) -> Schema:
    duration: Schema = {
        "description": f"{description}{DURATION_FORMS}",
        "anyOf": [
            {"type": ["integer", "null"], "minimum": low, "maximum": MAX_SECONDS},
            {"type": "string", "pattern": "^[0-9]{1,9}[smhd]$"},
        ],
    }
    return duration if default is None else {**duration, "default": default}
