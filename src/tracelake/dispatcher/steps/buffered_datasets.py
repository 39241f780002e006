"""Buffered datasets: what people see of them, their dead letters, and the platform's job that drains each of them.

The views join the state database's rows with the depths of the queues. Dead letters are messages that the sink gave
up: they are kept complete, and leave only by a person's decision. The sink reports them under its fence, so that
one whose lease is over can't set aside what its successor is about to write. A dead letter that is sent again
goes through the outbox like a publish, so a committed replay is delivered.

The job behind a buffered dataset is a source that never ends, whose one output is the dataset. Its fingerprint is
constant, so the dataset has one version for its whole life even if its schema changes; the schema is therefore no
part of the job's configuration, and each claim reads the one deployed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
import structlog

from tracelake.contracts.buffers import (
    BufferDetail,
    BufferMessage,
    BufferSchemaResponse,
    BufferSummary,
    DeadLetterRequest,
    DeadLetterResponse,
    SinkConfig,
    buffer_queue,
)
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.dag.model import (
    Activation,
    BufferedDataset,
    JobSettings,
    JobSpec,
    OutputSpec,
    SourceKind,
    Storage,
    UpdateStrategy,
)
from tracelake.domain.errors import Conflict, Forbidden, Invalid, NotFound, Unavailable
from tracelake.domain.operators.catalog import BUFFER_SINK
from tracelake.domain.runtimes import SINK
from tracelake.domain.task import check_may_act
from tracelake.queue.base import Queue, QueueDepth
from tracelake.store import buffers, dags, tasks
from tracelake.store.buffers import KnownBuffer
from tracelake.store.db import DeployLock, Row, Transaction
from tracelake.store.jobs import JobDefinition

PORTION = 50
"""Dead letters per transaction: each may be as large as a message."""
SINK_FINGERPRINT = "buffer_sink"
# Short times: while a sink is dead, rows wait.
_SETTINGS = JobSettings(heartbeat_timeout_seconds=30, retry_base_seconds=1, retry_max_seconds=60)


log = structlog.get_logger(__name__)


async def find_buffer(ctx: StepContext, name: str) -> KnownBuffer:
    """Find a dataset by published name, or by uuid: one that is no longer published has no name."""
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
    # People want to see their datasets above all while the queue is away.
    except Unavailable as error:
        log.warning("queue depths unknown", error=error.message)
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


async def record_dead_letter(ctx: StepContext, request: DeadLetterRequest) -> DeadLetterResponse:
    message = _parsed(request)

    async def work(tx: Transaction) -> int:
        task = await tasks.share(tx, request.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {request.task_id}")
        check_may_act(task.state, request.attempt, request.lease_token)
        own = await buffers.of_sink(tx, task.job_id)
        # A worker token admits any worker; only the sink of this dataset may report dead letters of it.
        if own is None or own.dataset_uuid != message.dataset_uuid:
            raise Forbidden("NotYourDataset", f"task {task.task_id} doesn't drain {message.dataset_uuid}")
        raw = msgspec.json.encode(request.message).decode()
        return await buffers.add_dead_letter(
            tx, ctx.org_id, message, raw, request.reason, request.tries, request.task_id
        )

    return DeadLetterResponse(await ctx.db.run(work, lock=DeployLock.NONE))


def _parsed(request: DeadLetterRequest) -> BufferMessage:
    try:
        message: BufferMessage = msgspec.convert(request.message, BufferMessage)
    except msgspec.ValidationError as error:
        raise Invalid("BadMessage", f"'message' is not a buffer's message: {error}") from None
    if message.dataset_uuid != request.dataset_uuid:
        raise Invalid("BadMessage", "'message' is about another dataset")
    return message


async def current_schema(ctx: StepContext, dataset_uuid: UUID) -> BufferSchemaResponse:
    """The deployed schema, for a sink that received a message with a newer one than it knows."""
    found = await ctx.db.run(lambda tx: buffers.find(tx, ctx.org_id, dataset_uuid), lock=DeployLock.NONE)
    if found is None:
        raise NotFound("UnknownDataset", f"there is no buffered dataset {dataset_uuid}")
    return BufferSchemaResponse(
        found.dataset_uuid, found.dataset_version, found.name, found.schema_hash, found.schema
    )


async def replay_dead_letters(
    ctx: StepContext, dataset: KnownBuffer, ids: Sequence[int] | None, actor: str
) -> int:
    """Send dead letters again, these or all; returns their number."""
    if dataset.name is None:
        raise Conflict("NotPublished", "no DAG publishes this dataset now, so nothing would write its rows")
    return await _take(ctx, dataset, ids, actor, send=True)


async def drop_dead_letters(
    ctx: StepContext, dataset: KnownBuffer, ids: Sequence[int] | None, actor: str
) -> int:
    """Delete dead letters, these or all; returns their number."""
    return await _take(ctx, dataset, ids, actor, send=False)


async def _take(
    ctx: StepContext, dataset: KnownBuffer, ids: Sequence[int] | None, actor: str, *, send: bool
) -> int:
    action = "replay dead letters" if send else "drop dead letters"
    # A replayed message may fail and come again while the
    # loop below runs; without an end it would never stop.
    last = await ctx.db.run(
        lambda tx: buffers.last_dead_letter(tx, dataset.dataset_uuid), lock=DeployLock.NONE
    )

    async def work(tx: Transaction) -> int:
        taken = await buffers.take_dead_letters(tx, dataset.dataset_uuid, ids, PORTION, last)
        if send:
            await buffers.resend(tx, dataset.dataset_uuid, taken)
        if taken:
            subject = {"dataset": str(dataset.dataset_uuid), "batches": [m["batch_id"] for m in taken]}
            await dags.audit(tx, ctx.org_id, actor, action, subject)
        return len(taken)

    count = 0
    while portion := await ctx.db.run(work, lock=DeployLock.NONE):
        count += portion
    return count


def sink_spec(dataset: BufferedDataset) -> JobSpec:
    return JobSpec(
        name=buffers.sink_job(dataset.name),
        activation=Activation.SOURCE,
        runtime=SINK,
        operator=BUFFER_SINK,
        source_kind=SourceKind.ALWAYS_ON,
        outputs=(OutputSpec(0, dataset.name, Storage.POSTGRES),),
        update_strategy=UpdateStrategy.APPEND,
        unique_key=dataset.unique,
        settings=_SETTINGS,
    )


async def sink_config(ctx: StepContext, tx: Transaction, definition: JobDefinition) -> dict[str, Any] | None:
    """The configuration of a sink, made from its dataset; None for every other job."""
    if definition.operator != BUFFER_SINK:
        return None
    buffer = await buffers.of_sink(tx, definition.job_id)
    assert buffer is not None
    name = buffer.name or definition.outputs[0].name
    config = SinkConfig(name, str(ctx.org_id), buffer.schema_hash, buffer.schema)
    built: dict[str, Any] = msgspec.to_builtins(config)
    return built
