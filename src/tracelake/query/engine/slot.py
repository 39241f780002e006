"""One confined process, held by one caller for one query: ``parse`` it, then ``run`` it.

A query over its time is not asked to stop, since an engine in the middle of a long function doesn't listen: its
process is killed. The same goes for a slot that says what it has no reason to say. Whichever way a query ends
badly, the caller gets ``Invalid`` with a reason and the service goes on.
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
)
from tracelake.query.engine.attached import AttachedRelation
from tracelake.query.engine.channel import Garbled
from tracelake.query.engine.column_types import ColumnType, ResultForm
from tracelake.query.engine.compressed import has_compressed
from tracelake.query.engine.limits import SlotLimits, most_descriptors
from tracelake.query.engine.messages import (
    LONGEST_SCHEMA,
    ROWS_FRAME_BYTES,
    Attachment,
    Failed,
    Finished,
    Leave,
    Parameters,
    Parse,
    Parsed,
    Run,
    Said,
    Started,
    encode_params,
)
from tracelake.query.engine.parsed_query import ParsedQuery
from tracelake.query.engine.template import Template
from tracelake.query.engine.weight import shape_problem, stands_alone, weight
from tracelake.worker.sandbox import EndReason

DEFAULT_ROWS = 10_000
DEFAULT_BYTES = 64 * 1024 * 1024
#: Rows of more bytes are looked through in a thread, so that others are served meanwhile.
_SOON = 128 * 1024
#: Arrow rounds sizes up when it writes.
_SLACK = 256 * 1024
_PARSE_SECONDS = 10.0
_END_SECONDS = 10.0
_KINDS = {kind.status: kind for kind in (Forbidden, NotFound, TooLarge, Invalid, BadRequest, Unavailable)}


class _State(Enum):
    FRESH = "fresh"
    PARSED = "parsed"
    BUSY = "busy"
    DONE = "done"


@dataclass(slots=True)
class QueryResult:
    """``schema`` and ``columns`` (their types as the engine has them) are known at once. ``batches`` can be
    gone through once, while the slot is held; ``row_count`` and ``truncated`` are final when it has ended.
    ``bytes_scanned`` is the size of what was attached."""

    schema: pa.Schema
    columns: list[ColumnType]
    bytes_scanned: int
    batches: AsyncIterator[pa.RecordBatch] = field(repr=False)
    row_count: int = 0
    truncated: bool = False

    @property
    def types(self) -> list[str]:
        """The engine's names of them."""
        return [column.name for column in self.columns]

    async def table(self) -> pa.Table:
        return pa.Table.from_batches([batch async for batch in self.batches], self.schema)


