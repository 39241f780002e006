"""``LogDecoder``: batches of logs to rows of decoded events.

A log matches an event if it has the event's signature hash and number of topics (for an anonymous event, the
number alone), its data is exactly the parameters' encoding, and it was made by a contract or by the protocol as
the event demands. If several events match by topics, the first that decodes is used. A log of a known signature
that no event decodes becomes a row with nothing but ``SKIPPED``, so that callers can count it.

Events are looked up by first topic, so a batch costs as much as the events in it, however many the decoder knows.
Parameters of one word are checked and converted a column at a time; only dynamic types, arrays and tuples are
read log by log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.domain.errors import Invalid
from tracelake.domain.event_abi import SYSTEM_ADDRESS, AbiEvent, Emitter, Param, Word, WordKind
from tracelake.evm.abi.columns import EVENT, ParamColumn, ParamForm, ParamLayout, lay_out
from tracelake.evm.abi.values import (
    SKIP_CODES,
    SKIP_REASONS,
    Payload,
    SkipReason,
    Undecodable,
    Words,
    binary_array,
    fixed_text,
    flat_bytes,
    hot_text,
    integer_floats,
    integer_texts,
    json_text,
    matrix,
    small_integers,
    word_bytes,
    word_value,
    wrong_rows,
)
from tracelake.evm.digit_columns import digit_columns
from tracelake.evm.hashing import keccak256
from tracelake.evm.hex_columns import Mask

SKIPPED = "__tracelake_skipped"
TOPICS = ("topic0", "topic1", "topic2", "topic3")
RAW = (*TOPICS, "data", "n_data_bytes")
"""Columns of a log that a decoded row doesn't keep, since the parameters contain them."""
NEEDED = ("block_number", "address", *TOPICS, "data")
BATCH_ROWS = 32_768
_WORD = 32
_ANY_WORD = Word(WordKind.BYTES, _WORD)
Codes = npt.NDArray[np.int8]
Places = npt.NDArray[np.int64]


def topic0(event: AbiEvent) -> bytes | None:
    """The first topic of an event's logs; None for an anonymous event."""
    return None if event.anonymous else keccak256(event.signature.encode())


