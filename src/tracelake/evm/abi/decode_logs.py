"""Batches of logs into rows of decoded events.

A log is an event's if it has its signature hash and its number of topics (an anonymous event's if it has the number
alone) and its data is exactly what the parameters are. Where several events fit by their topics, the first that
decodes is it. A log of a known signature that no event takes is a row with nothing but ``SKIPPED``, so that whoever
drives this can count it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.domain.errors import Invalid
from tracelake.domain.event_abi.model import Event
from tracelake.evm.abi.columns import EVENT, Layout, lay_out
from tracelake.evm.abi.decode_event import Codes, decode_event
from tracelake.evm.abi.outcome import CODES, REASONS, Skip
from tracelake.evm.keccak import keccak256

SKIPPED = "__tracelake_skipped"
TOPICS = ("topic0", "topic1", "topic2", "topic3")
RAW = (*TOPICS, "data", "n_data_bytes")
"""What of a log isn't kept: it is in the parameters."""
NEEDED = ("block_number", "address", *TOPICS, "data")
BATCH_ROWS = 32_768


def topic0(event: Event) -> bytes | None:
    """The hash that the logs of an event begin with; an anonymous one has none."""
    return None if event.anonymous else keccak256(event.signature.encode())


@dataclass(frozen=True)
class LogDecoder:
    """Travels to executors by pickle. ``kept`` are the columns of the log that a row begins with."""

    events: tuple[Event, ...]
    addresses: tuple[bytes, ...]
    kept: tuple[str, ...]
    hot: bool = False
    layout: Layout = field(init=False)
    hashes: tuple[bytes | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layout", lay_out(self.events, self.kept, hot=self.hot))
        object.__setattr__(self, "hashes", tuple(topic0(event) for event in self.events))

    @classmethod
    def of(
        cls, events: Sequence[Event], addresses: Sequence[bytes], columns: Sequence[str], *, hot: bool = False
    ) -> LogDecoder:
        """For a table with these columns; everything that isn't raw is carried over."""
        if missing := [name for name in NEEDED if name not in columns]:
            raise Invalid("InputNotLogs", f"not a table of logs: it has no column {', '.join(missing)}")
        kept = tuple(name for name in columns if name not in RAW)
        if clash := [name for name in kept if name.lower() in (EVENT, SKIPPED)]:
            raise Invalid("InputNotLogs", f"the input has a column {clash[0]!r} itself; rename it")
        return cls(tuple(events), tuple(addresses), kept, hot)

    @property
    def fields(self) -> list[pa.Field]:
        """The columns that are added behind ``kept``, ``SKIPPED`` last."""
        params = [each for column in self.layout.columns for each in column.fields]
        return [pa.field(EVENT, pa.string()), *params, pa.field(SKIPPED, pa.string())]

    @property
    def postgres_types(self) -> dict[str, str]:
        return {column.name: column.postgres_type for column in self.layout.columns}

    def decode(self, logs: pa.Table) -> pa.Table:
        """The rows of ``logs`` that are events or look like it, with ``SKIPPED``; not in the order of the logs."""
        parts = list(self.decode_batches(logs.to_batches(max_chunksize=BATCH_ROWS)))
        schema = pa.schema([*(logs.schema.field(name) for name in self.kept), *self.fields])
        return pa.Table.from_batches(parts, schema=schema.remove_metadata())

    def decode_batches(
        self, batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from self._decode(batch)

    def _decode(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        logs = _Logs(batch, self)
        count = np.zeros(len(logs.rows), dtype=np.int8)
        for name in TOPICS:
            count += logs.rows.column(name).is_valid().to_numpy(zero_copy_only=False)
        codes = self._known(logs)
        for index, event in enumerate(self.events):
            mine = (codes != 0) & (count == event.topics)
            if (expected := self.hashes[index]) is not None:
                mine &= logs.first_topic_is(expected)
            if not mine.any():
                continue
            at = np.flatnonzero(mine)
            rows = logs.rows.take(pa.array(at))
            first = 0 if event.anonymous else 1
            columns = tuple(self.layout.columns[place] for place in self.layout.of_events[index])
            topics = [_binary(rows.column(name)) for name in TOPICS[first : first + len(event.indexed)]]
            decoded = decode_event(event, columns, topics, _binary(rows.column("data")))
            codes[at] = decoded.codes
            good = rows.filter(pa.array(decoded.codes == 0))
            if good.num_rows:
                yield self._rows(good, index, decoded.columns)
        if (skipped := codes > 0).any():
            yield self._skipped(logs.rows.filter(pa.array(skipped)), codes[skipped])

    def _known(self, logs: _Logs) -> Codes:
        """Before anything is decoded: ``OTHER_LAYOUT`` for known signatures, -1 for strangers."""
        known = np.zeros(len(logs.rows), dtype=bool)
        for expected in {each for each in self.hashes if each is not None}:
            known |= logs.first_topic_is(expected)
        return np.where(known, CODES[Skip.OTHER_LAYOUT], -1).astype(np.int8)

    def _rows(self, kept: pa.RecordBatch, index: int, params: list[list[pa.Array]]) -> pa.RecordBatch:
        rows = kept.num_rows
        values: dict[int, list[pa.Array]] = dict(zip(self.layout.of_events[index], params, strict=True))
        arrays = [kept.column(name) for name in self.kept]
        arrays.append(pa.repeat(pa.scalar(self.events[index].name, pa.string()), rows))
        for place, column in enumerate(self.layout.columns):
            arrays += values.get(place) or [pa.nulls(rows, each.type) for each in column.fields]
        return self._batch(kept, [*arrays, pa.nulls(rows, pa.string())])

    def _skipped(self, kept: pa.RecordBatch, codes: Codes) -> pa.RecordBatch:
        names = pa.array([None, *(reason.value for reason in REASONS)], pa.string())
        nothing = [pa.nulls(kept.num_rows, each.type) for each in self.fields[:-1]]
        arrays = [kept.column(name) for name in self.kept]
        return self._batch(kept, [*arrays, *nothing, names.take(pa.array(codes))])

    def _batch(self, kept: pa.RecordBatch, arrays: list[pa.Array]) -> pa.RecordBatch:
        fields = [*(kept.schema.field(name) for name in self.kept), *self.fields]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


class _Logs:
    """The logs of a batch that are of the wanted contracts."""

    def __init__(self, batch: pa.RecordBatch, decoder: LogDecoder) -> None:
        self.rows = batch
        if decoder.addresses:
            wanted = pa.array(decoder.addresses, pa.binary())
            self.rows = batch.filter(pc.is_in(_binary(batch.column("address")), value_set=wanted))
        self._first = _binary(self.rows.column(TOPICS[0]))

    def first_topic_is(self, expected: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        same = pc.fill_null(pc.equal(self._first, pa.scalar(expected, pa.binary())), False)
        return np.asarray(same.to_numpy(zero_copy_only=False))


def _binary(values: pa.Array) -> pa.BinaryArray:
    """In the one form that is read here: a missing value is an empty one, and offsets have 32 bits."""
    plain = values if values.type == pa.binary() else values.cast(pa.binary())
    return pc.fill_null(plain, b"") if plain.null_count else plain
