"""The wire models of buffered datasets: publish requests, the messages of a dataset's queue, and the sink's calls.

A message is complete: the sink needs nothing else to write it, and writing it twice has the effect of once.
Messages may arrive in any order. A batch whose records don't fit a message names an object with the same JSON array
instead.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from msgspec import UNSET, Meta, Raw, Struct, UnsetType, field

from tracelake.contracts.dispatcher_api import Attempt, ShortText
from tracelake.contracts.manifest import Count
from tracelake.domain.buffers import BufferSchema

PUBLISH_PATH = "/v1/task/buffer-publish"
BUFFER_SCHEMA_PATH = "/internal/buffer-schema"
DEAD_LETTER_PATH = "/internal/buffer-dead-letter"
#: Maximum size of a publish, inline or by ``batch_uri``.
MAX_BATCH_BYTES = 16 * 1024 * 1024

#: The queue of wake-ups for sink tasks.
SINK_QUEUE = "sink"


def buffer_queue(dataset_uuid: UUID) -> str:
    """The queue that a buffered dataset's messages wait in."""
    return f"buffer-{dataset_uuid.hex}"


class BufferBatch(Struct, frozen=True, tag="batch", tag_field="kind", omit_defaults=True):
    """Records that one attempt published. ``records`` is a JSON array as text, or ``artifact`` is the object of
    one.

    ``producer`` is ``dag/job``. ``scope_start`` and ``scope_end`` are the block range of its task, null for a task
    without one; ``revision`` is the first revision of its job's generation plus the revisions of all inputs and
    outputs of the task.
    """

    batch_id: UUID
    dataset_uuid: UUID
    dataset_version: UUID
    schema_hash: str
    producer: str
    task_id: UUID
    attempt: int
    revision: int
    row_count: int
    scope_start: int | None = None
    scope_end: int | None = None
    records: str | None = None
    artifact: str | None = None


class BufferRetract(Struct, frozen=True, tag="retract", tag_field="kind", omit_defaults=True):
    """A task that ran because of an invalidation has published all valid rows of its scope: the producer's rows in
    the scope with a lower revision are marked retracted."""

    batch_id: UUID
    dataset_uuid: UUID
    dataset_version: UUID
    producer: str
    task_id: UUID
    attempt: int
    revision: int
    scope_start: int
    scope_end: int


#: The body of a queue's message: ``msgspec.convert(body, BufferMessage)``.
BufferMessage = BufferBatch | BufferRetract


class SinkConfig(Struct, frozen=True):
    """The ``config`` of a sink task's payload, as it was at the claim."""

    dataset: str
    org_id: str
    schema_hash: str
    schema: BufferSchema


class BufferSchemaQuery(Struct, frozen=True, forbid_unknown_fields=True):
    dataset_uuid: UUID


class BufferSchemaResponse(Struct, frozen=True):
    """``GET /internal/buffer-schema``: the schema as it is deployed now."""

    dataset_uuid: UUID
    dataset_version: UUID
    dataset: str | None
    schema_hash: str
    schema: BufferSchema


class DeadLetterRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /internal/buffer-dead-letter``, by the sink task's current attempt. ``message`` is the whole queue
    body. The same message again (by its ``batch_id``) is the same dead letter."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    dataset_uuid: UUID
    message: dict[str, Any]
    reason: Annotated[str, Meta(min_length=1, max_length=4000)]
    tries: Count


class DeadLetterResponse(Struct, frozen=True):
    dead_letter_id: int


#: Raw JSON: it is decoded by the dataset's schema, once that is known.
Records = Annotated[Raw, Meta(extra_json_schema={"type": "array", "items": {"type": "object"}})]


class BufferPublishRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``POST /v1/task/buffer-publish``. The dataset is given by uuid or by name; the records inline or as an object
    below one of the token's write or scratch prefixes. A ``schema_hash`` that isn't the current one is refused."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    dataset_uuid: UUID | None = None
    dataset: ShortText | None = None
    schema_hash: Annotated[str, Meta(max_length=200)] | None = None
    records: Records = field(default_factory=Raw)
    batch_uri: Annotated[str, Meta(max_length=4096)] | None = None


class BufferPublishResponse(Struct, frozen=True):
    accepted: int
    batch_id: UUID


class BufferSummary(Struct, frozen=True):
    """A buffered dataset and its pending messages. ``undelivered`` messages are accepted and not in the queue yet;
    ``waiting`` and ``in_flight`` are the queue's, null if the queue is unavailable. ``position`` is the last row's.
    """

    dataset: str
    dataset_uuid: UUID
    dag_name: str
    published: bool
    schema_hash: str
    undelivered: int
    waiting: int | None
    in_flight: int | None
    oldest_age_seconds: float | None
    dead_letters: int
    position: int | None
    sink_task_id: UUID | None
    sink_status: str | None


class BufferPage(Struct, frozen=True):
    buffers: list[BufferSummary]


class BufferDetail(BufferSummary, frozen=True, kw_only=True):
    """``writers`` are the jobs that have published to it, as ``dag/job``."""

    schema: BufferSchema
    writers: list[str]


class DeadLetterSummary(Struct, frozen=True):
    """A message that the sink couldn't merge. ``kind`` is ``batch`` or ``retract``."""

    dead_letter_id: int
    dataset_uuid: UUID
    dataset: str | None
    batch_id: UUID
    kind: str
    producer: str
    row_count: int | None
    reason: str
    tries: int
    created_at: datetime


class DeadLetterQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100
    after: Annotated[int, Meta(ge=1, le=2**63 - 1)] | UnsetType = UNSET


class DeadLetterPage(Struct, frozen=True):
    """Oldest first; ``next`` is the ``after`` of the following page."""

    dead_letters: list[DeadLetterSummary]
    next: str | None


class DeadLetterDetail(DeadLetterSummary, frozen=True, kw_only=True):
    """With the whole message."""

    message: dict[str, Any]


# Without ids a replay means all, so an empty list is refused rather than guessed at.
DeadLetterIds = Annotated[list[Annotated[int, Meta(ge=1, le=2**63 - 1)]], Meta(min_length=1, max_length=1000)]


class ReplayDeadLetters(Struct, frozen=True, forbid_unknown_fields=True):
    """Without ids, all dead letters of the dataset."""

    dead_letter_ids: DeadLetterIds | None = None


class DropDeadLetters(Struct, frozen=True, forbid_unknown_fields=True):
    """Drop these, or all of them with ``all``; a request without either drops nothing."""

    dead_letter_ids: DeadLetterIds | None = None
    all: bool = False


class DeadLettersReplayed(Struct, frozen=True):
    replayed: int


class DeadLettersDropped(Struct, frozen=True):
    dropped: int
