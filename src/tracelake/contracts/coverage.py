"""The user surface's wire models for what is there of a range of blocks, and what is missing."""

from __future__ import annotations

from typing import Annotated, Literal
from uuid import UUID

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.contracts.user_api import Limit
from tracelake.domain.block_range import MAX_BLOCK

Block = Annotated[int, Meta(ge=0, le=MAX_BLOCK)]
_FROM_TO = {"start": "from", "end": "to"}


class GapQuery(Struct, frozen=True, forbid_unknown_fields=True, rename=_FROM_TO):
    """From the first to the last block that is committed, unless said otherwise."""

    start: Block | UnsetType = UNSET
    end: Block | UnsetType = UNSET
    limit: Limit = 100
    after: Block | UnsetType = UNSET


class Gap(Struct, frozen=True):
    """Both ends inclusive."""

    start: int
    end: int
    blocks: int


class GapPage(Struct, frozen=True):
    """What is missing of a dataset's current version between ``start`` and ``end``, which are null when nothing is
    committed and nothing was asked for."""

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
    limit: Limit = 1000


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


class BackfillState(Struct, frozen=True):
    """How far a job is with a range of blocks, and what nobody has asked it for yet.

    A chunk is what one task does. ``asked_chunks`` aren't committed in every output yet, but their tasks exist or
    will; for ``unasked_chunks`` these are the first ``events`` to send to ``source``, in the order asked for.
    ``failed`` are the first of the tasks that only a retry brings to an end.
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
