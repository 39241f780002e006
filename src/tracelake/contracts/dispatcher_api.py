"""The Dispatcher's wire models: the requests of workers, tasks and people, and the answers.

Requests refuse unknown fields, so that a misspelt one is an error and not a silent default; responses may gain
fields. Numbers are bounded by what the state database can hold, so a value out of range is refused here, by name,
and never reaches SQL.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any, Literal, Protocol
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.manifest import Count, Manifest
from tracelake.domain.block_range import MAX_BLOCK

BlockNumber = Annotated[int, Meta(ge=0, le=MAX_BLOCK, description="A block number.")]
Attempt = Annotated[int, Meta(ge=1, le=2**31 - 1, description="The attempt that the claim returned.")]
ShortText = Annotated[str, Meta(min_length=1, max_length=200)]
LongText = Annotated[str, Meta(max_length=64 * 1024)]

# The internal port, for lease holders.
CLAIM_PATH = "/internal/task-claim"
CLAIM_BATCH_PATH = "/internal/task-claim-batch"
FETCH_PATH = "/internal/task-fetch"
HEARTBEAT_PATH = "/internal/heartbeat"
COMPLETE_PATH = "/internal/task-complete"
COMPLETE_BATCH_PATH = "/internal/task-complete-batch"
EVENTS_PATH = "/internal/events"
TASK_STATE_PATH = "/internal/task-state"
WORKER_PATH = "/internal/worker"
TASK_INPUTS_PATH = "/internal/task-inputs"
TASK_PREFIX = "/v1/task/"
"""Calls below it take a capability token: they are the only ones that an attempt's own code may make."""

WORKER_SEEN_SECONDS = 10.0
"""How often a worker registers."""
WORKER_GONE_SECONDS = 35.0
"""A worker that hasn't registered for this time isn't counted any more."""

MAX_EVENTS = 1000
MAX_BATCH = 200
MAX_INPUT_FILES = 1000
#: Both sizes are of compact JSON, as the Dispatcher itself would encode it.
MAX_PROGRESS_BYTES = 4 * 1024
MAX_STATE_BYTES = 64 * 1024

ProgressValue = str | int | float | bool | None
ReportedProgress = dict[Annotated[str, Meta(min_length=1, max_length=200)], ProgressValue]


class InvalidateRange(Struct, frozen=True, forbid_unknown_fields=True):
    """The blocks of an invalidation: both ends inclusive."""

    start: BlockNumber
    end: BlockNumber


