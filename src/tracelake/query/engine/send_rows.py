"""A running query's rows, sent as they come: no more than were asked for, in frames of bounded size.

The socket's buffer is all that lies between engine and service. When nobody reads, the engine waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import duckdb
import pyarrow as pa

from tracelake.domain.errors import Invalid
from tracelake.query.engine.messages import (
    HEADER,
    ROWS,
    ROWS_FRAME_BYTES,
    Finished,
    Started,
    frame,
)

_ROWS_AT_ONCE = 8192

Send: TypeAlias = Callable[[bytes | pa.Buffer], object]


def send_rows(send: Send, query: duckdb.DuckDBPyRelation, max_rows: int, max_bytes: int) -> None:
    types = [str(kind) for kind in query.types]
    reader: pa.RecordBatchReader = query.to_arrow_reader(max(1, min(_ROWS_AT_ONCE, max_rows + 1)))
    send(frame(Started(reader.schema.serialize().to_pybytes(), types)))
    finished = _send_all(send, reader, max_rows, max_bytes)
    send(frame(finished))


def _send_all(send: Send, reader: pa.RecordBatchReader, max_rows: int, max_bytes: int) -> Finished:
    rows = size = 0
    frame_bytes = min(ROWS_FRAME_BYTES, max_bytes // 2)
    for batch in reader:
        left = max_rows - rows
        for part in _cut(batch.slice(0, left), frame_bytes):
            body = _as_stream(part)
            if size + body.size > max_bytes:
                if rows == 0 and part.num_rows == 1:
                    raise Invalid("ResultTooLarge", f"a single row has more than {max_bytes} bytes")
                return Finished(rows, truncated=True)
            send(HEADER.pack(body.size, ROWS))
            send(body)
            size += body.size
            rows += part.num_rows
        if batch.num_rows > left:
            return Finished(rows, truncated=True)
    return Finished(rows, truncated=False)


def _cut(batch: pa.RecordBatch, size: int) -> Iterator[pa.RecordBatch]:
    if batch.num_rows == 0:
        return
    if batch.nbytes <= size or batch.num_rows == 1:
        yield batch
        return
    half = batch.num_rows // 2
    yield from _cut(batch.slice(0, half), size)
    yield from _cut(batch.slice(half), size)


def _as_stream(batch: pa.RecordBatch) -> pa.Buffer:
    """With its schema and dictionaries, so that it can be read by itself."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue()
