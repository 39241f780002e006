"""The forms that a result is answered in: JSON and an Arrow stream here, a Parquet file in ``export``.

A form takes the batches as they come from the slot and keeps what it will answer with, within its limit. Nothing of
it is seen by anybody before ``publish``, which comes after the audit row.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

import msgspec
import pyarrow as pa

from tracelake.contracts.query_api import (
    ARROW_STREAM,
    QUERY_ID_HEADER,
    ROW_COUNT_HEADER,
    TRUNCATED_HEADER,
    QueriedDataset,
)
from tracelake.query.engine.column_types import ColumnType, ResultForm
from tracelake.query.engine.weight import weight
from tracelake.query.json_values import encode_row, encode_rows, plain_rows
from tracelake.serving.answer import JSON, Answer

SOON = 64 * 1024
"""Weight of rows that are turned into JSON where they are; more of it in a thread, so that others are served."""

ROWS_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class Facts:
    """What an answer says besides its rows."""

    query_id: UUID
    datasets: Sequence[QueriedDataset]
    truncated: bool


class Form(Protocol):
    kind: ResultForm
    rows: int
    """How many it has taken."""
    full: bool
    """It has had to leave rows out to stay within its limit."""

    async def begin(self, schema: pa.Schema, columns: Sequence[ColumnType]) -> None: ...

    async def add(self, batch: pa.RecordBatch) -> None: ...

    async def seal(self) -> None:
        """All rows are there: do everything that may fail."""
        ...

    async def publish(self, facts: Facts) -> Answer: ...

    async def discard(self) -> None:
        """Leave nothing behind; also called after ``publish``."""
        ...


class JsonForm:
    kind = ResultForm.JSON

    def __init__(self, most_bytes: int) -> None:
        self.rows = 0
        self.full = False
        self._left = most_bytes
        self._pieces: list[bytes] = []
        self._head = b""
        self._columns: Sequence[ColumnType] = ()

    async def begin(self, schema: pa.Schema, columns: Sequence[ColumnType]) -> None:
        self._columns = columns
        types = [column.name for column in columns]
        self._head = msgspec.json.encode({"columns": schema.names, "types": types})[:-1]

    async def add(self, batch: pa.RecordBatch) -> None:
        if self.full or not batch.num_rows:
            return
        if weight(batch) > SOON:
            await asyncio.to_thread(self._add, batch)
        else:
            self._add(batch)

    def _add(self, batch: pa.RecordBatch) -> None:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            some = batch.slice(start, ROWS_AT_ONCE)
            encoded = encode_rows(some, self._columns)
            if len(encoded) > self._left:
                self.full = True
                self._keep_first(some)
                return
            self._keep(encoded, some.num_rows)

    def _keep_first(self, batch: pa.RecordBatch) -> None:
        for row in plain_rows(batch, self._columns):
            encoded = encode_row(row)
            if len(encoded) > self._left:
                return
            self._keep(encoded, 1)

    def _keep(self, encoded: bytes, rows: int) -> None:
        self._pieces.append(encoded)
        self._left -= len(encoded) + 1
        self.rows += rows

    async def seal(self) -> None: ...

    async def publish(self, facts: Facts) -> Answer:
        rest = {
            "row_count": self.rows,
            "truncated": facts.truncated,
            "query_id": facts.query_id,
            "datasets": facts.datasets,
        }
        rows = b",".join(self._pieces)
        body = b"".join((self._head, b',"rows":[', rows, b"],", msgspec.json.encode(rest)[1:]))
        return Answer(body, media_type=JSON, headers=_headers(facts, self.rows))

    async def discard(self) -> None:
        self._pieces = []


class ArrowForm:
    kind = ResultForm.ARROW

    def __init__(self, most_bytes: int) -> None:
        self.rows = 0
        self.full = False
        self._most = most_bytes
        self._into = io.BytesIO()
        self._stream: pa.RecordBatchStreamWriter | None = None

    async def begin(self, schema: pa.Schema, columns: Sequence[ColumnType]) -> None:
        self._stream = pa.ipc.new_stream(self._into, schema)

    async def add(self, batch: pa.RecordBatch) -> None:
        assert self._stream is not None
        if self.full or self._into.tell() + batch.nbytes > self._most:
            self.full = True
            return
        self._stream.write_batch(batch)
        self.rows += batch.num_rows

    async def seal(self) -> None:
        assert self._stream is not None
        self._stream.close()

    async def publish(self, facts: Facts) -> Answer:
        body = self._into.getvalue()
        return Answer(body, media_type=ARROW_STREAM.encode(), headers=_headers(facts, self.rows))

    async def discard(self) -> None:
        self._into.close()


def _headers(facts: Facts, rows: int) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (QUERY_ID_HEADER.lower().encode(), str(facts.query_id).encode()),
        (ROW_COUNT_HEADER.lower().encode(), str(rows).encode()),
        (TRUNCATED_HEADER.lower().encode(), b"true" if facts.truncated else b"false"),
    )


def wants_arrow(accept: str | None) -> bool:
    """JSON is the default; Arrow is for those who name it and don't weigh it lower than JSON."""
    weights = {"application/json": 0.0, ARROW_STREAM: 0.0}
    for part in (accept or "").split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        if name in weights:
            weights[name] = max(weights[name], _weight(parameters))
    return weights[ARROW_STREAM] > 0 and weights[ARROW_STREAM] >= weights["application/json"]


def _weight(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
