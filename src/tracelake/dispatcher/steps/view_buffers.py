"""Buffered datasets as people see them: what the state database knows, and how full their queues are."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import structlog

from tracelake.contracts.buffers import BufferDetail, BufferSummary, buffer_queue
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import NotFound, Unavailable
from tracelake.queue.base import Queue, QueueDepth
from tracelake.store import buffers
from tracelake.store.buffers import KnownBuffer
from tracelake.store.db import DeployLock, Row, Transaction

log = structlog.get_logger(__name__)


async def find_buffer(ctx: StepContext, name: str) -> KnownBuffer:
    """By published name, or by uuid: one that is no longer published has only that."""
    try:
        dataset_uuid, published = (UUID(name), None) if len(name) == 36 else (None, name)
    except ValueError:
        dataset_uuid, published = None, name
    found = await ctx.db.run(
        lambda tx: buffers.find(tx, ctx.org_id, dataset_uuid, published), lock=DeployLock.NONE
    )
    if found is None:
        raise NotFound("UnknownDataset", f"there is no buffered dataset {name}")
    return found


async def view_buffers(ctx: StepContext, queue: Queue | None) -> list[BufferSummary]:
    rows = await ctx.db.run(lambda tx: buffers.overview(tx, ctx.org_id), lock=DeployLock.NONE)
    depths = await _depths(queue)
    return [BufferSummary(**_fields(row, depths)) for row in rows]


async def view_buffer(ctx: StepContext, queue: Queue | None, buffer: KnownBuffer) -> BufferDetail:
    async def work(tx: Transaction) -> tuple[list[Row], list[str]]:
        return (
            await buffers.overview(tx, ctx.org_id, buffer.dataset_uuid),
            await buffers.writers(tx, buffer.dataset_uuid),
        )

    [row], writers = await ctx.db.run(work, lock=DeployLock.NONE)
    depths = await _depths(queue)
    return BufferDetail(**_fields(row, depths), schema=buffer.schema, writers=writers)


async def _depths(queue: Queue | None) -> dict[str, QueueDepth] | None:
    if queue is None:
        return None
    try:
        return await queue.depths()
    except Unavailable as error:
        log.warning("the queue can't be asked how full it is", error=error.message)
        return None


def _fields(row: Row, depths: dict[str, QueueDepth] | None) -> dict[str, Any]:
    depth = None if depths is None else depths.get(buffer_queue(row["dataset_uuid"]), QueueDepth())
    return {
        "dataset": row["dataset"] or row["name"] or str(row["dataset_uuid"]),
        "dataset_uuid": row["dataset_uuid"],
        "dag_name": row["dag_name"],
        "published": row["dataset"] is not None,
        "schema_hash": row["schema_hash"],
        "undelivered": row["undelivered"],
        "waiting": depth.visible + depth.delayed if depth is not None else None,
        "in_flight": depth.in_flight if depth is not None else None,
        "oldest_age_seconds": depth.oldest_age_seconds if depth is not None else None,
        "dead_letters": row["dead_letters"],
        "position": row["cursor"],
        "sink_task_id": row["sink_task_id"],
        "sink_status": row["sink_status"],
    }
