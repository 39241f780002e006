"""Publish: checks the records of an attempt and commits a message for the dataset's queue under its fence.

Promises: nothing is accepted that the sink's table couldn't hold; nothing from an attempt that is over; nothing for
a dataset of another DAG, about which the caller learns nothing either. Accepted records are in the outbox, durable,
and reach the queue at least once. Records are checked before the transaction, against the schema that this process
last saw, and the transaction makes sure that it is still current; they are decoded only for the check, and sent on
as the text that came.

Every row carries its task's blocks and a revision. A revision only rises for one job: it is the base of the job's
generation plus the revisions of all that the job reads and writes, each of which counts invalidations. So a row
that is published again after an invalidation, or by the next generation, replaces the earlier one.

Retract: a task that ran because of an invalidation has published all rows that are still valid for its blocks. In
the transaction of its completion each buffered dataset that its job ever wrote gets a message, by which the sink
retracts rows of that job and those blocks with an older revision. The message may arrive before the task's own
batches: those carry the higher revision, and a row that is written again is no longer retracted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

import msgspec

from tracelake.contracts.buffers import (
    MAX_BATCH_BYTES,
    BufferBatch,
    BufferPublishRequest,
    BufferPublishResponse,
    BufferRetract,
)
from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.contracts.token_claims import TokenClaims
from tracelake.dispatcher.steps import render_payload
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.block_range import BlockRange
from tracelake.domain.buffers import BadRecords, RecordProblem
from tracelake.domain.errors import Conflict, Forbidden, Invalid, NotFound
from tracelake.domain.operators.catalog import BUFFER_SINK
from tracelake.domain.task import check_may_act
from tracelake.objects.base import ObjectLocation, ObjectPrefix, batch_location
from tracelake.queue.base import MAX_BODY_BYTES
from tracelake.store import buffers, tasks
from tracelake.store.buffers import Buffer, KnownBuffer
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.jobs import JobDefinition
from tracelake.store.tasks import TaskRow

_ENVELOPE_BYTES = 4096
"""Room for everything in a message besides its records."""
_AT_ONCE = 1024 * 1024
_LOOKS = 4


class _SchemaMoved(Exception):
    """The dataset has changed since this process cached it: a deploy came in between."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """Records as they came, checked against a schema: their number, or the problem."""

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
        # Each turn reads the schema anew; only deploys in quick succession use up more than two.
        for _ in range(_LOOKS):
            known = await _known(ctx, request)
            try:
                return await _publish(ctx, request, known, await _check(ctx, known, text))
            except _SchemaMoved:
                _forget(ctx, request)
    raise Conflict("SchemaMismatch", "the dataset's schema changes faster than it can be read; try again")


def _check_shape(request: BufferPublishRequest) -> None:
    if (request.dataset_uuid is None) == (request.dataset is None):
        raise Invalid("InvalidPublish", "a publish names its dataset by either 'dataset_uuid' or 'dataset'")
    if (request.batch_uri is None) == (not bytes(request.records)):
        raise Invalid("InvalidPublish", "a publish has either 'records' or a 'batch_uri'")


async def _read_batch(ctx: StepContext, request: BufferPublishRequest, token: TokenClaims) -> str:
    """The object that the caller named, if its token may write there. It is read now and stored separately, so
    later changes of the caller's object don't matter."""
    # Before the read, so that an attempt that is over can't make this process read megabytes.
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
    """A problem is returned and not raised, because only callers that may publish there get to see it. Large
    batches are checked in portions, so that other requests don't wait."""
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
        task, definition, buffer, base = await _admit(ctx, tx, request)
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
            batch = _batch(task, definition, buffer, revision_of(task, base), batch_id, checked, artifact)
            await buffers.add_batch(tx, batch, definition.dag_name, definition.name)
        return BufferPublishResponse(checked.count, batch_id)

    answer = await ctx.db.run(work, hot=True)
    assert publisher is not None
    # After the commit: a transaction that was run again counts once.
    ctx.emissions.add_records(publisher, checked.count, len(checked.text))
    return answer


async def _admit(
    ctx: StepContext, tx: Transaction, request: BufferPublishRequest
) -> tuple[TaskRow, JobDefinition, Buffer, int]:
    """Raises unless this attempt may publish to that dataset with that schema. Returns also where the revisions of
    its job begin."""
    # Shared, so that an attempt's publishes run beside each other; its end needs the row alone and waits.
    task = await tasks.share(tx, request.task_id)
    if task is None:
        raise NotFound("UnknownTask", f"there is no task {request.task_id}")
    check_may_act(task.state, request.attempt, request.lease_token)
    definition = (await ctx.definitions.get(tx, [task.job_id]))[task.job_id]
    found = await buffers.find_published(tx, ctx.org_id, request.dataset_uuid, request.dataset, task.job_id)
    if found is None or found[0].dag_name != definition.dag_name or definition.operator == BUFFER_SINK:
        # The same answer for a dataset that doesn't exist: names of other DAGs can't be probed.
        raise Forbidden(
            "NotYourDataset",
            f"{request.dataset or request.dataset_uuid} is not a buffered dataset of DAG {definition.dag_name}",
        )
    buffer, base = found
    if request.schema_hash not in (None, buffer.schema_hash):
        raise Conflict("SchemaMismatch", f"the schema of {buffer.name} is {buffer.schema_hash} now")
    return task, definition, buffer, base


