"""Publish: records of an attempt are checked, and a message for the dataset's queue commits under its fence.

Promises: nothing is accepted that the sink's table couldn't hold; nothing of an attempt that is over; nothing
for a dataset that isn't one of the caller's own DAG, and nothing is said about such a dataset either. What was
accepted is in the outbox, durable, and reaches the queue at least once.

Records are checked before the transaction, against the schema as this process last saw it, and the transaction
makes sure that it still is the one; they are decoded once, only to be checked, and travel as the text that
came.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from uuid import UUID

import msgspec

from tracelake.contracts.buffers import (
    MAX_BATCH_BYTES,
    BufferBatch,
    BufferPublishRequest,
    BufferPublishResponse,
)
from tracelake.contracts.token_claims import TokenClaims
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.task_scope import revision_of, scope_of
from tracelake.domain.buffer_records import BadRecords, RecordProblem
from tracelake.domain.errors import Conflict, Forbidden, Invalid, NotFound
from tracelake.domain.operator_catalog import BUFFER_SINK
from tracelake.domain.task import check_may_act
from tracelake.objects.layout import batch_location
from tracelake.objects.prefix import ObjectLocation, ObjectPrefix
from tracelake.queue.base import MAX_BODY_BYTES
from tracelake.store import buffers, tasks
from tracelake.store.buffers import Buffer, KnownBuffer
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.jobs import JobCard
from tracelake.store.tasks import TaskRow

_ENVELOPE_BYTES = 4096
"""More than everything in a message that isn't its records takes."""
_AT_ONCE = 1024 * 1024
_LOOKS = 4


class _SchemaMoved(Exception):
    """The dataset isn't what this process thought: a deploy came in between."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """Records as they came, held against a schema: how many there are, or what is wrong with them."""

    text: str
    count: int
    problem: BadRecords | None = None


async def publish_buffer(
    ctx: StepContext, request: BufferPublishRequest, token: TokenClaims
) -> BufferPublishResponse:
    _check_shape(request)
    if request.batch_uri is not None:
        text = await _read_batch(ctx, request, token)
    else:
        text = _text(bytes(request.records))
    with ctx.metrics.timed("publish_buffer"):
        for _ in range(_LOOKS):
            known = await _known(ctx, request)
            try:
                return await _publish(ctx, request, known, await _check(ctx, known, text))
            except _SchemaMoved:
                _forget(ctx, request)
    raise Conflict(
        "SchemaMismatch", "the dataset's schema changes faster than it can be looked at; try again"
    )


def _check_shape(request: BufferPublishRequest) -> None:
    if (request.dataset_uuid is None) == (request.dataset is None):
        raise Invalid("InvalidPublish", "a publish names its dataset by either 'dataset_uuid' or 'dataset'")
    if (request.batch_uri is None) == (not bytes(request.records)):
        raise Invalid("InvalidPublish", "a publish has either 'records' or a 'batch_uri'")


async def _read_batch(ctx: StepContext, request: BufferPublishRequest, token: TokenClaims) -> str:
    """The object that the caller named, if it lies where the token lets it write. It is read now and kept
    apart: what becomes of the caller's own object later doesn't matter."""
    await ctx.db.run(lambda tx: _admit(ctx, tx, request), lock=DeployLock.NONE)
    place = ctx.objects.locate(request.batch_uri or "")
    own = [ObjectPrefix.parse(prefix) for prefix in (*token.s3.write, *token.s3.scratch)]
    if not isinstance(place, ObjectLocation) or not any(prefix.contains(place) for prefix in own):
        raise Forbidden(
            "LocationOutsidePrefix", "'batch_uri' is not below a prefix that the task may write to"
        )
    try:
        return _text(await ctx.objects.read(place, MAX_BATCH_BYTES))
    except NotFound as missing:
        raise Invalid(missing.reason, missing.message) from None


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRecords([RecordProblem(None, None, f"records are not UTF-8: {error.reason}")]) from None


async def _known(ctx: StepContext, request: BufferPublishRequest) -> KnownBuffer | None:
    key = request.dataset_uuid or request.dataset
    assert key is not None
    found = ctx.buffers.get(key)
    if found is None:
        found = await ctx.db.run(
            lambda tx: buffers.find(tx, ctx.org_id, request.dataset_uuid, request.dataset),
            lock=DeployLock.NONE,
        )
        if found is not None:
            ctx.buffers[key] = found
    return found


def _forget(ctx: StepContext, request: BufferPublishRequest) -> None:
    ctx.buffers.pop(request.dataset_uuid or request.dataset or "", None)


async def _check(ctx: StepContext, known: KnownBuffer | None, text: str) -> _Checked:
    """What is wrong is only said to those who may publish there. A large batch doesn't keep the others waiting."""
    if known is None:
        return _Checked(text, 0)
    decoder = known.schema.decoder(str(ctx.org_id))
    try:
        if len(text) <= _AT_ONCE:
            return _Checked(text, decoder.check(text))
        count = 0
        for checked in decoder.check_in_portions(text):
            count += checked
            await asyncio.sleep(0)
        return _Checked(text, count)
    except BadRecords as problem:
        return _Checked(text, 0, problem)


