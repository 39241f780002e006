"""The user surface's wire models for the coverage of a range of blocks: gaps, and the state of a backfill."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.manifest import Block
from tracelake.contracts.user_api import PageLimit
from tracelake.domain.block_range import MAX_BLOCK

# ``from`` is a Python keyword, so no field can have that name.
_FROM_TO = {"start": "from", "end": "to"}


class GapQuery(Struct, frozen=True, forbid_unknown_fields=True, rename=_FROM_TO):
    """``from`` and ``to`` default to the first and the last committed block."""

    start: Block | UnsetType = UNSET
    end: Block | UnsetType = UNSET
    limit: PageLimit = 100
    after: Block | UnsetType = UNSET


class Gap(Struct, frozen=True):
    """Both ends inclusive."""

    start: int
    end: int
    blocks: int


class GapPage(Struct, frozen=True):
    """The blocks between ``start`` and ``end`` that a dataset's current version lacks. Both ends are null if
    nothing is committed and the request gave none."""

    dataset_uuid: UUID
    dataset_version: UUID
    start: int | None
    end: int | None
    gaps: list[Gap]
    next: str | None


class BackfillQuery(Struct, frozen=True, forbid_unknown_fields=True, rename=_FROM_TO):
    start: Block
    end: Block
    chunk: Annotated[int, Meta(ge=1, le=MAX_BLOCK)] | UnsetType = UNSET
    order: Literal["oldest", "newest"] = "oldest"
    limit: PageLimit = 1000


class JobName(Struct, frozen=True):
    dag_name: str
    job: str


class BackfillFailure(Struct, frozen=True):
    task_id: UUID
    dag_name: str
    job: str
    status: str
    start: int
    end: int
    error_message: str | None


class BackfillHold(Struct, frozen=True):
    """A job of the backfill that is held, all of it or its bulk work only, and because of what."""

    dag_name: str
    job: str
    bulk_only: bool
    cause: str


class BackfillState(Struct, frozen=True):
    """A job's progress over a range of blocks, and the events that schedule the rest.

    A chunk is the range of one task. ``asked_chunks`` aren't committed in every output yet, but their tasks exist
    or will; ``unasked_chunks`` aren't scheduled, and ``events`` are the first ones to send to ``source`` for them,
    in the requested order. ``failed`` are the first of the tasks that only a retry can finish.
    """

    job: JobName
    source: JobName
    splitter: JobName | None
    runs_also: list[JobName]
    paused: list[JobName]
    max_concurrency: int | None
    start: int
    end: int
    chunk: int
    blocks: int
    committed_blocks: int
    chunks: int
    committed_chunks: int
    asked_chunks: int
    unasked_chunks: int
    queued: int
    running: int
    failures: int
    events: list[Gap]
    more_events: bool
    failed: list[BackfillFailure]
    held: list[BackfillHold] = []
