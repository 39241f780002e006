"""A running query's rows, sent as they come: no more than were asked for, in frames of bounded size.

The socket's buffer is all that lies between engine and service. When nobody reads, the engine waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

import duckdb
import pyarrow as pa

from tracelake.domain.errors import Invalid
from tracelake.query.engine.column_types import (
    carried,
    column_types,
    must_be_checked,
    no_such_value,
    unfit,
)
from tracelake.query.engine.messages import (
    HEADER,
    ROWS,
    ROWS_FRAME_BYTES,
    Finished,
    Run,
    Started,
    frame,
)
from tracelake.query.engine.weight import MOST_COLUMNS, shape_problem, weight

_ROWS_AT_ONCE = 8192

Send: TypeAlias = Callable[[bytes | pa.Buffer], object]


def send_rows(send: Send, query: duckdb.DuckDBPyRelation, order: Run) -> None:
    if len(query.columns) > MOST_COLUMNS:
        raise _too_wide(f"the result has {len(query.columns)} columns; {MOST_COLUMNS} at most")
    types = column_types(query)
    try:
        rows = carried(query, order.form)
        reader: pa.RecordBatchReader = rows.to_arrow_reader(max(1, min(_ROWS_AT_ONCE, order.max_rows + 1)))
        if problem := shape_problem(reader.schema):
            raise _too_wide(problem)
        send(frame(Started(reader.schema.serialize().to_pybytes(), types)))
        batches = _checked(reader) if must_be_checked(types, order.form) else reader
        finished = _send_all(send, batches, order)
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise unfit(error) or error from None
    send(frame(finished))


def _checked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The service would take a value that is none for a broken engine."""
    for batch in batches:
        try:
            batch.validate(full=True)
        except pa.ArrowInvalid as error:
            raise no_such_value(str(error)) from None
        yield batch


def _too_wide(problem: str) -> Invalid:
    return Invalid("ResultTooWide", f"{problem}: name those that are needed")


def _send_all(send: Send, batches: Iterable[pa.RecordBatch], order: Run) -> Finished:
    """A piece is within the row's limit by its weight, and all of them within the result's by their bytes."""
    rows = size = 0
    max_rows, row_bytes = order.max_rows, min(order.row_bytes, order.max_bytes)
    for batch in batches:
        left = max_rows - rows
        for part, heavy in _cut(batch.slice(0, left), min(ROWS_FRAME_BYTES, row_bytes // 2)):
            body = _as_stream(part) if heavy <= row_bytes else None
            if body is None or body.size > row_bytes or size + body.size > order.max_bytes:
                if rows == 0 and part.num_rows == 1:
                    raise Invalid("ResultTooLarge", f"a single row has more than {row_bytes} bytes")
                return Finished(rows, truncated=True)
            send(HEADER.pack(body.size, ROWS))
            send(body)
            size += body.size
            rows += part.num_rows
        if batch.num_rows > left:
            return Finished(rows, truncated=True)
    return Finished(rows, truncated=False)


def _cut(batch: pa.RecordBatch, size: int) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Pieces with what they weigh: no more than ``size``, unless it is a single row."""
    if batch.num_rows == 0:
        return
    heavy = weight(batch)
    if batch.num_rows == 1 or heavy <= size:
        yield batch, heavy
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
