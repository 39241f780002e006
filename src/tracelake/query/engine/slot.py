"""One confined process, held by one caller for one query: ``parse`` it, then ``run`` it.

A query over its time is not asked to stop, since an engine in the middle of a long function doesn't react: its
process is killed. So is a process that sends an unexpected message. However a query fails, the caller gets
``Invalid`` with a reason and the service goes on.

The service trusts nothing in the rows that a slot sends. Slots never compress rows, and a few compressed bytes
could become any number of rows when Arrow unpacks them; so ``has_compressed`` reads the head of each IPC message,
which is a FlatBuffer, before Arrow does.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum

import msgspec
import pyarrow as pa

from tracelake.domain.errors import (
    BadRequest,
    Forbidden,
    Invalid,
    NotFound,
    TooLarge,
    TracelakeError,
    Unavailable,
    error_of,
)
from tracelake.query.engine.attach import AttachedRelation
from tracelake.query.engine.column_types import (
    ResultColumnType,
    ResultFormat,
    shape_problem,
    stands_alone,
    weight,
)
from tracelake.query.engine.messages import (
    LONGEST_SCHEMA,
    ROWS_FRAME_BYTES,
    Attachment,
    FromSlot,
    Leave,
    Parameters,
    Parse,
    Parsed,
    ParsedQuery,
    QueryFailed,
    QueryFinished,
    RunQuery,
    Started,
    encode_params,
)
from tracelake.query.engine.restrict import SlotLimits, most_descriptors
from tracelake.query.engine.template import Template, UnexpectedMessage
from tracelake.sandbox.layout import EndReason

DEFAULT_ROWS = 10_000
DEFAULT_BYTES = 64 * 1024 * 1024
#: Rows of more bytes are checked in a thread, so that other requests are served meanwhile.
_INLINE_BYTES = 128 * 1024
#: Arrow rounds sizes up when it writes.
_SLACK = 256 * 1024
_PARSE_SECONDS = 10.0
_END_SECONDS = 10.0
#: A slot may answer with these statuses and no others.
_STATUSES = frozenset(
    kind.status for kind in (Forbidden, NotFound, TooLarge, Invalid, BadRequest, Unavailable)
)
#: Arrow's metadata version. Earlier ones recorded compression in another place.
_VERSION_5 = 4
#: Field numbers in a FlatBuffer ``Message``, its header kinds, and field numbers of those.
_VERSION, _HEADER_KIND, _HEADER = 0, 1, 2
_DICTIONARY, _ROWS = 2, 3
_ROWS_OF_DICTIONARY, _COMPRESSION = 1, 3


class _State(Enum):
    FRESH = "fresh"
    PARSED = "parsed"
    BUSY = "busy"
    DONE = "done"


@dataclass(slots=True)
class ResultStream:
    """``schema`` and ``columns`` (the engine's types) are known at once. ``batches`` can be iterated once, while
    the slot is held; ``row_count`` and ``truncated`` are final when it has ended. ``bytes_scanned`` is the size of
    the attached files and tables."""

    schema: pa.Schema
    columns: list[ResultColumnType]
    bytes_scanned: int
    batches: AsyncIterator[pa.RecordBatch] = field(repr=False)
    row_count: int = 0
    truncated: bool = False

    @property
    def types(self) -> list[str]:
        """The engine's names of the types."""
        return [column.name for column in self.columns]

    async def table(self) -> pa.Table:
        return pa.Table.from_batches([batch async for batch in self.batches], self.schema)


class Slot:
    """The slot that ``Slots.take`` gives."""

    def __init__(self, template: Template, limits: SlotLimits) -> None:
        self._template = template
        self._process = template.process
        self._channel = template.channel
        self._limits = limits
        self._state = _State.FRESH

    async def parse(self, sql: str, params: Parameters = ()) -> ParsedQuery:
        """Raises Invalid or Forbidden when the SQL isn't accepted."""
        self._expect(_State.FRESH)
        deadline = self._deadline(min(_PARSE_SECONDS, self._limits.seconds))
        async with self._watched(deadline):
            await self._channel.send(Parse(sql, encode_params(params)))
            received = await self._channel.receive()
            if isinstance(received, Parsed):
                parsed = ParsedQuery.from_json(received.query)
                self._state = _State.PARSED
                return parsed
            raise self._failure(received)

    async def run(
        self,
        relations: Sequence[AttachedRelation],
        *,
        max_rows: int = DEFAULT_ROWS,
        max_bytes: int = DEFAULT_BYTES,
        row_bytes: int = DEFAULT_BYTES,
        form: ResultFormat = ResultFormat.ARROW,
        hugeint_as_text: bool = False,
    ) -> ResultStream:
        """Run the parsed query, for a result of this form. Once it returns, the relations may be closed. Raises
        Invalid, and so does iterating the batches: ``QueryFailed`` (the engine's own error), ``HugeintTooWide`` (it
        works with ``hugeint_as_text``), ``QueryTimeout``,
        ``QueryOutOfMemory``, ``QueryCrashed``, ``TooManyFiles``, ``ResultTooWide``, ``ResultTooLarge`` (a single
        row of more than ``row_bytes``). Rows beyond ``max_rows`` or ``max_bytes`` are left out and ``truncated`` is
        set."""
        self._expect(_State.PARSED)
        descriptors = [fd for relation in relations for fd in (*relation.files, *relation.tables)]
        if len(descriptors) > most_descriptors():
            message = f"the query reads {len(descriptors)} files; the maximum is {most_descriptors()}"
            raise Invalid("TooManyFiles", f"{message}: name a smaller range, or compact the dataset")
        attachments = [_attachment(relation) for relation in relations]
        scanned = sum(relation.bytes() for relation in relations)
        deadline = self._deadline(self._limits.seconds)
        async with self._watched(deadline):
            await self._channel.send(
                RunQuery(attachments, max_rows, max_bytes, row_bytes, form, hugeint_as_text)
            )
            for relation in relations:
                await self._channel.send_descriptors([*relation.files, *relation.tables])
            received = await self._channel.receive()
            if not isinstance(received, Started):
                raise self._failure(received)
            schema = _schema(received)
        self._state = _State.BUSY
        result = ResultStream(schema, received.types, scanned, _no_batches())
        result.batches = self._batches(result, deadline, max_rows, max_bytes, row_bytes)
        return result

    async def _batches(
        self, result: ResultStream, deadline: float, max_rows: int, max_bytes: int, row_bytes: int
    ) -> AsyncIterator[pa.RecordBatch]:
        while True:
            async with self._watched(deadline):
                received = await self._channel.receive(longest_rows=min(max_bytes, row_bytes))
                if isinstance(received, QueryFinished):
                    self._state = _State.DONE
                    result.truncated = received.truncated
                    return
                if not isinstance(received, bytearray):
                    raise self._failure(received)
                if len(received) > _INLINE_BYTES:
                    batch = await asyncio.to_thread(_decode, received, result.schema, row_bytes)
                else:
                    batch = _decode(received, result.schema, row_bytes)
                result.row_count += batch.num_rows
                max_bytes -= len(received)
                if result.row_count > max_rows:
                    raise UnexpectedMessage("more rows than were asked for")
                self._state = _State.BUSY
            yield batch

    async def leave(self) -> bool:
        """Whether the process can run another query. Waits until it is ready, unless it still runs this one."""
        if self._process.ended.done() or self._state is _State.BUSY:
            return False
        # It has received no SQL, so the next caller can have it as it is.
        if self._state is _State.FRESH:
            return True
        try:
            async with asyncio.timeout(_END_SECONDS):
                if self._state is _State.PARSED:
                    await self._channel.send(Leave())
                self._template.next_turn()
                return self._template.is_ready(await self._channel.receive())
        except (TimeoutError, EOFError, OSError, UnexpectedMessage, msgspec.MsgspecError):
            return False

    def _expect(self, state: _State) -> None:
        if self._state is not state:
            raise RuntimeError(f"a slot that is {self._state.value} can't do this")

    def _deadline(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def _watched(self, deadline: float) -> AsyncIterator[None]:
        """The slot stays ``BUSY``, and so isn't used again, unless the block sets another state: at the query's
        end, or after a failure that the slot has reported."""
        self._state = _State.BUSY
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            self._process.kill()
            raise Invalid("QueryTimeout", f"the query took more than {self._limits.seconds:g} s") from None
        except (EOFError, ConnectionError):
            # The socket closes before the reason is known, and a lack of memory is reported in its own words.
            raise await self._how_it_ended() from None
        except (UnexpectedMessage, msgspec.MsgspecError, pa.ArrowException):
            self._process.kill()
            raise Invalid("QueryCrashed", "the query crashed the engine process") from None

    async def _how_it_ended(self) -> Invalid:
        try:
            # Shielded, since the pool waits for the same future.
            reason = await asyncio.wait_for(asyncio.shield(self._process.ended), _END_SECONDS)
        except TimeoutError:
            self._process.kill()
            reason = EndReason.KILLED
        if reason is EndReason.OUT_OF_MEMORY:
            return Invalid("QueryOutOfMemory", "the query needs more memory than one query may use")
        return Invalid("QueryCrashed", "the query crashed the engine process")

    def _failure(self, received: FromSlot | bytearray) -> TracelakeError:
        if not isinstance(received, QueryFailed) or received.status not in _STATUSES:
            raise UnexpectedMessage("not an answer")
        self._state = _State.DONE
        return error_of(received.status, received.reason, received.message)


def _attachment(relation: AttachedRelation) -> Attachment:
    columns = relation.columns.serialize().to_pybytes()
    return Attachment(relation.name, columns, len(relation.files), len(relation.tables))


def _schema(received: Started) -> pa.Schema:
    if len(received.schema) > LONGEST_SCHEMA:
        raise UnexpectedMessage("a schema of more bytes than one can have")
    schema = pa.ipc.read_schema(pa.py_buffer(received.schema))
    if shape_problem(schema) or not stands_alone(schema) or len(received.types) != len(schema):
        raise UnexpectedMessage("a result of a shape that is never sent")
    return schema


def _decode(stream: bytearray, schema: pa.Schema, row_bytes: int) -> pa.RecordBatch:
    """Checks rows of an untrusted process: offsets stay within the message, and they aren't larger than they
    look."""
    content = pa.py_buffer(stream)
    try:
        # Before Arrow reads anything: it would unpack the rows at once.
        if has_compressed(content):
            raise UnexpectedMessage("compressed rows")
    except (struct.error, IndexError):
        raise UnexpectedMessage("not a stream") from None
    with pa.ipc.open_stream(content) as reader:
        if not reader.schema.equals(schema):
            raise UnexpectedMessage("rows of another kind")
        batch = next(reader, None)
        if batch is None or next(reader, None) is not None:
            raise UnexpectedMessage("one batch is sent at a time")
    # Offsets of an untrusted process are checked before ``weight`` follows them.
    batch.validate(full=True)
    most = row_bytes if batch.num_rows == 1 else ROWS_FRAME_BYTES
    if weight(batch) > most + _SLACK:
        raise UnexpectedMessage("rows that are larger than they look")
    return batch


async def _no_batches() -> AsyncIterator[pa.RecordBatch]:
    return
    # Never reached: it makes this function a generator.
    yield


def has_compressed(stream: pa.Buffer) -> bool:
    """Whether any message of an IPC stream is, or may be, compressed. Raises ``struct.error`` or IndexError when it
    isn't an IPC stream."""
    reader = pa.ipc.MessageReader.open_stream(stream)
    while (message := next(reader, None)) is not None:
        head = message.metadata.to_pybytes()
        root = _unsigned(head, 0)
        version = _field(head, root, _VERSION)
        if version is None or head[version] != _VERSION_5:
            return True
        kind = _field(head, root, _HEADER_KIND)
        body = _field(head, root, _HEADER)
        if kind is None or body is None or head[kind] not in (_DICTIONARY, _ROWS):
            continue
        rows: int | None = body + _unsigned(head, body)
        if head[kind] == _DICTIONARY:
            inner = _field(head, body + _unsigned(head, body), _ROWS_OF_DICTIONARY)
            rows = None if inner is None else inner + _unsigned(head, inner)
        if rows is not None and _field(head, rows, _COMPRESSION) is not None:
            return True
    return False


def _unsigned(head: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", head, at)[0])


def _field(head: bytes, table: int, number: int) -> int | None:
    """The position of a table's field; None when the field is absent."""
    vtable = table - int(struct.unpack_from("<i", head, table)[0])
    if vtable < 0 or 4 + 2 * number >= int(struct.unpack_from("<H", head, vtable)[0]):
        return None
    offset = int(struct.unpack_from("<H", head, vtable + 4 + 2 * number)[0])
    return table + offset if offset else None
