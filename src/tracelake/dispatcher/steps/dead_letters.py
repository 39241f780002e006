"""Dead letters: messages that the sink gave up are kept whole, and leave by a person's decision alone.

The sink says so under its fence, so that one whose lease is over can't bury what its successor is about to write.
Sent again, a message goes through the outbox as a publish does: what was committed here is delivered.
"""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

import msgspec

from tracelake.contracts.buffers import (
    BufferMessage,
    BufferSchemaResponse,
    DeadLetterRequest,
    DeadLetterResponse,
)
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import Conflict, Forbidden, Invalid, NotFound
from tracelake.domain.task import check_may_act
from tracelake.store import buffers, dags, tasks
from tracelake.store.buffers import KnownBuffer
from tracelake.store.db import DeployLock, Transaction

PORTION = 50
"""Dead letters per transaction: each may be as large as a message."""


async def bury_message(ctx: StepContext, request: DeadLetterRequest) -> DeadLetterResponse:
    message = _parsed(request)

    async def work(tx: Transaction) -> int:
        task = await tasks.share(tx, request.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {request.task_id}")
        check_may_act(task.state, request.attempt, request.lease_token)
        own = await buffers.of_sink(tx, task.job_id)
        if own is None or own.dataset_uuid != message.dataset_uuid:
            raise Forbidden("NotYourDataset", f"task {task.task_id} doesn't drain {message.dataset_uuid}")
        raw = msgspec.json.encode(request.message).decode()
        return await buffers.bury(
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


async def schema_now(ctx: StepContext, dataset_uuid: UUID) -> BufferSchemaResponse:
    """The schema as it is deployed now, for a sink that met a newer one than it knows."""
    found = await ctx.db.run(lambda tx: buffers.find(tx, ctx.org_id, dataset_uuid), lock=DeployLock.NONE)
    if found is None:
        raise NotFound("UnknownDataset", f"there is no buffered dataset {dataset_uuid}")
    return BufferSchemaResponse(
        found.dataset_uuid, found.dataset_version, found.name, found.schema_hash, found.schema
    )


async def replay(ctx: StepContext, dataset: KnownBuffer, ids: Sequence[int] | None, actor: str) -> int:
    """Send dead letters again, these or all; how many there were."""
    if dataset.name is None:
        raise Conflict("NotPublished", "no DAG publishes this dataset now, so nothing would write its rows")
    return await _take(ctx, dataset, ids, actor, send=True)


async def drop(ctx: StepContext, dataset: KnownBuffer, ids: Sequence[int] | None, actor: str) -> int:
    """Forget dead letters for good, these or all; how many there were."""
    return await _take(ctx, dataset, ids, actor, send=False)


async def _take(
    ctx: StepContext, dataset: KnownBuffer, ids: Sequence[int] | None, actor: str, *, send: bool
) -> int:
    action = "replay dead letters" if send else "drop dead letters"
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
