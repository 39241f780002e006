"""ABI values: strict decoding of words and payloads, and their form as Arrow arrays and JSON.

Words are checked a column at a time, as strictly as a contract's decoder: an address has twelve zero bytes
before it, a bool is 0 or 1, a short integer is zero- or sign-extended, and short bytes end in zeros. So a log
of another event with the same signature hash is detected instead of being stored as something else. 256-bit
integers become exact text and the nearest float by Arrow's own casts instead of a loop. ``Words`` is a matrix
of one big-endian 32-byte word per row.

``Payload`` reads values of any type from the data of one log. It is safe with hostile data: every word is read
at most once, which is how encoders lay it out, so decoding takes time in proportion to the data however its
offsets point into each other; recursion is as deep as the type, never as deep as the data.

JSON depends on the type alone. Integers of up to 48 bits are numbers, wider ones decimal strings, since many
readers parse numbers as doubles; addresses and bytes are ``0x`` and hex digits; a tuple is an object, or a list
if one of its fields has no name or two have the same.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from enum import StrEnum
from typing import Any, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.domain.event_abi import AbiType, Array, Bytes, Tuple, Word, WordKind

ADDRESS_BYTES = 20
FUNCTION_BYTES = 24
Words: TypeAlias = "npt.NDArray[np.uint8]"
_WORD = 32
_EXACT_IN_DOUBLE = 48


class SkipReason(StrEnum):
    """Why a log with an event's signature isn't decoded as that event. Skipped logs are counted by these names."""

    OTHER_LAYOUT = "other_layout"
    """The number of topics differs: other parameters are indexed."""
    WRONG_LENGTH = "wrong_length"
    """Data or a topic is shorter or longer than the parameters are."""
    PADDING = "padding"
    """A value is out of its type's range, or padding isn't zero."""
    BAD_BOOL = "bad_bool"
    BAD_OFFSET = "bad_offset"
    """An offset or a length points outside of the data, or twice to the same place."""
    BAD_UTF8 = "bad_utf8"


SKIP_REASONS: tuple[SkipReason, ...] = tuple(SkipReason)
SKIP_CODES: dict[SkipReason, int] = {reason: code for code, reason in enumerate(SKIP_REASONS, 1)}
"""Numbers for arrays of reasons; 0 is a log that decodes."""


class Undecodable(Exception):
    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


def wrong_rows(kind: Word, words: Words) -> tuple[npt.NDArray[np.bool_], SkipReason]:
    """A mask of the rows that don't hold a value of the type, and the reason to skip them."""
    match kind.kind:
        case WordKind.UINT | WordKind.UFIXED:
            return _any(words[:, : 32 - kind.size // 8]), SkipReason.PADDING
        case WordKind.INT | WordKind.FIXED:
            before = 32 - kind.size // 8
            extension = np.where(words[:, before] & 0x80, 0xFF, 0).astype(np.uint8)
            return _any(words[:, :before] != extension[:, None]), SkipReason.PADDING
        case WordKind.ADDRESS:
            return _any(words[:, : 32 - ADDRESS_BYTES]), SkipReason.PADDING
        case WordKind.BOOL:
            return _any(words[:, :31]) | (words[:, 31] > 1), SkipReason.BAD_BOOL
        case WordKind.BYTES | WordKind.FUNCTION:
            return _any(words[:, byte_count(kind) :]), SkipReason.PADDING
        case _:
            assert_never(kind.kind)


def _any(cells: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    return np.asarray(cells.any(axis=1))


def byte_count(kind: Word) -> int:
    return FUNCTION_BYTES if kind.kind is WordKind.FUNCTION else kind.size


def word_bytes(kind: Word, words: Words) -> Words:
    """The bytes of an address or of ``bytesN``."""
    return words[:, 32 - ADDRESS_BYTES :] if kind.kind is WordKind.ADDRESS else words[:, : byte_count(kind)]


def binary_array(rows: Words) -> pa.BinaryArray:
    """An array with one value per row of a matrix."""
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows))]
    )


def matrix(values: pa.BinaryArray, width: int) -> Words:
    """The bytes of values of one width; none is null."""
    if not len(values):
        return np.zeros((0, width), dtype=np.uint8)
    data, start = flat_bytes(values)
    return data[start[0] : start[-1]].reshape(len(values), width)


