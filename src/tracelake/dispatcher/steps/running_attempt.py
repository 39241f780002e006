"""Calls of a running attempt: heartbeat, list inputs, save state, fetch.

A heartbeat extends the lease and answers whether to cancel or pause. It commits without waiting for the disk: one
lost in a crash is made up for by the next, and the reaper waits a whole lease after an outage before it gives
attempts up.

``list_inputs`` returns the committed files of an input, and never a folder, so a reader sees exactly what was
committed. The files are read before the inputs are checked: an invalidation before the read is found by the check,
and the attempt gets ``InputChanged`` instead of a list with a hole.

``save_state`` stores what the next attempt of the task may resume from. It is fenced like a completion, in the
transaction that writes: a superseded attempt changes nothing, and one that the reaper gave up may still save until
a newer one is claimed. ``fetch_task`` reads a task's payload and status, changing nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

from tracelake.contracts.dispatcher_api import (
    MAX_INPUT_FILES,
    FetchResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    InputFile,
    PayloadInput,
    TaskInputsQuery,
    TaskInputsResponse,
    TaskStateRequest,
    TaskStateResponse,
)
from tracelake.contracts.token_claims import TokenClaims
from tracelake.dispatcher.steps import render_payload
from tracelake.dispatcher.steps.buffered_datasets import sink_config
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.render_payload import issue_token
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.dag.model import Storage
from tracelake.domain.errors import Conflict, Invalid, NotFound
from tracelake.domain.task import Fence, HeartbeatVerdict, TaskKind, check_may_act, decide_heartbeat
from tracelake.store import datasets, invalidations, jobs, sources, tasks
from tracelake.store.db import DeployLock, Row, Transaction
from tracelake.store.invalidations import UsedScope
from tracelake.store.sources import TaskRequest
from tracelake.store.tasks import TaskRow
from tracelake.tokens.capability import lifetime_seconds, renewal_due


async def heartbeat(
    ctx: StepContext, request: HeartbeatRequest, token: TokenClaims | None = None
) -> HeartbeatResponse:
    """``token`` is the caller's capability token; the answer has a fresh one when it nears its end."""
    fence = Fence(request.task_id, request.attempt, request.lease_token)

    async def work(tx: Transaction) -> HeartbeatResponse:
        task = (await tasks.lock(tx, [fence.task_id])).get(fence.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {fence.task_id}")
        # An answer and not an error: the attempt's worker is to stop in order.
        if decide_heartbeat(task.state, fence) is HeartbeatVerdict.CANCEL:
            return HeartbeatResponse(task.lease_expires_at, cancel=True, pause=task.state.job_paused)
        if request.progress is not None:
            await tasks.report_progress(tx, task.task_id, fence.attempt, request.progress)
        leases = await tasks.extend_leases(tx, [(task.task_id, task.heartbeat_timeout_seconds)])
        fresh = await _fresh_token(ctx, tx, task, token)
        return HeartbeatResponse(leases[task.task_id], False, task.state.job_paused, fresh)

    with ctx.metrics.timed("heartbeat"):
        return await ctx.db.run(work, lock=DeployLock.NONE, durable=False)


async def _fresh_token(
    ctx: StepContext, tx: Transaction, task: TaskRow, token: TokenClaims | None
) -> str | None:
    """A wrapper doesn't send its token; the age of the first token is the attempt's, and once that nears its end
    each heartbeat brings a fresh one."""
    if token is not None:
        expires_at = datetime.fromtimestamp(token.exp, UTC)
    else:
        began = await tasks.claimed_at(tx, task.task_id, task.state.attempt)
        expires_at = began + timedelta(seconds=lifetime_seconds(task.timeout_seconds))
    if not renewal_due(expires_at, task.timeout_seconds, task.now):
        return None
    definitions = await ctx.definitions.get(tx, [task.job_id])
    payload = render_payload.render(
        ctx,
        task,
        definitions[task.job_id],
        render_payload.from_json(task.inputs or []),
        await jobs.output_state(tx, definitions),
        attempt=task.state.attempt,
        epoch=task.epoch,
    )
    return await issue_token(ctx, definitions[task.job_id].org_id, payload, task.now)


async def list_inputs(ctx: StepContext, query: TaskInputsQuery) -> TaskInputsResponse:
    async def work(tx: Transaction) -> TaskInputsResponse:
        task = await tasks.read(tx, query.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {query.task_id}")
        # Reading needs no lease token: the worker's own credential admits it, and nothing is written.
        check_may_act(task.state, query.attempt, None)
        read = _find(task, query.input_index)
        span = scope_to_read(read)
        if read.storage != Storage.PARQUET.value or span is None:
            return TaskInputsResponse(read.storage, [])
        after = _place(query.after) if query.after else None
        # One more than a page, to know whether there is a next one.
        listed = BlockRange(max(0, span.start - query.margin), min(MAX_BLOCK, span.end + query.margin))
        rows = await datasets.committed_files(tx, read.dataset_version, listed, after, MAX_INPUT_FILES + 1)
        # After the read: each statement sees what was committed
        # before it began, so no change slips in between.
        await _check_unchanged(tx, task, read, span, after)
        return _page(read, rows)

    return await ctx.db.run(work, lock=DeployLock.NONE)


def scope_to_read(read: PayloadInput) -> BlockRange | None:
    """The blocks of an input that an attempt reads, as frozen at its claim; None when there are none.

    An update's input that doesn't trigger has no position of its own: everything committed is read.
    """
    if isinstance(read.start, int) and isinstance(read.end, int):
        return BlockRange(read.start, read.end)
    if read.trigger and isinstance(read.after, int) and isinstance(read.upto, int):
        return BlockRange(read.after + 1, read.upto) if read.upto > read.after else None
    return BlockRange(0, MAX_BLOCK)


def _find(task: TaskRow, index: int) -> PayloadInput:
    for read in render_payload.from_json(task.inputs or []):
        if read.input_index == index:
            return read
    raise NotFound("UnknownInput", f"the task has no input {index}")


def _place(after: str) -> tuple[int, int]:
    partition, _, position = after.partition("-")
    return int(partition), int(position)


async def _check_unchanged(
    tx: Transaction, task: TaskRow, read: PayloadInput, span: BlockRange, after: tuple[int, int] | None
) -> None:
    """Raises when the range was invalidated since the claim, or when the partition at which the last page ended was
    replaced: the list would have a part of each."""
    used = UsedScope(task.task_id, read.dataset_version, read.revision, span.start, span.end)
    if await invalidations.changed_meanwhile(tx, [used]):
        raise Conflict("InputChanged", f"input {read.input_index} was invalidated since the claim")
    if after is None:
        return
    current = await datasets.is_current(tx, read.dataset_version, after[0])
    if current is None:
        raise Invalid("InvalidCursor", "'after' must be the 'next' value of a page")
    if not current:
        raise Conflict("InputChanged", f"input {read.input_index} was replaced while it was listed")


def _page(read: PayloadInput, rows: Sequence[Row]) -> TaskInputsResponse:
    page = rows[:MAX_INPUT_FILES]
    last = page[-1] if len(rows) > len(page) else None
    return TaskInputsResponse(
        read.storage,
        [_file(row) for row in page],
        f"{last['partition_id']}-{last['position']}" if last else None,
    )


def _file(row: Row) -> InputFile:
    file = row["file"]
    return InputFile(
        location=file["location"],
        rows=file.get("rows"),
        bytes=file["bytes"],
        start=row["start"],
        end=row["end"],
        min_block=file.get("min_block"),
        max_block=file.get("max_block"),
        partition_id=row["partition_id"],
    )


async def save_state(ctx: StepContext, request: TaskStateRequest) -> TaskStateResponse:
    async def work(tx: Transaction) -> None:
        task = (await tasks.lock(tx, [request.task_id])).get(request.task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {request.task_id}")
        check_may_act(task.state, request.attempt, request.lease_token)
        await tasks.save_state(tx, task, request.state)

    with ctx.metrics.timed("save_state"):
        await ctx.db.run(work, lock=DeployLock.NONE)
    return TaskStateResponse(request.task_id, request.attempt)


async def fetch_task(ctx: StepContext, task_id: UUID) -> FetchResponse:
    """With the current attempt's frozen inputs; for an unclaimed task, with those that a claim would freeze now."""

    async def work(tx: Transaction) -> FetchResponse:
        task = await tasks.read(tx, task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {task_id}")
        definitions = await ctx.definitions.get(tx, [task.job_id])
        if task.inputs is not None:
            inputs = render_payload.from_json(task.inputs)
        else:
            inputs = render_payload.freeze_inputs(task, (await tasks.claim_inputs(tx, [task]))[task_id])
        payload = render_payload.render(
            ctx,
            task,
            definitions[task.job_id],
            inputs,
            await jobs.output_state(tx, definitions),
            attempt=task.state.attempt,
            epoch=task.epoch,
            state=await tasks.saved_state(tx, task_id),
            config=await sink_config(ctx, tx, definitions[task.job_id]),
            request=await _request(tx, task),
        )
        return FetchResponse(task.state.status.value, task_id, task.state.attempt, payload)

    return await ctx.db.run(work, lock=DeployLock.NONE)


async def _request(tx: Transaction, task: TaskRow) -> TaskRequest | None:
    if task.state.kind is not TaskKind.REQUEST:
        return None
    return (await sources.requests_of(tx, [task.task_id])).get(task.task_id)