class EventIn(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One upstream event: an output and a scope.

    The output is given by ``dataset_uuid`` and ``dataset_version``, or by its published name in ``dataset``. The
    scope is given by ``cursor``, by ``start``/``end`` (``partition_key``), or as an invalidation by ``id`` and
    ``invalidate``. ``revision`` is the revision of the dataset that the producer worked on: an event of an older
    one is kept but does not count. ``finalized`` is the chain's finalized block, for sources.
    """

    dataset_uuid: UUID | None = None
    dataset_version: UUID | None = None
    dataset: ShortText | None = None
    cursor: BlockNumber | None = None
    partition_key: Annotated[str, Meta(max_length=64)] | None = None
    start: BlockNumber | None = None
    end: BlockNumber | None = None
    revision: Count | None = None
    finalized: BlockNumber | None = None
    id: ShortText | None = None
    invalidate: InvalidateRange | None = None
    reason: Annotated[str, Meta(max_length=1000)] | None = None


Events = Annotated[list[EventIn], Meta(max_length=MAX_EVENTS)]


class ClaimRequest(Struct, frozen=True, forbid_unknown_fields=True):
    task_id: UUID
    worker_id: ShortText
    claim_key: ShortText | None = None


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
    """The version behind a compacted input, whose rows are in Postgres and not all in files yet. A reader uses the
    rows of blocks that no committed file holds, and reads them before it asks for the files."""

    dataset_version: UUID
    revision: int


class PayloadInput(Struct, frozen=True):
    """An input as the attempt must read it, frozen at the claim.

    ``hot`` is set for a compacted dataset that doesn't trigger, whatever the state of its compaction.

    ``cursor_column`` is the column that ``after`` and ``upto`` count, where that isn't the block number: the
    ``position`` of a buffered dataset.

    ``as_of`` is set for a range that consists of partitions: the last partition that was committed at the claim.
    The Dispatcher uses it at the end to find commits to the range that happened meanwhile."""

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
    """The position of an always-on source in an output at the claim, as the platform knows it. ``taken_back`` are
    ranges that other tasks have invalidated and the source hasn't written again since."""

    cursor: int | None = None
    finalized: int | None = None
    taken_back: list[InvalidateRange] = []


class PayloadOutput(Struct, frozen=True):
    """``written`` is set for a source, which has no inputs that would give its position."""

    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    revision: int
    dataset: str | None = None
    staging: str | None = None
    written: PayloadWritten | None = None


class PayloadDelivery(Struct, frozen=True, omit_defaults=True):
    """A webhook's call. ``number`` counts the source's deliveries; ``id`` is the sender's. ``body`` has text as it
    came, ``body_base64`` anything else; a body of more than 32 KiB is in neither and is read by
    ``GET /v1/task/source-body``."""

    number: int
    id: str
    received_at: datetime
    bytes: int
    content_type: str | None = None
    body: str | None = None
    body_base64: str | None = None


class PayloadRequest(Struct, frozen=True, omit_defaults=True):
    """A person's trigger, with the blocks that it named. ``number`` counts the source's triggers."""

    number: int
    requested_at: datetime
    cursor: int | None = None
    start: int | None = None
    end: int | None = None


class PayloadSource(Struct, frozen=True, omit_defaults=True):
    """Why a source's task runs: a ``tick`` in epoch seconds, a webhook's ``delivery`` or a manual ``request``."""

    kind: Literal["cron", "webhook", "manual"]
    tick: int | None = None
    delivery: PayloadDelivery | None = None
    request: PayloadRequest | None = None


class TaskPayload(Struct, frozen=True):
    """The task as a claim returns it and as a function is invoked with it.

    ``state`` was saved by an earlier attempt of the same task; it is null if none did, or if an input was
    invalidated since. ``idle_timeout_seconds`` is the minimum idle timeout of a worker after a task of this job; a
    worker without an idle timeout ignores it. ``source`` is set for a task of a cron, webhook or manual source.
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
    source: PayloadSource | None = None


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


class WorkerRegistration(Struct, frozen=True, forbid_unknown_fields=True):
    """A worker and the runtime it serves; ``slots`` is the number of tasks that it runs at once. To be repeated
    every ``again_in_seconds``, and once with ``leaving`` at its end."""

    worker_id: ShortText
    runtime: Annotated[str, Meta(min_length=1, max_length=128)]
    slots: Annotated[int, Meta(ge=0, le=100_000)]
    leaving: bool = False


class WorkerRegistered(Struct, frozen=True):
    worker_id: str
    again_in_seconds: float


class FetchResponse(Struct, frozen=True):
    status: str
    task_id: UUID
    attempt: int
    task: TaskPayload


class HeartbeatRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """``progress`` replaces the attempt's earlier report; without it, that stays. It is flat and has at most
    ``MAX_PROGRESS_BYTES``."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    progress: ReportedProgress | None = None


class HeartbeatResponse(Struct, frozen=True):
    lease_expires_at: datetime | None
    cancel: bool
    pause: bool
    capability_token: str | None = None


class TaskStateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """``state`` is any JSON of at most ``MAX_STATE_BYTES``; null deletes the saved state."""

    task_id: UUID
    attempt: Attempt
    lease_token: UUID
    state: Any


class TaskStateResponse(Struct, frozen=True):
    task_id: UUID
    attempt: int


class TaskInputsQuery(Struct, frozen=True, forbid_unknown_fields=True):
    """``after`` is the ``next`` of the page before. With a ``margin`` of 1, the files of the blocks right before
    and right after the scope are listed too."""

    task_id: UUID
    attempt: Attempt
    input_index: Annotated[int, Meta(ge=0, le=1000)]
    after: Annotated[str, Meta(pattern=r"\A[0-9]{1,18}-[0-9]{1,9}\Z")] | UnsetType = UNSET
    margin: Annotated[int, Meta(ge=0, le=1)] = 0


class InputFile(Struct, frozen=True):
    """A committed file. ``start`` and ``end`` are its partition's and may reach beyond the attempt's range: the
    reader filters. ``rows``, ``min_block`` and ``max_block`` are null where its writer didn't report them. A
    partition that was committed later has a higher ``partition_id``."""

    location: str
    rows: int | None
    bytes: int
    start: int
    end: int
    min_block: int | None = None
    max_block: int | None = None
    partition_id: int | None = None


class TaskInputsResponse(Struct, frozen=True):
    """One page of an input's committed files, by block. Only Parquet has files: for another ``storage`` the list is
    empty, even if the input has rows."""

    storage: str
    files: list[InputFile]
    next: str | None = None


class OutputIn(Struct, frozen=True, forbid_unknown_fields=True):
    """One materialized output of a completed task."""

    output_index: Annotated[int, Meta(ge=0, le=1000)]
    dataset_uuid: UUID | None = None
    dataset_version: UUID | None = None
    dataset: ShortText | None = None
    location: Annotated[str, Meta(max_length=4096)] | None = None
    row_count: Count | None = None
    cursor: BlockNumber | None = None
    partition_key: Annotated[str, Meta(max_length=64)] | None = None
    start: BlockNumber | None = None
    end: BlockNumber | None = None
    manifest: Manifest | None = None


CompletionStatus = Literal["Completed", "Failed", "Canceled", "Released"]


class Fenced(Protocol):
    """Whatever names one attempt by its lease: only the current attempt can act with it."""

    @property
    def task_id(self) -> UUID: ...

    @property
    def attempt(self) -> int: ...

    @property
    def lease_token(self) -> UUID: ...


class CompleteRequest(Struct, frozen=True, forbid_unknown_fields=True):
    task_id: UUID
    status: CompletionStatus
    attempt: Attempt | None = None
    lease_token: UUID | None = None
    outputs: Annotated[list[OutputIn], Meta(max_length=MAX_EVENTS)] = []
    events: Events = []
    error_message: LongText | None = None
    retryable: bool = True

    @classmethod
    def of(
        cls,
        fence: Fenced,
        status: CompletionStatus,
        error_message: str | None = None,
        *,
        retryable: bool = True,
        outputs: Sequence[OutputIn] = (),
        events: Sequence[EventIn] = (),
    ) -> CompleteRequest:
        """The end of the attempt that ``fence`` names."""
        return cls(
            fence.task_id,
            status,
            fence.attempt,
            fence.lease_token,
            outputs=list(outputs),
            events=list(events),
            error_message=error_message,
            retryable=retryable,
        )


class CompleteBatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Several completions in one call; each is accepted or refused on its own."""

    completions: Annotated[list[CompleteRequest], Meta(min_length=1, max_length=MAX_BATCH)]


class CompleteResponse(Struct, frozen=True):
    """The answer to a completion; the same completion sent again gets the same answer."""

    task_id: UUID
    status: CompletionStatus
    attempt: int | None = None
    task_status: str = ""
    retry_at: datetime | None = None


class BatchAnswer(Struct, frozen=True):
    """The result of one completion of a batch: ``code`` is the status of its single call, with either ``accepted``,
    or ``reason`` and ``detail``."""

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
    """The result of one event: ``counted`` now, ``pending`` until the completion commits its scope, ``old_version``
    or ``old_revision`` when it is only kept for audit."""

    event_id: int
    state: Literal["counted", "pending", "old_version", "old_revision", "held"]
    revision: int


class EventsResponse(Struct, frozen=True):
    """``pause`` as in a heartbeat's answer: a source stops producing until a later answer says otherwise."""

    events: list[EventOut]
    tasks_created: int
    pause: bool = False


class TriggerRequest(Struct, frozen=True, forbid_unknown_fields=True):
    cursor: BlockNumber | None = None
    start: BlockNumber | None = None
    end: BlockNumber | None = None
    priority: Literal["normal", "bulk"] = "normal"


class TriggerResponse(Struct, frozen=True):
    """``event_id`` is null when the source runs code, whose task sends the events, and when the trigger is ``kept``
    until the source may go on: it is paused or held, or has no room."""

    event_id: int | None
    tasks_created: int
    kept: bool = False
