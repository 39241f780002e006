"""Values of any type out of a log's data, one log at a time: what has no fixed place, or no single column.

Strict and safe with hostile data. Every word of the data is read at most once, which is how encoders lay it out, so
decoding takes time in proportion to the data however its offsets point into each other; recursion goes as deep as
the type, never as deep as the data.
"""

from __future__ import annotations

from typing import Any, assert_never

from tracelake.domain.event_abi.model import AbiType, Array, Bytes, Tuple, Word, WordKind
from tracelake.evm.abi.outcome import Skip, Undecodable
from tracelake.evm.abi.words import ADDRESS_BYTES, byte_count

_WORD = 32


class Payload:
    """Reads one log's data, whose head has ``head_words`` words that others may have read already."""

    def __init__(self, data: bytes, head_words: int) -> None:
        if len(data) % _WORD or len(data) < head_words * _WORD:
            raise Undecodable(Skip.WRONG_LENGTH)
        self._data = data
        self._unread = len(data) // _WORD - head_words
        self._end = head_words * _WORD

    def param(self, kind: AbiType, head_word: int, head_words: int) -> Any:
        """A parameter, by where it stands in the head."""
        return self._field(kind, 0, head_word * _WORD, head_words * _WORD)

    def finish(self) -> None:
        """Nothing may be left over: then it was another event's data."""
        if self._end != len(self._data):
            raise Undecodable(Skip.WRONG_LENGTH)

    def _field(self, kind: AbiType, base: int, at: int, head_size: int) -> Any:
        """What stands at ``at``, or where the offset there points to, counted from ``base``."""
        if not kind.dynamic:
            return self._static(kind, at)
        offset = self._number(at)
        if offset < head_size or offset % _WORD or base + offset >= len(self._data):
            raise Undecodable(Skip.BAD_OFFSET)
        return self._dynamic(kind, base + offset)

    def _static(self, kind: AbiType, at: int) -> Any:
        match kind:
            case Word():
                return word_value(kind, self._data[at : at + _WORD])
            case Array(item, length):
                assert length is not None
                step = item.words * _WORD
                return [self._static(item, at + step * index) for index in range(length)]
            case Tuple(fields):
                values = []
                for field in fields:
                    values.append(self._static(field.type, at))
                    at += field.type.words * _WORD
                return values
            case Bytes():
                raise AssertionError("bytes have no fixed size")
            case _:
                assert_never(kind)

    def _dynamic(self, kind: AbiType, at: int) -> Any:
        match kind:
            case Bytes(text):
                return self._bytes(at, text=text)
            case Array(item, None):
                self._spend(1, at)
                return self._items(item, self._number(at), at + _WORD)
            case Array(item, int(length)):
                return self._items(item, length, at)
            case Tuple(fields):
                head = sum(field.type.words for field in fields)
                self._spend(head, at)
                values, place = [], at
                for field in fields:
                    values.append(self._field(field.type, at, place, head * _WORD))
                    place += field.type.words * _WORD
                return values
            case _:
                raise AssertionError("a word is not dynamic")

    def _items(self, item: AbiType, length: int, base: int) -> list[Any]:
        step = item.words * _WORD
        self._spend(length * item.words, base)
        return [self._field(item, base, base + step * index, length * step) for index in range(length)]

    def _bytes(self, at: int, *, text: bool) -> bytes | str:
        self._spend(1, at)
        length = self._number(at)
        words = -(-length // _WORD)
        start = at + _WORD
        self._spend(words, start)
        value = self._data[start : start + length]
        if any(self._data[start + length : start + words * _WORD]):
            raise Undecodable(Skip.PADDING)
        if not text:
            return value
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise Undecodable(Skip.BAD_UTF8) from None

    def _number(self, at: int) -> int:
        return int.from_bytes(self._data[at : at + _WORD], "big")

    def _spend(self, words: int, at: int) -> None:
        """These words are about to be read."""
        end = at + words * _WORD
        if words > self._unread or end > len(self._data):
            raise Undecodable(Skip.BAD_OFFSET)
        self._unread -= words
        self._end = max(self._end, end)


def word_value(kind: Word, word: bytes) -> int | bool | bytes:
    """Fixed-point numbers as the integer that they are encoded in."""
    match kind.kind:
        case WordKind.UINT | WordKind.UFIXED:
            value = int.from_bytes(word, "big")
            if value >> kind.size:
                raise Undecodable(Skip.PADDING)
            return value
        case WordKind.INT | WordKind.FIXED:
            value = int.from_bytes(word, "big", signed=True)
            if not -(1 << kind.size - 1) <= value < 1 << kind.size - 1:
                raise Undecodable(Skip.PADDING)
            return value
        case WordKind.ADDRESS:
            return _cut(word, _WORD - ADDRESS_BYTES, leading=True)
        case WordKind.BOOL:
            value = int.from_bytes(word, "big")
            if value > 1:
                raise Undecodable(Skip.BAD_BOOL)
            return value == 1
        case WordKind.BYTES | WordKind.FUNCTION:
            return _cut(word, byte_count(kind), leading=False)
        case _:
            assert_never(kind.kind)


def _cut(word: bytes, at: int, *, leading: bool) -> bytes:
    padding, value = (word[:at], word[at:]) if leading else (word[at:], word[:at])
    if any(padding):
        raise Undecodable(Skip.PADDING)
    return value