async def _keep_large(
    ctx: StepContext,
    request: BufferPublishRequest,
    known: KnownBuffer | None,
    checked: _Checked,
    batch_id: UUID,
) -> str | None:
    """Store records that don't fit into a message in the object store, before the message that refers to them.
    Callers that may not publish are refused first."""
    if known is None or not checked.count or not _too_large(checked.text):
        return None
    await ctx.db.run(lambda tx: _admit(ctx, tx, request), lock=DeployLock.NONE)
    place = batch_location(ctx.objects.root, known.dataset_uuid, batch_id)
    await ctx.objects.put(place, checked.text.encode())
    return place.uri


def _too_large(text: str) -> bool:
    """As a string inside the message the text is longer: every quote is escaped."""
    # Escaping only adds bytes, so a text beyond the limit needn't be encoded to know.
    if len(text) > MAX_BODY_BYTES - _ENVELOPE_BYTES:
        return True
    return len(msgspec.json.encode(text)) > MAX_BODY_BYTES - _ENVELOPE_BYTES


def _batch(
    task: TaskRow,
    definition: JobDefinition,
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
        producer=f"{definition.dag_name}/{definition.name}",
        task_id=task.task_id,
        attempt=task.state.attempt,
        revision=revision,
        row_count=checked.count,
        scope_start=scope.start if scope is not None else None,
        scope_end=scope.end if scope is not None else None,
        records=checked.text if artifact is None else None,
        artifact=artifact,
    )


def scope_of(task: TaskRow) -> BlockRange | None:
    """The task's blocks: its partition, or the range that it reads of triggering inputs that have blocks. For an
    update that has nothing new to read, the invalidated range."""
    if task.scope is not None:
        return task.scope
    reads = _by_block(task)
    return _hull(map(_window, reads)) or _hull(map(_invalidated, reads))


def remade(task: TaskRow) -> BlockRange | None:
    """The blocks that this task repeated because of an invalidation; None when it didn't run because of one. For an
    update, the range that it read of every invalidated input."""
    if task.scope is not None:
        again = any(read["trigger"] and read["invalidation"] for read in task.inputs or ())
        return task.scope if again else None
    reads = [read for read in _by_block(task) if read.invalidation]
    return _hull([*map(_window, reads), *map(_invalidated, reads)])


def revision_of(task: TaskRow, base: int) -> int:
    """The revision of rows that the task publishes; ``base`` is where those of its job's generation begin."""
    reads = render_payload.from_json(task.inputs or [])
    return base + sum(read.revision for read in reads) + sum((task.output_revisions or {}).values())


def _by_block(task: TaskRow) -> list[PayloadInput]:
    reads = render_payload.from_json(task.inputs or [])
    return [read for read in reads if read.trigger and read.cursor_column is None]


def _hull(spans: Iterable[BlockRange | None]) -> BlockRange | None:
    found = [span for span in spans if span is not None]
    if not found:
        return None
    return BlockRange(min(span.start for span in found), max(span.end for span in found))


def _window(read: PayloadInput) -> BlockRange | None:
    if not isinstance(read.after, int) or not isinstance(read.upto, int) or read.upto <= read.after:
        return None
    return BlockRange(max(0, read.after + 1), read.upto)


def _invalidated(read: PayloadInput) -> BlockRange | None:
    return BlockRange(read.invalidation.start, read.invalidation.end) if read.invalidation else None


async def retract_buffers(ctx: StepContext, tx: Transaction, completed: Sequence[TaskRow]) -> None:
    again = [(task, span) for task in completed if (span := remade(task)) is not None]
    if not again:
        return
    definitions = await ctx.definitions.get(tx, (task.job_id for task, _ in again))
    jobs = {(definition.dag_name, definition.name) for definition in definitions.values()}
    written = await buffers.written_by(tx, sorted(jobs))
    if not written:
        return
    bases = await buffers.revision_bases(tx, list(definitions))
    messages = [
        BufferRetract(
            batch_id=ctx.entropy.uuid(),
            dataset_uuid=target.dataset_uuid,
            dataset_version=target.dataset_version,
            producer=f"{target.dag_name}/{target.job_name}",
            task_id=task.task_id,
            attempt=task.state.attempt,
            revision=revision_of(task, bases[task.job_id]),
            scope_start=span.start,
            scope_end=span.end,
        )
        for task, span in again
        for target in written
        if (target.dag_name, target.job_name)
        == (definitions[task.job_id].dag_name, definitions[task.job_id].name)
    ]
    if messages:
        await buffers.add_retractions(tx, messages)
