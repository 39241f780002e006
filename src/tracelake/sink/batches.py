"""Messages of a buffer's queue: read into batches and retractions, or rejected with a reason.

Records are checked against the dataset's deployed schema. A schema only ever gains columns, so a batch that was
published under an older one fits as well; for an unknown schema the deployed one is fetched first.

Records that are too large for a message are in an artifact of their own. Once they are rows the artifact is
emptied, not removed: the message may be delivered again, and must then change nothing instead of looking like lost
records.

A message that can't be merged is rejected as a whole, and the others go on. A fault in the records themselves is
permanent, so the message is rejected at once; a fault that may pass (a refusal of the database, a missing artifact)
is retried ``MAX_TRIES`` times. The Dispatcher keeps dead letters, where people list and replay them; the queue
keeps those that even the Dispatcher refuses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec
import structlog

from tracelake.contracts.buffers import (
    MAX_BATCH_BYTES,
    BufferBatch,
    BufferMessage,
    BufferRetract,
    DeadLetterRequest,
    DeadLetterResponse,
)
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict, NotFound, TracelakeError, Unavailable
from tracelake.hot.buffers import Batch, BufferRow, BufferTable, Retraction, bytes_columns
from tracelake.leases.claim import WakeUps
from tracelake.leases.held_task import HeldTask, sendable
from tracelake.objects.base import ObjectLocation, ObjectStore, batch_location
from tracelake.queue.base import Message, Queue

MAX_TRIES = 3
MAX_REASON_CHARS = 4000
_NO_RECORDS = b"[]"
BufferChange = Batch | Retraction
SendDeadLetter = Callable[[DeadLetterRequest], Awaitable[DeadLetterResponse]]

_log = structlog.get_logger(__name__)


class PoisonMessage(Exception):
    """A message can't be merged. ``lasting``: trying again can't help."""

    def __init__(self, reason: str, *, lasting: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class ReceivedChange:
    """A message and the change that it asks of ``table``. ``size``: its bytes, about; ``artifact``: the object of
    its records, if it belongs to this message alone and may be emptied."""

    message: Message
    table: BufferTable
    change: BufferChange
    size: int
    artifact: ObjectLocation | None = None

    @property
    def row_count(self) -> int:
        return len(self.change.rows) if isinstance(self.change, Batch) else 0


class BatchReader:
    """``refresh`` returns the table with the deployed schema, after the data database has its columns."""

    def __init__(
        self,
        table: BufferTable,
        org_id: str,
        objects: ObjectStore,
        refresh: Callable[[], Awaitable[BufferTable]],
    ) -> None:
        self._org_id = org_id
        self._objects = objects
        self._refresh = refresh
        self._known: set[str] = set()
        self._use(table)

    def _use(self, table: BufferTable) -> None:
        self.table = table
        self._decoder = table.schema.decoder(self._org_id)
        self._bytes = bytes_columns(table.schema)
        self._known.add(table.schema.hash)

    async def read(self, message: Message) -> ReceivedChange:
        """Raises ``PoisonMessage`` for a message that can't be merged, ``Unavailable`` when it isn't clear."""
        body = self._decode(message)
        scope = _scope(body)
        if isinstance(body, BufferRetract):
            # Its type requires both ends.
            assert scope is not None
            retraction = Retraction(producer=body.producer, revision=body.revision, scope=scope)
            return ReceivedChange(message, self.table, retraction, 0)
        if body.schema_hash not in self._known:
            deployed = await self._refresh()
            if deployed.schema.hash != self.table.schema.hash:
                self._use(deployed)
            # Also if it isn't the deployed one: the rows are
            # checked against that, and one question is enough.
            self._known.add(body.schema_hash)
        text = await self._records(body)
        try:
            rows = self._with_bytes(self._decoder.rows(text))
        except TracelakeError as error:
            raise PoisonMessage(error.message, lasting=True) from None
        batch = Batch(producer=body.producer, revision=body.revision, scope=scope, rows=rows)
        return ReceivedChange(message, self.table, batch, len(text), self._own_artifact(body))

    async def empty(self, artifact: ObjectLocation) -> None:
        """Called after the records are committed. An artifact that can't be emptied only takes room."""
        try:
            await self._objects.put(artifact, _NO_RECORDS)
        except TracelakeError as error:
            _log.warning("artifact_not_emptied", artifact=artifact.uri, error=error.message)

    def _own_artifact(self, batch: BufferBatch) -> ObjectLocation | None:
        own = batch_location(self._objects.root, batch.dataset_uuid, batch.batch_id)
        # An object in any other place may belong to others: it is read and never emptied.
        return own if batch.artifact == own.uri else None

    def _decode(self, message: Message) -> BufferMessage:
        try:
            body: BufferMessage = msgspec.convert(message.body, BufferMessage)
        except msgspec.ValidationError as error:
            raise PoisonMessage(f"it isn't a message of a buffer: {error}", lasting=True) from None
        if body.dataset_version != self.table.dataset_version:
            raise PoisonMessage(
                f"it is for another version of the dataset, {body.dataset_version}", lasting=True
            )
        return body

    async def _records(self, batch: BufferBatch) -> str:
        if (batch.records is None) == (batch.artifact is None):
            raise PoisonMessage("a batch has either records or an artifact", lasting=True)
        if batch.records is not None:
            return batch.records
        try:
            location = self._objects.locate(batch.artifact or "")
            if not isinstance(location, ObjectLocation):
                raise PoisonMessage(f"its artifact {batch.artifact} isn't an object", lasting=True)
            return (await self._objects.read(location, MAX_BATCH_BYTES)).decode()
        except Unavailable:
            raise
        except TracelakeError as error:
            problem = f"its artifact {batch.artifact} can't be read: {error.message}"
            raise PoisonMessage(problem, lasting=not isinstance(error, NotFound)) from None
        except UnicodeDecodeError:
            raise PoisonMessage(f"its artifact {batch.artifact} is not UTF-8", lasting=True) from None

    def _with_bytes(self, rows: list[BufferRow]) -> Sequence[BufferRow]:
        """The rows with ``0x…`` decoded to bytes."""
        return [self._decode_bytes(row) for row in rows] if self._bytes else rows

    def _decode_bytes(self, row: BufferRow) -> BufferRow:
        values: list[Any] = list(row)
        for place in self._bytes:
            if values[place] is not None:
                values[place] = bytes.fromhex(values[place][2:])
        return tuple(values)