@dataclass(frozen=True)
class LogDecoder:
    """Sent to executors by pickle. ``kept`` are the columns of the log that a decoded row keeps, before all
    others."""

    events: tuple[AbiEvent, ...]
    addresses: tuple[bytes, ...]
    kept: tuple[str, ...]
    hot: bool = False
    layout: ParamLayout = field(init=False)
    hashes: tuple[bytes | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        # The class is frozen, and these follow from its fields.
        object.__setattr__(self, "layout", lay_out(self.events, self.kept, hot=self.hot))
        object.__setattr__(self, "hashes", tuple(topic0(event) for event in self.events))

    @classmethod
    def of(
        cls,
        events: Sequence[AbiEvent],
        addresses: Sequence[bytes],
        columns: Sequence[str],
        *,
        hot: bool = False,
    ) -> LogDecoder:
        """The decoder for a table with these columns; all but ``RAW`` are kept."""
        if missing := [name for name in NEEDED if name not in columns]:
            raise Invalid("InputNotLogs", f"not a table of logs: it has no column {', '.join(missing)}")
        kept = tuple(name for name in columns if name not in RAW)
        if clash := [name for name in kept if name.lower() in (EVENT, SKIPPED)]:
            raise Invalid("InputNotLogs", f"the input has a column {clash[0]!r} itself; rename it")
        return cls(tuple(events), tuple(addresses), kept, hot)

    @cached_property
    def fields(self) -> list[pa.Field]:
        """The columns after ``kept``, with ``SKIPPED`` last."""
        params = [each for column in self.layout.columns for each in column.fields]
        return [pa.field(EVENT, pa.string()), *params, pa.field(SKIPPED, pa.string())]

    @cached_property
    def _known_topics(self) -> pa.Array:
        return pa.array(dict.fromkeys(each for each in self.hashes if each is not None), pa.binary())

    @cached_property
    def _events_of_topic(self) -> list[list[int]]:
        """The indexes of events by the index of their first topic in ``_known_topics``."""
        of_topic: dict[bytes, list[int]] = {}
        for index, each in enumerate(self.hashes):
            if each is not None:
                of_topic.setdefault(each, []).append(index)
        return list(of_topic.values())

    @cached_property
    def _anonymous(self) -> list[int]:
        return [index for index, each in enumerate(self.hashes) if each is None]

    @cached_property
    def _wanted_addresses(self) -> pa.Array:
        return pa.array(self.addresses, pa.binary())

    @property
    def postgres_types(self) -> dict[str, str]:
        return {column.name: column.postgres_type for column in self.layout.columns}

    def decode(self, logs: pa.Table) -> pa.Table:
        """Rows of decoded and skipped logs, not in the order of the logs."""
        parts = list(self.decode_batches(logs.to_batches(max_chunksize=BATCH_ROWS)))
        schema = pa.schema([*(logs.schema.field(name) for name in self.kept), *self.fields])
        return pa.Table.from_batches(parts, schema=schema.remove_metadata())

    def decode_batches(
        self, batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield from self._decode(batch)

    def _decode(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        rows = batch
        if self.addresses:
            rows = batch.filter(pc.is_in(_binary(batch.column("address")), value_set=self._wanted_addresses))
        if not len(rows):
            return
        count = np.zeros(len(rows), dtype=np.int8)
        for name in TOPICS:
            count += rows.column(name).is_valid().to_numpy(zero_copy_only=False)
        # -1 is a log of a signature that isn't known.
        codes = np.full(len(rows), -1, dtype=np.int8)
        emitters = _Emitters(rows)
        parts: list[_Part] = []
        for index, found in self._found_events(self._topic_indexes(rows)):
            event = self.events[index]
            places = emitters.emitted_by(event.emitter, found)
            if not event.anonymous:
                codes[places[codes[places] < 0]] = SKIP_CODES[SkipReason.OTHER_LAYOUT]
            # A code of 0 is a log that an earlier event has decoded.
            at = places[(codes[places] != 0) & (count[places] == event.topics)]
            if not len(at):
                continue
            own = rows.take(pa.array(at))
            # An anonymous event has no signature hash among its topics.
            first = 0 if event.anonymous else 1
            columns = tuple(self.layout.columns[place] for place in self.layout.of_events[index])
            indexed = [_binary(own.column(name)) for name in TOPICS[first : first + len(event.indexed)]]
            decoded = decode_event(event, columns, indexed, _binary(own.column("data")))
            codes[at] = decoded.codes
            good = at[decoded.codes == 0]
            if len(good):
                parts.append(_Part(index, good, decoded.columns))
        if parts:
            yield self._rows(rows, parts)
        if (skipped := codes > 0).any():
            yield self._skipped(rows.filter(pa.array(skipped)), codes[skipped])

    def _topic_indexes(self, rows: pa.RecordBatch) -> Places:
        """For each log the index of its first topic in ``_known_topics``, or -1."""
        # Nulls are compared as empty, which is no topic: an anonymous log may have none.
        found = pc.index_in(_binary(rows.column(TOPICS[0])), value_set=self._known_topics)
        return np.asarray(pc.fill_null(found, -1).to_numpy(zero_copy_only=False), dtype=np.int64)

    def _found_events(self, topics: Places) -> Iterator[tuple[int, Places]]:
        """The events whose first topic is in the batch, and anonymous ones, in their order: each with the places of
        the logs that it may be."""
        order = np.argsort(topics, kind="stable")
        present, starts = np.unique(topics[order], return_index=True)
        groups = dict(zip(present.tolist(), np.split(order, starts[1:]), strict=True))
        everywhere = np.arange(len(topics))
        found = [(index, everywhere) for index in self._anonymous]
        for topic, places in groups.items():
            if topic >= 0:
                found += [(index, places) for index in self._events_of_topic[topic]]
        return iter(sorted(found, key=lambda each: each[0]))

    def _rows(self, logs: pa.RecordBatch, parts: list[_Part]) -> pa.RecordBatch:
        """The rows of all events in one batch: a table may have many columns, and most are null in each event."""
        kept = logs.take(pa.array(np.concatenate([part.at for part in parts])))
        names = pa.array([self.events[part.index].name for part in parts], pa.string())
        lengths = np.array([len(part.at) for part in parts])
        filled: dict[int, list[tuple[int, list[pa.Array]]]] = {}
        for part, start in zip(parts, (np.cumsum(lengths) - lengths).tolist(), strict=True):
            for place, arrays in zip(self.layout.of_events[part.index], part.columns, strict=True):
                filled.setdefault(place, []).append((start, arrays))
        arrays = [kept.column(name) for name in self.kept]
        arrays.append(names.take(pa.array(np.repeat(np.arange(len(parts)), lengths))))
        for place, column in enumerate(self.layout.columns):
            for number, each in enumerate(column.fields):
                pieces = [(start, made[number]) for start, made in filled.get(place, ())]
                arrays.append(_spread(pieces, kept.num_rows, each.type))
        return self._batch(kept, [*arrays, pa.nulls(kept.num_rows, pa.string())])

    def _skipped(self, kept: pa.RecordBatch, codes: Codes) -> pa.RecordBatch:
        names = pa.array([None, *(reason.value for reason in SKIP_REASONS)], pa.string())
        # Skipped rows have the schema of the others, so that they travel in the same batches.
        nothing = [pa.nulls(kept.num_rows, each.type) for each in self.fields[:-1]]
        arrays = [kept.column(name) for name in self.kept]
        return self._batch(kept, [*arrays, *nothing, names.take(pa.array(codes))])

    def _batch(self, kept: pa.RecordBatch, arrays: list[pa.Array]) -> pa.RecordBatch:
        fields = [*(kept.schema.field(name) for name in self.kept), *self.fields]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


class _Emitters:
    """Which logs of a batch the protocol made, and which a contract."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows

    def emitted_by(self, emitter: Emitter, places: Places) -> Places:
        match emitter:
            case Emitter.ANY:
                return places
            case Emitter.PROTOCOL:
                return places[self._of_protocol[places]]
            case Emitter.CONTRACT:
                return places[~self._of_protocol[places]]
            case _:
                assert_never(emitter)

    @cached_property
    def _of_protocol(self) -> Mask:
        address = pa.scalar(SYSTEM_ADDRESS, pa.binary())
        same = pc.equal(_binary(self._rows.column("address")), address)
        return np.asarray(same.to_numpy(zero_copy_only=False))


@dataclass(frozen=True, slots=True)
class _Part:
    """The logs of a batch that are one event: their places, and the arrays of each parameter."""

    index: int
    at: Places
    columns: list[list[pa.Array]]


def _spread(pieces: list[tuple[int, pa.Array]], rows: int, kind: pa.DataType) -> pa.Array:
    """A column with arrays at their starts, and null in between."""
    if not pieces:
        return pa.nulls(rows, kind)
    spread: list[pa.Array] = []
    end = 0
    for start, piece in pieces:
        if start > end:
            spread.append(pa.nulls(start - end, kind))
        spread.append(piece)
        end = start + len(piece)
    if end < rows:
        spread.append(pa.nulls(rows - end, kind))
    return spread[0] if len(spread) == 1 else pa.concat_arrays(spread)


def _binary(values: pa.Array) -> pa.BinaryArray:
    """Values in the one form that this module reads: with 32-bit offsets, and empty instead of null."""
    plain = values if values.type == pa.binary() else values.cast(pa.binary())
    return pc.fill_null(plain, b"") if plain.null_count else plain


@dataclass(frozen=True, slots=True)
class Decoded:
    """``codes`` has one number per log (``values.SKIP_CODES``), ``columns`` the arrays of each parameter for
    logs with code 0."""

    codes: Codes
    columns: list[list[pa.Array]]


def decode_event(
    event: AbiEvent, columns: tuple[ParamColumn, ...], topics: list[pa.BinaryArray], data: pa.BinaryArray
) -> Decoded:
    """Decode logs that match an event by topics. ``topics`` are those of the indexed parameters, without nulls."""
    head_words = sum(param.type.words for param in event.unindexed)
    codes = _length_codes(event, head_words, topics, data)
    usable = codes == 0
    chosen = pa.array(usable)
    words = dict(
        _words(event, head_words, [topic.filter(chosen) for topic in topics], payload := data.filter(chosen))
    )
    looped = [index for index, param in enumerate(event.params) if _is_looped(param)]
    inner = _word_codes(event, words, len(payload))
    values = _loop(event, looped, head_words, payload, inner)
    codes[usable] = inner
    good = inner == 0
    made = []
    for index, (param, column) in enumerate(zip(event.params, columns, strict=True)):
        if index in values:
            made.append([_looped_array(param, column, values[index])])
        else:
            kind = param.type if isinstance(param.type, Word) else _ANY_WORD
            made.append(_word_arrays(kind, column, words[index][good]))
    return Decoded(codes, made)


def _length_codes(
    event: AbiEvent, head_words: int, topics: list[pa.BinaryArray], data: pa.BinaryArray
) -> Codes:
    lengths = pc.binary_length(data).to_numpy(zero_copy_only=False)
    if any(param.type.dynamic for param in event.unindexed):
        # Dynamic values follow the head, so only its length is known in advance.
        wrong = (lengths < head_words * _WORD) | (lengths % _WORD != 0)
    else:
        wrong = lengths != head_words * _WORD
    for topic in topics:
        wrong |= pc.binary_length(topic).to_numpy(zero_copy_only=False) != _WORD
    return np.where(wrong, SKIP_CODES[SkipReason.WRONG_LENGTH], 0).astype(np.int8)


def _words(
    event: AbiEvent, head_words: int, topics: list[pa.BinaryArray], data: pa.BinaryArray
) -> list[tuple[int, Words]]:
    """Parameters of one word, and hashes, each as a matrix with one word per log."""
    found: list[tuple[int, Words]] = []
    head = _head(data, head_words) if any(_is_word(param) for param in event.unindexed) else None
    place, topic = 0, 0
    for index, param in enumerate(event.params):
        if param.indexed:
            found.append((index, matrix(topics[topic], _WORD)))
            topic += 1
            continue
        if head is not None and _is_word(param):
            found.append((index, head[:, place * _WORD : (place + 1) * _WORD]))
        place += param.type.words
    return found


def _head(data: pa.BinaryArray, words: int) -> Words:
    """The first words of each value, as a matrix. Without dynamic parameters that is a view, not a copy."""
    content, starts = flat_bytes(data)
    width = words * _WORD
    if len(data) and (starts[-1] - starts[0]) == len(data) * width:
        return content[starts[0] : starts[-1]].reshape(len(data), width)
    if not len(data):
        return np.zeros((0, width), dtype=np.uint8)
    return np.asarray(content[starts[:-1, None].astype(np.int64) + np.arange(width)])


def _word_codes(event: AbiEvent, words: dict[int, Words], rows: int) -> Codes:
    codes = np.zeros(rows, dtype=np.int8)
    for index, param in enumerate(event.params):
        if index in words and isinstance(param.type, Word):
            wrong, reason = wrong_rows(param.type, words[index])
            # The first wrong parameter gives the reason.
            codes[wrong & (codes == 0)] = SKIP_CODES[reason]
    return codes


def _loop(
    event: AbiEvent, looped: list[int], head_words: int, data: pa.BinaryArray, codes: Codes
) -> dict[int, list[Any]]:
    """Values of parameters of more than one word, for logs that decode; sets the codes of the others."""
    values: dict[int, list[Any]] = {index: [] for index in looped}
    if not looped:
        return values
    places = _places(event)
    for row, content in enumerate(data):
        if codes[row]:
            continue
        try:
            payload = Payload(content.as_py(), head_words)
            found = [payload.param(event.params[index].type, places[index], head_words) for index in looped]
            # After all parameters: what is left then belongs to another layout.
            payload.finish()
        except Undecodable as refused:
            codes[row] = SKIP_CODES[refused.reason]
            continue
        for index, value in zip(looped, found, strict=True):
            values[index].append(value)
    return values


def _places(event: AbiEvent) -> dict[int, int]:
    """The position of each parameter in the head, in words."""
    places, place = {}, 0
    for index, param in enumerate(event.params):
        if not param.indexed:
            places[index] = place
            place += param.type.words
    return places


def _looped_array(param: Param, column: ParamColumn, values: list[Any]) -> pa.Array:
    match column.form:
        case ParamForm.JSON:
            return pa.array([json_text(param.type, value, hot=column.hot) for value in values], pa.string())
        case ParamForm.TEXT:
            return pa.array([hot_text(value) if column.hot else value for value in values], pa.string())
        case _:
            return pa.array(values, pa.binary())


def _word_arrays(kind: Word, column: ParamColumn, words: Words) -> list[pa.Array]:
    match column.form:
        case ParamForm.BOOL:
            return [pa.array(words[:, 31] == 1)]
        case ParamForm.INTEGER:
            return [small_integers(words)]
        case ParamForm.WIDE:
            texts = integer_texts(words, signed=kind.kind is WordKind.INT)
            if column.hot:
                return [texts]
            return [binary_array(words), texts, integer_floats(texts), *digit_columns(texts)]
        case ParamForm.TEXT:
            numbers = [int(word_value(kind, word.tobytes())) for word in words]
            return [pa.array([fixed_text(number, kind.places) for number in numbers], pa.string())]
        case _:
            return [binary_array(word_bytes(kind, words))]


def _is_word(param: Param) -> bool:
    return isinstance(param.type, Word)


def _is_looped(param: Param) -> bool:
    return not param.indexed and not isinstance(param.type, Word)
