"""The user surface's wire models for where things come from: the causes of a task, the makers of a block range.

Both are bounded: a chain of causes by its depth, a range by how many pieces are told at once. What was left out is
said, never silently missing.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.coverage import Block, Gap
from tracelake.contracts.user_api import Limit, TaskStatusName, WaitingFor

MAX_DEPTH = 50


class ExplainTaskQuery(Struct, frozen=True, forbid_unknown_fields=True):
    depth: Annotated[int, Meta(ge=1, le=MAX_DEPTH)] = 20


class Handover(Struct, frozen=True):
    """Something that happened to a task, and how long it took since what stands before it in the list."""

    what: str
    at: datetime
    seconds: float | None


class TakenBack(Struct, frozen=True):
    """A range that was invalidated, and the task that said so."""

    start: int
    end: int
    revision: int
    reason: str | None
    task_id: UUID | None
    at: datetime


class Cause(Struct, frozen=True, kw_only=True):
    """What a task read through one of its triggering inputs, and the event that brought it there.

    ``task_id`` and ``attempt`` are who said the event: null when a person did (a manual source). Without an
    ``event_id`` the event wasn't found among those that were looked through.
    """

    input_index: int
    dataset: str | None
    dataset_uuid: UUID
    dataset_version: UUID
    dag_name: str
    job: str | None
    output_name: str
    revision: int | None = None
    after: int | None = None
    upto: int | None = None
    start: int | None = None
    end: int | None = None
    event_id: int | None = None
    event_kind: str | None = None
    event_start: int | None = None
    event_end: int | None = None
    recorded_at: datetime | None = None
    task_id: UUID | None = None
    attempt: int | None = None
    taken_back: TakenBack | None = None


class ExplainedTask(Struct, frozen=True, kw_only=True):
    """A task of the chain, by the attempt that matters: the last one of the task that was asked for, of the others
    the one that said the event. ``because`` is what created it: an event's ``scope``, an ``update``, a ``cursor``
    that a join waited for, an ``invalidation``, the ``reconcile`` pass, a ``deploy`` or the source ``monitor``."""

    task_id: UUID
    dag_name: str
    job: str
    operator: str
    runtime: str
    kind: str
    status: TaskStatusName
    attempt: int
    worker_id: str | None
    outcome: str | None
    error_message: str | None
    start: int | None
    end: int | None
    because: str | None
    depth: int
    handovers: list[Handover]
    causes: list[Cause]
    taken_back: TakenBack | None = None


class TaskExplanation(Struct, frozen=True, kw_only=True):
    """The task first, then those that its causes name, each once, nearest first.

    ``unexplored`` are tasks that causes name and that were left out, because of ``depth`` or because there are too
    many. ``seconds`` is from the first event of the chain to the end of the task, or until now.
    """

    task_id: UUID
    depth: int
    tasks: list[ExplainedTask]
    unexplored: list[UUID]
    waiting_for: WaitingFor | None
    seconds: float | None


class ExplainRangeQuery(
    Struct, frozen=True, forbid_unknown_fields=True, rename={"start": "from", "end": "to"}
):
    """From the first to the last block that is committed, unless said otherwise."""

    start: Block | UnsetType = UNSET
    end: Block | UnsetType = UNSET
    limit: Limit = 100


class EarlierAttempt(Struct, frozen=True):
    attempt: int
    worker_id: str
    outcome: str | None
    error_message: str | None


class RangePiece(Struct, frozen=True, kw_only=True):
    """Blocks that one attempt has written: a committed partition, or the commits of a cursor in the range.

    ``verified`` says what the rows were checked against, ``endpoints`` who delivered the blocks; null where the
    operator doesn't say. ``earlier_attempts`` are those of the same task before it, the last ones first.
    """

    kind: str
    start: int
    end: int
    revision: int
    task_id: UUID | None
    attempt: int | None
    worker_id: str | None
    earlier_attempts: list[EarlierAttempt]
    created_at: datetime | None
    claimed_at: datetime | None
    committed_at: datetime
    commits: int | None = None
    row_count: int | None = None
    files: int | None = None
    bytes: int | None = None
    verified: str | None = None
    endpoints: list[str] | None = None
    schema_hash: str | None = None
    location: str | None = None


class RangeInput(Struct, frozen=True):
    dataset: str | None
    dataset_uuid: UUID
    dag_name: str
    job: str | None
    output_name: str
    trigger: bool


class RangeExplanation(Struct, frozen=True, kw_only=True):
    """Who made the blocks ``start`` to ``end`` of a dataset's current version.

    ``next`` is where to go on (as ``from``) when there are more pieces than were asked for. ``taken_back`` are the
    newest invalidations that touched the range, ``gaps`` the first of what is missing. ``searched`` is false when
    commits lie further back than the events that were looked through.
    """

    dataset: str | None
    dataset_uuid: UUID
    dataset_version: UUID
    storage: str
    dag_name: str
    job: str | None
    operator: str | None
    inputs: list[RangeInput]
    start: int | None
    end: int | None
    pieces: list[RangePiece]
    next: int | None
    taken_back: list[TakenBack]
    gaps: list[Gap]
    more_gaps: bool
    searched: bool