def flat_bytes(values: pa.BinaryArray) -> tuple[Words, npt.NDArray[np.int32]]:
    """All bytes behind an array, and the start of each value; the last entry is the end of the last value."""
    _, offsets, data = values.buffers()
    starts = np.frombuffer(offsets, dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    content = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return content, starts


def integer_texts(words: Words, *, signed: bool) -> pa.StringArray:
    rows = len(words)
    # The usual amounts fit 64 bits, where Arrow formats them natively.
    if not words[:, :24].any():
        return pc.cast(pa.array(_low(words)), pa.string())
    little = np.ascontiguousarray(words[:, ::-1])
    # Arrow's decimal256 is a signed 256-bit integer inside, whatever precision its type declares.
    decimals = pa.Array.from_buffers(pa.decimal256(76, 0), rows, [None, pa.py_buffer(little)])
    texts = pc.cast(decimals, pa.string())
    # Read as signed, a number with the highest bit set came out negative.
    above = words[:, 0] >= 0x80
    if signed or not above.any():
        return texts
    huge = [str(int.from_bytes(word.tobytes(), "big")) for word in words[above]]
    return pc.replace_with_mask(texts, pa.array(above), pa.array(huge, pa.string()))


def integer_floats(texts: pa.StringArray) -> pa.DoubleArray:
    """The nearest doubles, parsed from the digits."""
    return pc.cast(texts, pa.float64())


def small_integers(words: Words) -> pa.Int64Array:
    """The integers of words that are known to fit 64 signed bits."""
    return pa.array(_low(words).view(np.int64))


def _low(words: Words) -> npt.NDArray[np.uint64]:
    low: Any = np.ascontiguousarray(words[:, 24:]).view(">u8").reshape(-1)
    return np.asarray(low.astype(np.uint64))


class Payload:
    """Reads the data of one log. Its head has ``head_words`` words, which may have been read a column at a time."""

    def __init__(self, data: bytes, head_words: int) -> None:
        if len(data) % _WORD or len(data) < head_words * _WORD:
            raise Undecodable(SkipReason.WRONG_LENGTH)
        self._data = data
        self._unread = len(data) // _WORD - head_words
        self._end = head_words * _WORD

    def param(self, kind: AbiType, head_word: int, head_words: int) -> Any:
        """Read a parameter by its position in the head."""
        return self._field(kind, 0, head_word * _WORD, head_words * _WORD)

    def finish(self) -> None:
        """Raise ``Undecodable`` if data is left over, as it is for another event's data."""
        if self._end != len(self._data):
            raise Undecodable(SkipReason.WRONG_LENGTH)

    def _field(self, kind: AbiType, base: int, at: int, head_size: int) -> Any:
        """Read the value at ``at``, or the one that the offset there points to, relative to ``base``."""
        if not kind.dynamic:
            return self._static(kind, at)
        offset = self._number(at)
        # No encoder points into the head, off a word's boundary or past the end.
        if offset < head_size or offset % _WORD or base + offset >= len(self._data):
            raise Undecodable(SkipReason.BAD_OFFSET)
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
        # Encoders pad with zeros: anything else is another event's data.
        if any(self._data[start + length : start + words * _WORD]):
            raise Undecodable(SkipReason.PADDING)
        if not text:
            return value
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            raise Undecodable(SkipReason.BAD_UTF8) from None

    def _number(self, at: int) -> int:
        return int.from_bytes(self._data[at : at + _WORD], "big")

    def _spend(self, words: int, at: int) -> None:
        """Count words before they are read: a word that is read twice leaves too few for the rest."""
        end = at + words * _WORD
        if words > self._unread or end > len(self._data):
            raise Undecodable(SkipReason.BAD_OFFSET)
        self._unread -= words
        self._end = max(self._end, end)


def word_value(kind: Word, word: bytes) -> int | bool | bytes:
    """Decode one word. A fixed-point number is returned as its encoded integer."""
    match kind.kind:
        case WordKind.UINT | WordKind.UFIXED:
            value = int.from_bytes(word, "big")
            if value >> kind.size:
                raise Undecodable(SkipReason.PADDING)
            return value
        case WordKind.INT | WordKind.FIXED:
            value = int.from_bytes(word, "big", signed=True)
            if not -(1 << kind.size - 1) <= value < 1 << kind.size - 1:
                raise Undecodable(SkipReason.PADDING)
            return value
        case WordKind.ADDRESS:
            return _cut(word, _WORD - ADDRESS_BYTES, leading=True)
        case WordKind.BOOL:
            value = int.from_bytes(word, "big")
            if value > 1:
                raise Undecodable(SkipReason.BAD_BOOL)
            return value == 1
        case WordKind.BYTES | WordKind.FUNCTION:
            return _cut(word, byte_count(kind), leading=False)
        case _:
            assert_never(kind.kind)


def _cut(word: bytes, at: int, *, leading: bool) -> bytes:
    padding, value = (word[:at], word[at:]) if leading else (word[at:], word[:at])
    if any(padding):
        raise Undecodable(SkipReason.PADDING)
    return value


def json_text(kind: AbiType, value: Any, *, hot: bool = False) -> str:
    return orjson.dumps(_value(kind, value, hot)).decode()


def hot_text(text: str) -> str:
    """Text without NUL, which Postgres can't store and contracts may emit."""
    return text.replace("\0", "\ufffd")


def _value(kind: AbiType, value: Any, hot: bool) -> Any:
    match kind:
        case Word():
            return _word(kind, value)
        case Bytes(text=True):
            return hot_text(value) if hot else value
        case Bytes():
            return "0x" + value.hex()
        case Array(item, _):
            return [_value(item, each, hot) for each in value]
        case Tuple(fields):
            values = [_value(field.type, each, hot) for field, each in zip(fields, value, strict=True)]
            names = [field.name for field in fields]
            return (
                values
                if "" in names or len(set(names)) < len(names)
                else dict(zip(names, values, strict=True))
            )
        case _:
            assert_never(kind)


def _word(kind: Word, value: Any) -> Any:
    match kind.kind:
        case WordKind.UINT | WordKind.INT:
            return value if kind.size <= _EXACT_IN_DOUBLE else str(value)
        case WordKind.FIXED | WordKind.UFIXED:
            return fixed_text(value, kind.places)
        case WordKind.BOOL:
            return value
        case WordKind.ADDRESS | WordKind.BYTES | WordKind.FUNCTION:
            return "0x" + value.hex()
        case _:
            assert_never(kind.kind)


def fixed_text(value: int, places: int) -> str:
    """The exact decimal of a fixed-point number, with all its places."""
    with localcontext() as exact:
        # A fixed256x80 has at most 78 digits and 80 places.
        exact.prec = 200
        return format(Decimal(value).scaleb(-places), "f")