class Slot:
    """Got by ``Slots.take``."""

    def __init__(self, template: Template, limits: SlotLimits) -> None:
        self._template = template
        self._process = template.process
        self._channel = template.channel
        self._limits = limits
        self._state = _State.FRESH

    async def parse(self, sql: str, params: Parameters = ()) -> ParsedQuery:
        """Raises Invalid or Forbidden with what is wrong with the SQL."""
        self._expect(_State.FRESH)
        deadline = self._deadline(min(_PARSE_SECONDS, self._limits.seconds))
        async with self._watched(deadline):
            await self._channel.say(Parse(sql, encode_params(params)))
            said = await self._channel.hear()
            if isinstance(said, Parsed):
                parsed = ParsedQuery.from_json(said.query)
                self._state = _State.PARSED
                return parsed
            raise self._failure(said)

    async def run(
        self,
        relations: Sequence[AttachedRelation],
        *,
        max_rows: int = DEFAULT_ROWS,
        max_bytes: int = DEFAULT_BYTES,
        row_bytes: int = DEFAULT_BYTES,
        form: ResultForm = ResultForm.ARROW,
    ) -> QueryResult:
        """Run what was parsed, for a result of this form. Once it returns, the relations may be closed. Raises
        Invalid, and so does going through the batches: ``QueryFailed`` (the engine's own complaint),
        ``QueryTimeout``, ``QueryOutOfMemory``, ``QueryCrashed``, ``TooManyFiles``, ``ResultTooWide``,
        ``ResultTooLarge`` (a single row, of more than ``row_bytes``). What is beyond ``max_rows`` or ``max_bytes``
        is left out, and ``truncated`` says so."""
        self._expect(_State.PARSED)
        descriptors = [fd for relation in relations for fd in (*relation.files, *relation.tables)]
        if len(descriptors) > most_descriptors():
            message = f"the query reads {len(descriptors)} files; {most_descriptors()} at most"
            raise Invalid("TooManyFiles", f"{message}: name a smaller range, or compact the dataset")
        attachments = [_attachment(relation) for relation in relations]
        scanned = sum(relation.bytes() for relation in relations)
        deadline = self._deadline(self._limits.seconds)
        async with self._watched(deadline):
            await self._channel.say(Run(attachments, max_rows, max_bytes, row_bytes, form))
            for relation in relations:
                await self._channel.pass_on([*relation.files, *relation.tables])
            said = await self._channel.hear()
            if not isinstance(said, Started):
                raise self._failure(said)
            schema = _schema(said)
        self._state = _State.BUSY
        result = QueryResult(schema, said.types, scanned, _nothing())
        result.batches = self._batches(result, deadline, max_rows, max_bytes, row_bytes)
        return result

    async def _batches(
        self, result: QueryResult, deadline: float, max_rows: int, max_bytes: int, row_bytes: int
    ) -> AsyncIterator[pa.RecordBatch]:
        while True:
            async with self._watched(deadline):
                said = await self._channel.hear(longest_rows=min(max_bytes, row_bytes))
                if isinstance(said, Finished):
                    self._state = _State.DONE
                    result.truncated = said.truncated
                    return
                if not isinstance(said, bytearray):
                    raise self._failure(said)
                if len(said) > _SOON:
                    batch = await asyncio.to_thread(_decode, said, result.schema, row_bytes)
                else:
                    batch = _decode(said, result.schema, row_bytes)
                result.row_count += batch.num_rows
                max_bytes -= len(said)
                if result.row_count > max_rows:
                    raise Garbled("more rows than were asked for")
                self._state = _State.BUSY
            yield batch

    async def leave(self) -> bool:
        """Whether the process can do another query: it could be asked to be ready, and nobody waits for it."""
        if self._process.ended.done() or self._state is _State.BUSY:
            return False
        if self._state is _State.FRESH:
            return True
        try:
            async with asyncio.timeout(_END_SECONDS):
                if self._state is _State.PARSED:
                    await self._channel.say(Leave())
                return self._template.is_ready(await self._channel.hear())
        except (TimeoutError, EOFError, OSError, Garbled, msgspec.MsgspecError):
            return False

    def _expect(self, state: _State) -> None:
        if self._state is not state:
            raise RuntimeError(f"a slot that is {self._state.value} can't do this")

    def _deadline(self, seconds: float) -> float:
        return asyncio.get_running_loop().time() + seconds

    @asynccontextmanager
    async def _watched(self, deadline: float) -> AsyncIterator[None]:
        """Left in any other way than by its end or a failure that the slot has told, the slot isn't used again."""
        self._state = _State.BUSY
        try:
            async with asyncio.timeout_at(deadline):
                yield
        except TimeoutError:
            self._process.kill()
            raise Invalid("QueryTimeout", f"the query took more than {self._limits.seconds:g} s") from None
        except (EOFError, ConnectionError):
            raise await self._how_it_ended() from None
        except (Garbled, msgspec.MsgspecError, pa.ArrowException):
            self._process.kill()
            raise Invalid("QueryCrashed", "the query broke the engine; it was stopped") from None

    async def _how_it_ended(self) -> Invalid:
        try:
            reason = await asyncio.wait_for(asyncio.shield(self._process.ended), _END_SECONDS)
        except TimeoutError:
            self._process.kill()
            reason = EndReason.KILLED
        if reason is EndReason.OUT_OF_MEMORY:
            return Invalid("QueryOutOfMemory", "the query needs more memory than one query may use")
        return Invalid("QueryCrashed", "the query broke the engine; it was stopped")

    def _failure(self, said: Said | bytearray) -> TracelakeError:
        if not isinstance(said, Failed) or said.status not in _KINDS:
            raise Garbled("not an answer")
        self._state = _State.DONE
        return _KINDS[said.status](said.reason, said.message)


def _attachment(relation: AttachedRelation) -> Attachment:
    columns = relation.columns.serialize().to_pybytes()
    return Attachment(relation.name, columns, len(relation.files), len(relation.tables))


def _schema(said: Started) -> pa.Schema:
    if len(said.schema) > LONGEST_SCHEMA:
        raise Garbled("a schema of more bytes than one can have")
    schema = pa.ipc.read_schema(pa.py_buffer(said.schema))
    if shape_problem(schema) or not stands_alone(schema) or len(said.types) != len(schema):
        raise Garbled("a result of a shape that is never sent")
    return schema


def _decode(stream: bytearray, schema: pa.Schema, row_bytes: int) -> pa.RecordBatch:
    """From a process that nobody trusts: nothing in it may point outside of it, or be more than it looks."""
    content = pa.py_buffer(stream)
    try:
        if has_compressed(content):
            raise Garbled("compressed rows")
    except (struct.error, IndexError):
        raise Garbled("not a stream") from None
    with pa.ipc.open_stream(content) as reader:
        if not reader.schema.equals(schema):
            raise Garbled("rows of another kind")
        batch = next(reader, None)
        if batch is None or next(reader, None) is not None:
            raise Garbled("one batch is sent at a time")
    batch.validate(full=True)
    most = row_bytes if batch.num_rows == 1 else ROWS_FRAME_BYTES
    if weight(batch) > most + _SLACK:
        raise Garbled("rows that are more than they look")
    return batch


async def _nothing() -> AsyncIterator[pa.RecordBatch]:
    return
    yield