async def _publish(
    ctx: StepContext, request: BufferPublishRequest, known: KnownBuffer | None, checked: _Checked
) -> BufferPublishResponse:
    batch_id = ctx.entropy.uuid()
    artifact = await _keep_large(ctx, request, known, checked, batch_id)

    publisher: TaskRow | None = None

    async def work(tx: Transaction) -> BufferPublishResponse:
        nonlocal publisher
        task, card, buffer, base = await _admit(ctx, tx, request)
        ctx.emissions.check_records(task, checked.count, len(checked.text))
        publisher = task
        if known is None or (known.dataset_uuid, known.schema_hash) != (
            buffer.dataset_uuid,
            buffer.schema_hash,
        ):
            raise _SchemaMoved
        if checked.problem is not None:
            raise checked.problem
        if checked.count:
            batch = _batch(task, card, buffer, revision_of(task, base), batch_id, checked, artifact)
            await buffers.add_batch(tx, batch, card.dag_name, card.name)
        return BufferPublishResponse(checked.count, batch_id)

    answer = await ctx.db.run(work, hot=True)
    assert publisher is not None
    ctx.emissions.add_records(publisher, checked.count, len(checked.text))
    return answer


async def _admit(
    ctx: StepContext, tx: Transaction, request: BufferPublishRequest
) -> tuple[TaskRow, JobCard, Buffer, int]:
    """May this attempt publish to that dataset, now and with that schema? Also where its revisions begin."""
    task = await tasks.share(tx, request.task_id)
    if task is None:
        raise NotFound("UnknownTask", f"there is no task {request.task_id}")
    check_may_act(task.state, request.attempt, request.lease_token)
    card = (await ctx.cards.get(tx, [task.job_id]))[task.job_id]
    found = await buffers.find_published(tx, ctx.org_id, request.dataset_uuid, request.dataset, task.job_id)
    if found is None or found[0].dag_name != card.dag_name or card.operator == BUFFER_SINK:
        raise Forbidden(
            "NotYourDataset",
            f"{request.dataset or request.dataset_uuid} is not a buffered dataset of DAG {card.dag_name}",
        )
    buffer, base = found
    if request.schema_hash not in (None, buffer.schema_hash):
        raise Conflict("SchemaMismatch", f"the schema of {buffer.name} is {buffer.schema_hash} now")
    return task, card, buffer, base


async def _keep_large(
    ctx: StepContext,
    request: BufferPublishRequest,
    known: KnownBuffer | None,
    checked: _Checked,
    batch_id: UUID,
) -> str | None:
    """Records that don't fit a message lie in the object store before the message speaks of them. Those who may not
    publish are turned away first."""
    if known is None or not checked.count or not _too_large(checked.text):
        return None
    await ctx.db.run(lambda tx: _admit(ctx, tx, request), lock=DeployLock.NONE)
    place = batch_location(ctx.objects.root, known.dataset_uuid, batch_id)
    await ctx.objects.put(place, checked.text.encode())
    return place.uri


def _too_large(text: str) -> bool:
    """As a string inside of the message it gets longer: every quote is escaped."""
    if len(text) > MAX_BODY_BYTES - _ENVELOPE_BYTES:
        return True
    return len(msgspec.json.encode(text)) > MAX_BODY_BYTES - _ENVELOPE_BYTES


def _batch(
    task: TaskRow,
    card: JobCard,
    buffer: Buffer,
    revision: int,
    batch_id: UUID,
    checked: _Checked,
    artifact: str | None,
) -> BufferBatch:
    scope = scope_of(task)
    return BufferBatch(
        batch_id=batch_id,
        dataset_uuid=buffer.dataset_uuid,
        dataset_version=buffer.dataset_version,
        schema_hash=buffer.schema_hash,
        producer=f"{card.dag_name}/{card.name}",
        task_id=task.task_id,
        attempt=task.state.attempt,
        revision=revision,
        row_count=checked.count,
        scope_start=scope.start if scope is not None else None,
        scope_end=scope.end if scope is not None else None,
        records=checked.text if artifact is None else None,
        artifact=artifact,
    )
