"""The Dispatcher's wire models: what workers, tasks and people send and get.

Requests refuse unknown fields, so that a misspelt one is an error and not a silent default; responses
may gain fields. Numbers are bounded to what the state database can hold, so a value out of range is
refused here, by name, and never reaches SQL.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.manifest import Manifest
from tracelake.domain.block_range import MAX_BLOCK

Block = Annotated[int, Meta(ge=0, le=MAX_BLOCK, description="A block number.")]
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Attempt = Annotated[int, Meta(ge=1, le=2**31 - 1, description="The attempt that the claim returned.")]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=64 * 1024)]

MAX_EVENTS = 1000
MAX_BATCH = 200
MAX_INPUT_FILES = 1000
MAX_PROGRESS_BYTES = 4 * 1024
MAX_STATE_BYTES = 64 * 1024
"""Both sizes are of compact JSON, as the Dispatcher itself would encode it."""

ProgressValue = str | int | float | bool | None
Progress = dict[Annotated[str, Meta(min_length=1, max_length=200)], ProgressValue]


class InvalidateRange(Struct, frozen=True, forbid_unknown_fields=True):
    """What an invalidation takes back: both ends inclusive."""

    start: Block
    end: Block


class EventIn(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One upstream event: an output and a scope.

    The output by ``dataset_uuid`` and ``dataset_version``, or by the published name in ``dataset``. The
    scope by ``cursor``, by ``start``/``end`` (``partition_key``), or as an invalidation by ``id`` and
    ``invalidate``. ``revision`` is the revision of the dataset that the producer worked on: an event of
    an older one is kept but does not count. ``finalized`` is the chain's finalized block, for sources.
    """

    dataset_uuid: UUID | None = None
    dataset_version: UUID | None = None
    dataset: Name | None = None
    cursor: Block | None = None
    partition_key: Annotated[str, Meta(max_length=64)] | None = None
    start: Block | None = None
    end: Block | None = None
    revision: Count | None = None
    finalized: Block | None = None
    id: Name | None = None
    invalidate: InvalidateRange | None = None
    reason: Annotated[str, Meta(max_length=1000)] | None = None


Events = Annotated[list[EventIn], Meta(max_length=MAX_EVENTS)]


class ClaimRequest(Struct, frozen=True, forbid_unknown_fields=True):
    task_id: UUID
    worker_id: Name
    claim_key: Name | None = None


class ClaimBatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Several claims by one worker in one call; each succeeds or not on its own."""

    claims: Annotated[list[ClaimRequest], Meta(min_length=1, max_length=MAX_BATCH)]


class JobRef(Struct, frozen=True):
    dag_name: str
    name: str


class PayloadInvalidation(Struct, frozen=True):
    start: int
    end: int
    revision: int
    reason: str | None = None


class PayloadHot(Struct, frozen=True):
    """The rows of a compacted input that are still, or only, in Postgres: the version that its files are made of.
    A reader takes those of blocks that no committed file holds, and looks at them before it asks for the files."""

    dataset_version: UUID
    revision: int


class PayloadInput(Struct, frozen=True):
    """An input as the attempt must read it, frozen at the claim.

    ``hot`` goes with a compacted dataset that doesn't trigger, and is read whatever the compaction is doing.

    ``cursor_column`` is the column that ``after`` and ``upto`` count, where that isn't the block number: the
    ``position`` of a buffered dataset.

    ``as_of`` goes with a range that comes from partitions: the last one that anybody had committed by then. It is
    the Dispatcher's own, to know at the end what came into the range meanwhile."""

    input_index: int
    dataset_uuid: UUID
    dataset_version: UUID
    revision: int
    dataset: str | None
    storage: str
    trigger: bool = True
    after: int | UnsetType = UNSET
    upto: int | UnsetType = UNSET
    as_of: int | UnsetType = UNSET
    finalized: int | UnsetType = UNSET
    partition_key: str | UnsetType = UNSET
    start: int | UnsetType = UNSET
    end: int | UnsetType = UNSET
    where: str | None = None
    where_tree: Any = None
    invalidation: PayloadInvalidation | None = None
    hot: PayloadHot | None = None
    cursor_column: str | None = None


class PayloadWritten(Struct, frozen=True):
    """How far an always-on source had come with an output at the claim, as the platform knows it. ``taken_back`` is
    what others than its own task have invalidated and it hasn't written again since."""

    cursor: int | None = None
    finalized: int | None = None
    taken_back: list[InvalidateRange] = []


class PayloadOutput(Struct, frozen=True):
    """``written`` is there for a source, which has no inputs that would say where it stands."""

    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    revision: int
    dataset: str | None = None
    staging: str | None = None
    written: PayloadWritten | None = None


class TaskPayload(Struct, frozen=True):
    """What a claim returns and what a function is invoked with.

    ``state`` is what an earlier attempt of the same task saved, null if none did or if an input was taken back
    since. ``idle_timeout_seconds`` is the job's own, null when the worker's holds.
    """

    task_id: UUID
    attempt: int
    epoch: int | None
    job: JobRef
    operator: str
    config: dict[str, Any]
    inputs: list[PayloadInput]
    outputs: list[PayloadOutput]
    runtime: str
    timeout_seconds: int
    heartbeat_timeout_seconds: int
    update_strategy: str
    unique_key: list[str]
    secrets: list[str]
    udf: Any = None
    state: Any = None
    idle_timeout_seconds: int | None = None