def _scope(body: BufferMessage) -> BlockRange | None:
    if body.scope_start is None and body.scope_end is None:
        return None
    try:
        # Without an end the range is invalid: -1 is below every start.
        return BlockRange(body.scope_start or 0, body.scope_end if body.scope_end is not None else -1)
    except ValueError as error:
        raise PoisonMessage(str(error), lasting=True) from None


class DeadLetters:
    def __init__(
        self, held: HeldTask, dataset_uuid: UUID, *, send: SendDeadLetter, messages: WakeUps, queue: Queue
    ) -> None:
        self._held = held
        self._dataset_uuid = dataset_uuid
        self._send = send
        self._messages = messages
        self._queue = queue

    async def reject(self, message: Message, poison: PoisonMessage) -> bool:
        """Whether the message became a dead letter, which is then stored; otherwise it is delivered again."""
        if not poison.lasting and message.receive_count < MAX_TRIES:
            self._held.log.warning(
                "message_refused",
                message_id=message.id,
                tries=message.receive_count,
                reason=poison.reason[:500],
            )
            self._messages.give_back([message.receipt])
            return False
        request = DeadLetterRequest(
            self._held.task_id,
            self._held.attempt,
            self._held.lease_token,
            self._dataset_uuid,
            dict(message.body),
            sendable(poison.reason)[:MAX_REASON_CHARS] or "the message can't be merged",
            message.receive_count,
        )
        try:
            await self._send(request)
        # Not about the message: the lease is lost, or the Dispatcher away, and it is rejected another time.
        except (Conflict, NotFound, Unavailable):
            # About this attempt or an outage, not about the message.
            raise
        except TracelakeError as error:
            self._held.log.error("dead_letter_refused", message_id=message.id, error=error.message)
            # The last resort: it must neither be lost nor hold up the others.
            await self._queue.dead_letter([message.receipt], request.reason)
        self._held.log.warning(
            "dead_letter", message_id=message.id, tries=message.receive_count, reason=poison.reason[:500]
        )
        self._messages.done([message.receipt])
        return True
