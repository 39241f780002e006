"""The user surface's wire models for provenance: the causes of a task, and the attempts that wrote a block range.

Both are bounded: a chain of causes by its depth, a range by the number of pieces in one answer. An answer always
says what it leaves out.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.coverage import Gap
from tracelake.contracts.manifest import Block
from tracelake.contracts.user_api import PageLimit, TaskStatusName, WaitingFor

MAX_DEPTH = 50


class ExplainTaskQuery(Struct, frozen=True, forbid_unknown_fields=True):
    depth: Annotated[int, Meta(ge=1, le=MAX_DEPTH)] = 20


class TaskStep(Struct, frozen=True):
    """A step of a task's life, and the seconds since the step before it in the list."""

    what: str
    at: datetime
    seconds: float | None


class RangeInvalidation(Struct, frozen=True):
    """An invalidated range, and the task that invalidated it."""

    start: int
    end: int
    revision: int
    reason: str | None
    task_id: UUID | None
    at: datetime


class Cause(Struct, frozen=True, kw_only=True):
    """The range that a task read of one of its triggering inputs, and the event that triggered it.

    ``task_id`` and ``attempt`` sent the event; they are null if a person did (a manual source). A null ``event_id``
    means that the event wasn't found among those that were searched.
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
    taken_back: RangeInvalidation | None = None


class ExplainedTask(Struct, frozen=True, kw_only=True):
    """A task of the chain with one attempt: the last one of the requested task; of the others, the attempt that
    sent the event. ``because`` is what created the task: an event's ``scope``, an ``update``, a ``cursor`` that a
    join waited for, an ``invalidation``, the ``reconcile`` pass, a ``deploy``, the source
    ``monitor``, or the kind of a source whose tick, delivery or trigger it is for; ``requested`` has that one's
    ``number``, and what a trigger named."""

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
    handovers: list[TaskStep]
    causes: list[Cause]
    taken_back: RangeInvalidation | None = None
    requested: dict[str, Any] | None = None


class TaskExplanation(Struct, frozen=True, kw_only=True):
    """The task first, then the tasks that its causes name, each once, nearest first.

    ``unexplored`` are tasks that causes name and that were left out, because of ``depth`` or because there are too
    many. ``seconds`` is the time from the first event of the chain to the end of the task, or until now.
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
    """``from`` and ``to`` default to the first and the last committed block."""

    start: Block | UnsetType = UNSET
    end: Block | UnsetType = UNSET
    limit: PageLimit = 100


class EarlierAttempt(Struct, frozen=True):
    attempt: int
    worker_id: str
    outcome: str | None
    error_message: str | None


class RangePiece(Struct, frozen=True, kw_only=True):
    """Blocks that one attempt has written: a committed partition, or the commits of a cursor in the range.

    ``verified`` says how the rows were checked against the chain, ``endpoints`` lists those that delivered the
    blocks; null where the operator doesn't report it. ``earlier_attempts`` are those of the same task before it,
    the last ones first.
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
    """The attempts that wrote the blocks ``start`` to ``end`` of a dataset's current version.

    ``next`` is the ``from`` of the next request when there are more than ``limit`` pieces. ``taken_back`` are the
    newest invalidations that touched the range, ``gaps`` the first missing ranges. ``searched`` is false when
    commits lie further back than the events that were searched.
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
    taken_back: list[RangeInvalidation]
    gaps: list[Gap]
    more_gaps: bool
    searched: bool
