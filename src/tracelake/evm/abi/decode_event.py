"""One event's parameters out of logs that have its topics: columns for those that decode, reasons for the others.

Parameters of one word are checked and converted a column at a time; only what has no fixed size, and arrays and
tuples, is read log by log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.domain.event_abi.model import Event, Param, Word, WordKind
from tracelake.evm.abi.as_json import fixed_text, hot_text, json_text
from tracelake.evm.abi.columns import Column, Form
from tracelake.evm.abi.integers import Words, integer_floats, integer_texts, small_integers
from tracelake.evm.abi.outcome import CODES, Skip, Undecodable
from tracelake.evm.abi.payload import Payload, word_value
from tracelake.evm.abi.words import binary_array, flat_bytes, matrix, word_bytes, wrong_rows

_WORD = 32
_ANY_WORD = Word(WordKind.BYTES, _WORD)

Codes = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class Decoded:
    """``codes`` has one number per log (``outcome.CODES``), ``columns`` the fields of each parameter for the logs
    whose number is 0."""

    codes: Codes
    columns: list[list[pa.Array]]


def decode_event(
    event: Event, columns: tuple[Column, ...], topics: list[pa.BinaryArray], data: pa.BinaryArray
) -> Decoded:
    """``topics`` are those of the indexed parameters; all values are there."""
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


def _length_codes(event: Event, head_words: int, topics: list[pa.BinaryArray], data: pa.BinaryArray) -> Codes:
    lengths = pc.binary_length(data).to_numpy(zero_copy_only=False)
    if any(param.type.dynamic for param in event.unindexed):
        wrong = (lengths < head_words * _WORD) | (lengths % _WORD != 0)
    else:
        wrong = lengths != head_words * _WORD
    for topic in topics:
        wrong |= pc.binary_length(topic).to_numpy(zero_copy_only=False) != _WORD
    return np.where(wrong, CODES[Skip.WRONG_LENGTH], 0).astype(np.int8)


def _words(
    event: Event, head_words: int, topics: list[pa.BinaryArray], data: pa.BinaryArray
) -> list[tuple[int, Words]]:
    """Each parameter of one word, and hashes, as a matrix of one word per log."""
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
    content, starts = flat_bytes(data)
    width = words * _WORD
    if len(data) and (starts[-1] - starts[0]) == len(data) * width:
        return content[starts[0] : starts[-1]].reshape(len(data), width)
    if not len(data):
        return np.zeros((0, width), dtype=np.uint8)
    return np.asarray(content[starts[:-1, None].astype(np.int64) + np.arange(width)])


def _word_codes(event: Event, words: dict[int, Words], rows: int) -> Codes:
    codes = np.zeros(rows, dtype=np.int8)
    for index, param in enumerate(event.params):
        if index in words and isinstance(param.type, Word):
            wrong, reason = wrong_rows(param.type, words[index])
            codes[wrong & (codes == 0)] = CODES[reason]
    return codes


def _loop(
    event: Event, looped: list[int], head_words: int, data: pa.BinaryArray, codes: Codes
) -> dict[int, list[Any]]:
    """Values of what has no single word, of the logs that decode; sets the codes of those that don't."""
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
            payload.finish()
        except Undecodable as refused:
            codes[row] = CODES[refused.reason]
            continue
        for index, value in zip(looped, found, strict=True):
            values[index].append(value)
    return values


def _places(event: Event) -> dict[int, int]:
    """Where in the head each parameter stands, in words."""
    places, place = {}, 0
    for index, param in enumerate(event.params):
        if not param.indexed:
            places[index] = place
            place += param.type.words
    return places


def _looped_array(param: Param, column: Column, values: list[Any]) -> pa.Array:
    match column.form:
        case Form.JSON:
            return pa.array([json_text(param.type, value, hot=column.hot) for value in values], pa.string())
        case Form.TEXT:
            return pa.array([hot_text(value) if column.hot else value for value in values], pa.string())
        case _:
            return pa.array(values, pa.binary())


def _word_arrays(kind: Word, column: Column, words: Words) -> list[pa.Array]:
    match column.form:
        case Form.BOOL:
            return [pa.array(words[:, 31] == 1)]
        case Form.INTEGER:
            return [small_integers(words)]
        case Form.WIDE:
            texts = integer_texts(words, signed=kind.kind is WordKind.INT)
            return [texts] if column.hot else [binary_array(words), texts, integer_floats(texts)]
        case Form.TEXT:
            numbers = [int(word_value(kind, word.tobytes())) for word in words]
            return [pa.array([fixed_text(number, kind.places) for number in numbers], pa.string())]
        case _:
            return [binary_array(word_bytes(kind, words))]


def _is_word(param: Param) -> bool:
    return isinstance(param.type, Word)


def _is_looped(param: Param) -> bool:
    return not param.indexed and not isinstance(param.type, Word)
