"""The model of a valid DAG file.

A ``DagSpec`` is complete: defaults are applied, names and storages of outputs are filled in, so its users need
neither the operator catalog nor the YAML. Every type is frozen and survives ``msgspec.json`` in both directions,
because the store keeps the spec of each version and decodes it when it plans the next one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from tracelake.domain.where import Where


class Activation(StrEnum):
    SOURCE = "source"
    REACTIVE = "reactive"


class SourceKind(StrEnum):
    ALWAYS_ON = "always_on"
    CRON = "cron"
    WEBHOOK = "webhook"
    MANUAL = "manual"


class CatchUp(StrEnum):
    """What happens to the ticks of a cron source that an outage missed."""

    LATEST = "latest"
    ALL = "all"
    NONE = "none"


class Signature(StrEnum):
    """How the caller of a webhook proves that it knows the secret."""

    STANDARD = "standard"
    GITHUB = "github"
    BEARER = "bearer"


class ExecutionStrategy(StrEnum):
    PER_UPDATE = "PerUpdate"
    PER_PARTITION = "PerPartition"


class UpdateStrategy(StrEnum):
    APPEND = "append"
    REPLACE = "replace"


class Storage(StrEnum):
    """The storage of an output's rows; ``none`` has only events."""

    PARQUET = "parquet"
    POSTGRES = "postgres"
    NONE = "none"


class Priority(StrEnum):
    NORMAL = "normal"
    BULK = "bulk"


class BackpressureMode(StrEnum):
    PAUSE = "pause"


class ColumnType(StrEnum):
    TEXT = "text"
    BIGINT = "bigint"
    INTEGER = "integer"
    NUMERIC = "numeric"
    BOOLEAN = "boolean"
    TIMESTAMPTZ = "timestamptz"
    JSONB = "jsonb"
    BYTEA = "bytea"
    DOUBLE = "double"
    UUID = "uuid"


class JobOutput(msgspec.Struct, frozen=True, tag="job"):
    """An output of a job of the same DAG."""

    job: str
    output: int


class DatasetName(msgspec.Struct, frozen=True, tag="dataset"):
    """A published dataset of any DAG, this one included."""

    dataset: str


class InputSpec(msgspec.Struct, frozen=True):
    source: JobOutput | DatasetName
    trigger: bool = True
    where: Where | None = None


class OutputSpec(msgspec.Struct, frozen=True):
    index: int
    name: str
    storage: Storage


class UdfSpec(msgspec.Struct, frozen=True):
    bundle: str
    entrypoint: str


class CronSettings(msgspec.Struct, frozen=True, tag="cron"):
    schedule: str
    timezone: str = "UTC"
    catch_up: CatchUp = CatchUp.LATEST


class WebhookSettings(msgspec.Struct, frozen=True, tag="webhook"):
    signature: Signature = Signature.STANDARD


SourceSettings = CronSettings | WebhookSettings
"""When a source is activated, or by whom. No setting changes what a tick or a delivery makes, so a change keeps
its dataset versions."""


class JobSettings(msgspec.Struct, frozen=True):
    """How a job is run. No setting changes the job's rows, so a change keeps its dataset versions."""

    max_attempts: int = 3
    timeout_seconds: int = 600
    heartbeat_timeout_seconds: int = 120
    priority: Priority = Priority.NORMAL
    max_concurrency: int | None = None
    max_queue_depth: int | None = None
    max_queue_age_seconds: int | None = None
    backpressure: BackpressureMode = BackpressureMode.PAUSE
    retry_base_seconds: int = 30
    retry_max_seconds: int = 600
    idle_timeout_seconds: int | None = None


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    activation: Activation
    runtime: str
    operator: str
    source_kind: SourceKind | None = None
    source: SourceSettings | None = None
    runs_code: bool = False
    """A source of which each tick, delivery or trigger is a task. Without code it is an event on output 0."""
    inputs: tuple[InputSpec, ...] = ()
    outputs: tuple[OutputSpec, ...] = ()
    execution_strategy: ExecutionStrategy | None = None
    update_strategy: UpdateStrategy = UpdateStrategy.REPLACE
    unique_key: tuple[str, ...] = ()
    config: dict[str, Any] = {}
    secrets: tuple[str, ...] = ()
    udf: UdfSpec | None = None
    settings: JobSettings = JobSettings()


def is_requested(job: JobSpec) -> bool:
    """Whether the job is a source that is activated from outside: by a tick, a delivery or a trigger."""
    return job.source_kind not in (None, SourceKind.ALWAYS_ON)


class PublishedOutput(msgspec.Struct, frozen=True, tag="output"):
    """A job's output under a name that every DAG can read."""

    name: str
    job: str
    output: int


class Column(msgspec.Struct, frozen=True):
    name: str
    type: ColumnType


class BufferedDataset(msgspec.Struct, frozen=True, tag="buffered"):
    """A Postgres dataset that jobs publish records to and the platform's sink writes."""

    name: str
    columns: tuple[Column, ...]
    unique: tuple[str, ...]


class DeliveryTime(StrEnum):
    """When a row is sent: as soon as it is committed, or once its block is final."""

    INSTANT = "instant"
    FINALIZED = "finalized"


class WebhookTarget(msgspec.Struct, frozen=True, tag="webhook"):
    """``signing_secret`` None: messages aren't signed."""

    url_secret: str
    signing_secret: str | None = None


class SlackTarget(msgspec.Struct, frozen=True, tag="slack"):
    url_secret: str


class EmailTarget(msgspec.Struct, frozen=True, tag="email"):
    """``smtp_secret`` names the server's address with its login."""

    smtp_secret: str
    sender: str
    recipients: tuple[str, ...]


DeliveryTarget = WebhookTarget | SlackTarget | EmailTarget


class DeliverySpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a buffered dataset that are sent to a receiver. ``key`` is a column: rows with one value of it are
    sent in order; without it, those of one record."""

    name: str
    dataset: str
    to: DeliveryTarget
    where: Where | None = None
    when: DeliveryTime = DeliveryTime.INSTANT
    template: str | None = None
    key: str | None = None


class DagSpec(msgspec.Struct, frozen=True):
    name: str
    jobs: tuple[JobSpec, ...]
    publish: tuple[PublishedOutput | BufferedDataset, ...] = ()
    deliver: tuple[DeliverySpec, ...] = ()

    def job(self, name: str) -> JobSpec | None:
        return next((job for job in self.jobs if job.name == name), None)

    def published(self, name: str) -> PublishedOutput | BufferedDataset | None:
        return next((entry for entry in self.publish if entry.name == name), None)