NotClaimedReason = Literal["AlreadyRunning", "Completed", "Canceled", "NotFound", "Failed", "NotReady"]


class ClaimResponse(Struct, frozen=True, omit_defaults=True):
    """``Claimed`` with a lease and the payload, or ``NotClaimed`` with a reason."""

    status: Literal["Claimed", "NotClaimed"]
    task_id: UUID
    reason: NotClaimedReason | None = None
    attempt: int | None = None
    lease_token: UUID | None = None
    lease_expires_at: datetime | None = None
    capability_token: str | None = None
    task: TaskPayload | None = None


class ClaimBatchResponse(Struct, frozen=True):
    claims: list[ClaimResponse]


class FetchResponse(Struct, frozen=True):
    status: str
    task_id: UUID
    attempt: int
    task: TaskPayload


class HeartbeatRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``progress`` takes the place of what the attempt reported before; without it, that stays. Flat, and at most
    ``MAX_PROGRESS_BYTES``."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    progress: Progress | None = None


class HeartbeatResponse(Struct, frozen=True):
    lease_expires_at: datetime | None
    cancel: bool
    pause: bool
    capability_token: str | None = None


class TaskStateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``state`` is any JSON of at most ``MAX_STATE_BYTES``; null forgets what was saved."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    state: Any


class TaskStateResponse(Struct, frozen=True):
    task_id: UUID
    attempt: int


class TaskInputsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``after`` is a page's ``next``."""

    task_id: UUID
    attempt: Attempt
    input_index: Annotated[int, Meta(ge=0, le=1000)]
    after: Annotated[str, Meta(pattern=r"\A[0-9]{1,18}-[0-9]{1,9}\Z")] | UnsetType = UNSET


class InputFile(Struct, frozen=True):
    """A committed file. ``start`` and ``end`` are its partition's and may reach beyond what the attempt reads:
    the reader filters. ``rows``, ``min_block`` and ``max_block`` are null where its writer didn't tell."""

    location: str
    rows: int | None
    bytes: int
    start: int
    end: int
    min_block: int | None = None
    max_block: int | None = None


class TaskInputsResponse(Struct, frozen=True):
    """One page of an input's committed files, by block. Only Parquet has files: for another ``storage`` there are
    none, and that says nothing about its rows."""

    storage: str
    files: list[InputFile]
    next: str | None = None


class OutputIn(Struct, frozen=True, forbid_unknown_fields=True):
    """One materialized output of a completed task."""

    output_index: Annotated[int, Meta(ge=0, le=1000)]
    dataset_uuid: UUID | None = None
    dataset_version: UUID | None = None
    dataset: Name | None = None
    location: Annotated[str, Meta(max_length=4096)] | None = None
    row_count: Count | None = None
    cursor: Block | None = None
    partition_key: Annotated[str, Meta(max_length=64)] | None = None
    start: Block | None = None
    end: Block | None = None
    manifest: Manifest | None = None


CompletionStatus = Literal["Completed", "Failed", "Canceled", "Released"]


class CompleteRequest(Struct, frozen=True, forbid_unknown_fields=True):
    task_id: UUID
    status: CompletionStatus
    attempt: Attempt | None = None
    lease_token: UUID | None = None
    outputs: Annotated[list[OutputIn], Meta(max_length=MAX_EVENTS)] = []
    events: Events = []
    error_message: Text | None = None
    retryable: bool = True


class CompleteBatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Several completions in one call; each is accepted or refused on its own."""

    completions: Annotated[list[CompleteRequest], Meta(min_length=1, max_length=MAX_BATCH)]


class CompleteResponse(Struct, frozen=True):
    """The answer to a completion; a repeat of the same completion is answered the same."""

    task_id: UUID
    status: CompletionStatus
    attempt: int | None = None
    task_status: str = ""
    retry_at: datetime | None = None


class BatchAnswer(Struct, frozen=True):
    """What became of one completion of a batch: ``code`` is what its single call would have answered with,
    and either ``accepted`` or ``reason`` and ``detail`` say the rest."""

    task_id: UUID
    code: int
    accepted: CompleteResponse | None = None
    reason: str | None = None
    detail: str | None = None


class CompleteBatchResponse(Struct, frozen=True):
    completions: list[BatchAnswer]


class EventsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    task_id: UUID
    attempt: Attempt
    events: Annotated[list[EventIn], Meta(min_length=1, max_length=MAX_EVENTS)]
    lease_token: UUID | None = None


class EventOut(Struct, frozen=True):
    """What became of one event: ``counted`` now, ``pending`` until the completion commits its scope,
    ``old_version`` or ``old_revision`` when it is only kept for audit."""

    event_id: int
    state: Literal["counted", "pending", "old_version", "old_revision"]
    revision: int


class EventsResponse(Struct, frozen=True):
    events: list[EventOut]
    tasks_created: int


class TriggerRequest(Struct, frozen=True, forbid_unknown_fields=True):
    cursor: Block | None = None
    start: Block | None = None
    end: Block | None = None


class TriggerResponse(Struct, frozen=True):
    event_id: int
    tasks_created: int
