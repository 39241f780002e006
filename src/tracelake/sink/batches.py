"""Messages of a buffer's queue, read: what is to be merged, or why a message can't be.

Records are checked against the dataset's schema as it is deployed now. A schema only ever gains columns, so a batch
that was published under an older one fits as well; one that names a schema that isn't known yet has it asked for.

Records that were too large for a message lie in an artifact of its own. Once they are rows it is emptied and not
removed, for a message may always come again: it then has nothing to say, and isn't taken for one whose records are
lost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from tracelake.contracts.buffers import MAX_BATCH_BYTES, BufferBatch, BufferMessage, BufferRetract
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import NotFound, TracelakeError, Unavailable
from tracelake.hot.buffers import Batch, BufferTable, Retraction, Row, bytes_columns
from tracelake.objects.base import ObjectStore
from tracelake.objects.layout import batch_location
from tracelake.objects.prefix import ObjectLocation
from tracelake.queue.base import Message

Said = Batch | Retraction
_NO_RECORDS = b"[]"
_log = structlog.get_logger(__name__)


class Poison(Exception):
    """A message that can't be merged, and why. ``lasting`` when trying again can't help."""

    def __init__(self, reason: str, *, lasting: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Taken:
    """A message, what it says, and about how many bytes that is; ``table`` is what its rows are rows of, and
    ``artifact`` where they lie, if nobody else needs what is there."""

    message: Message
    table: BufferTable
    said: Said
    size: int
    artifact: ObjectLocation | None = None

    @property
    def row_count(self) -> int:
        return len(self.said.rows) if isinstance(self.said, Batch) else 0


class BatchReader:
    """``refresh`` answers the table with the schema that is deployed now, after the data database has it too."""

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

    async def read(self, message: Message) -> Taken:
        """``Poison`` when it can't be merged, ``Unavailable`` when it can't be known."""
        said = self._understand(message)
        scope = _scope(said)
        if isinstance(said, BufferRetract):
            assert scope is not None
            retraction = Retraction(producer=said.producer, revision=said.revision, scope=scope)
            return Taken(message, self.table, retraction, 0)
        if said.schema_hash not in self._known:
            deployed = await self._refresh()
            if deployed.schema.hash != self.table.schema.hash:
                self._use(deployed)
            self._known.add(said.schema_hash)
        text = await self._records(said)
        try:
            rows = self._with_bytes(self._decoder.rows(text))
        except TracelakeError as error:
            raise Poison(error.message, lasting=True) from None
        batch = Batch(producer=said.producer, revision=said.revision, scope=scope, rows=rows)
        return Taken(message, self.table, batch, len(text), self._own_artifact(said))

    async def empty(self, artifact: ObjectLocation) -> None:
        """After its records are rows for good. What isn't emptied only takes room."""
        try:
            await self._objects.put(artifact, _NO_RECORDS)
        except TracelakeError as error:
            _log.warning("artifact_not_emptied", artifact=artifact.uri, error=error.message)

    def _own_artifact(self, said: BufferBatch) -> ObjectLocation | None:
        own = batch_location(self._objects.root, said.dataset_uuid, said.batch_id)
        return own if said.artifact == own.uri else None

    def _understand(self, message: Message) -> BufferMessage:
        try:
            said: BufferMessage = msgspec.convert(message.body, BufferMessage)
        except msgspec.ValidationError as error:
            raise Poison(f"it isn't a message of a buffer: {error}", lasting=True) from None
        if said.dataset_version != self.table.dataset_version:
            raise Poison(f"it is for another version of the dataset, {said.dataset_version}", lasting=True)
        return said

    async def _records(self, said: BufferBatch) -> str:
        if (said.records is None) == (said.artifact is None):
            raise Poison("a batch has either records or an artifact", lasting=True)
        if said.records is not None:
            return said.records
        try:
            location = self._objects.locate(said.artifact or "")
            if not isinstance(location, ObjectLocation):
                raise Poison(f"its artifact {said.artifact} is no object", lasting=True)
            return (await self._objects.read(location, MAX_BATCH_BYTES)).decode()
        except Unavailable:
            raise
        except TracelakeError as error:
            problem = f"its artifact {said.artifact} can't be read: {error.message}"
            raise Poison(problem, lasting=not isinstance(error, NotFound)) from None
        except UnicodeDecodeError:
            raise Poison(f"its artifact {said.artifact} is not UTF-8", lasting=True) from None

    def _with_bytes(self, rows: list[Row]) -> Sequence[Row]:
        """``0x…`` as the bytes that it spells."""
        return [self._spelt_out(row) for row in rows] if self._bytes else rows

    def _spelt_out(self, row: Row) -> Row:
        values: list[Any] = list(row)
        for place in self._bytes:
            if values[place] is not None:
                values[place] = bytes.fromhex(values[place][2:])
        return tuple(values)


def _scope(said: BufferMessage) -> BlockRange | None:
    if said.scope_start is None and said.scope_end is None:
        return None
    try:
        return BlockRange(said.scope_start or 0, said.scope_end if said.scope_end is not None else -1)
    except ValueError as error:
        raise Poison(str(error), lasting=True) from None
