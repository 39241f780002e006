"""JSON-RPC's hexadecimal text to Arrow arrays, a whole column at a time.

A column's values are joined, converted by one native call and cut by offsets that numpy computes. Nothing is
looked at value by value unless the column turns out to be bad; then ``BadValue`` says which value, and why.
"""

from __future__ import annotations

import binascii
from binascii import unhexlify
from collections.abc import Sequence
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracelake.domain.errors import Invalid
from tracelake.evm.bad_value import bad_bytes, bad_quantity
from tracelake.evm.columns import WEI

Values = Sequence[Any]
Mask = npt.NDArray[np.bool_]

_PREFIX = np.frombuffer(b"0x", np.uint8)
_DIGITS = b"0123456789abcdefABCDEF"
_PLACES = {hex(place): place for place in range(1 << 12)}
_LENGTHS_OF_WORDS = frozenset(range(3, 67))
_WORD = 1 << 64
_MOST_BYTES = (1 << 31) - 1  # offsets are 32-bit integers
_MOST_WEI = 10**38
_MICROSECONDS = 1_000_000
_MOST_SECONDS = (1 << 63) // _MICROSECONDS


def present(values: Values) -> tuple[list[Any], Mask | None]:
    """The values without the absent ones, and where they are; no mask when all are."""
    if all(values):
        return list(values), None
    there = [value for value in values if value is not None]
    if len(there) == len(values):
        return there, None
    return there, np.fromiter([value is not None for value in values], np.bool_, len(values))


def fixed_bytes(values: Values, width: int) -> pa.Array:
    there, mask = present(values)
    if not there:
        return pa.nulls(len(values), pa.binary())
    return cut(unhex_fixed(there, width), width, mask)


def unhex_fixed(values: Values, width: int) -> bytes:
    """The bytes of values that all have the same width, in one piece."""
    try:
        text = np.frombuffer("".join(values).encode("ascii"), np.uint8)
        if not set(map(len, values)) <= {2 * width + 2}:
            raise bad_bytes(values, width)
        table = text.reshape(len(values), 2 * width + 2)
        data = unhexlify(table[:, 2:].tobytes())
    except (TypeError, UnicodeError, binascii.Error):
        raise bad_bytes(values, width) from None
    if not (table[:, :2] == _PREFIX).all():
        raise bad_bytes(values, width)
    return data


def cut(data: bytes, width: int, mask: Mask | None = None) -> pa.Array:
    """Pieces of one width as an array; a mask says where values are."""
    if mask is None:
        offsets = np.arange(0, len(data) + 1, width, dtype=np.int32)
        return _binary(len(offsets) - 1, None, offsets, data)
    return cut_at(data, np.where(mask, width, 0), mask)


def cut_at(data: bytes, lengths: npt.NDArray[Any], mask: Mask | None = None) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return _binary(len(lengths), mask, offsets, data)


def varying_bytes(values: Values) -> pa.Array:
    there, mask = present(values)
    if not there:
        return pa.nulls(len(values), pa.binary())
    try:
        data = unhexlify("".join([value[2:] for value in there]))
        prefixes = "".join([value[:2] for value in there])
        digits = np.fromiter(map(len, there), np.int64, len(there)) - 2
    except (TypeError, ValueError, KeyError):
        raise bad_bytes(there, None) from None
    if (digits & 1).any() or prefixes != "0x" * len(there):
        raise bad_bytes(there, None)
    if mask is None:
        return cut_at(data, digits >> 1)
    lengths = np.zeros(len(values), np.int64)
    lengths[mask] = digits >> 1
    return cut_at(data, lengths, mask)


def numbers(values: Values) -> list[int]:
    """Quantities that are all there, as integers of any size."""
    try:
        foreign = "".join(values).encode("ascii").translate(None, _DIGITS)
        found = list(map(int, values, repeat(16)))
    except (TypeError, ValueError):
        raise bad_quantity(values, 1 << 256) from None
    if foreign != b"x" * len(found):
        raise bad_quantity(values, 1 << 256)
    return found


def places(values: Values) -> pa.Array:
    """Indexes of transactions and logs, which are all there and mostly small."""
    try:
        return pa.array(np.fromiter(map(_PLACES.__getitem__, values), np.int64, len(values)))
    except (KeyError, TypeError):
        return integers(values)


def integers(values: Values) -> pa.Array:
    there, mask = present(values)
    if not there:
        return pa.nulls(len(values), pa.int64())
    try:
        found = np.array(numbers(there), np.int64)
    except OverflowError:
        raise bad_quantity(there, 1 << 63) from None
    return _spread(found, mask)


def microseconds(values: Values) -> npt.NDArray[np.int64]:
    """Seconds that are all there, in the unit of timestamps."""
    found = numbers(values)
    if found and max(found) >= _MOST_SECONDS:
        raise bad_quantity(values, _MOST_SECONDS)
    return np.array(found, np.int64) * _MICROSECONDS


def wei(values: Values) -> pa.Array:
    there, mask = present(values)
    if not there:
        return pa.nulls(len(values), WEI)
    found = numbers(there)
    if max(found) >= _MOST_WEI:
        raise bad_quantity(there, _MOST_WEI)
    halves = np.zeros((len(values), 2), np.uint64)
    rows: Any = slice(None) if mask is None else mask
    halves[rows, 0] = [number % _WORD for number in found] if max(found) >= _WORD else found
    halves[rows, 1] = [number // _WORD for number in found] if max(found) >= _WORD else 0
    return pa.Array.from_buffers(WEI, len(values), [validity(mask), pa.py_buffer(halves)])


def uint256(values: Values) -> tuple[pa.Array, pa.Array, pa.Array]:
    """The three columns: 32 bytes, decimal text, nearest double."""
    there, mask = present(values)
    found = numbers(there)
    if found and max(map(len, there)) > 66:
        raise bad_quantity(there, 1 << 256)
    data = unhexlify("".join([value[2:].zfill(64) for value in there]))
    doubles = np.fromiter(map(float, found), np.float64, len(found))
    if mask is None:
        return cut(data, 32), pa.array(list(map(str, found)), pa.string()), pa.array(doubles)
    texts = iter(map(str, found))
    spread = [None if value is None else next(texts) for value in values]
    return cut(data, 32, mask), pa.array(spread, pa.string()), _spread(doubles, mask)


def words(values: Values) -> pa.Array:
    """Quantities as 32 bytes: numbers that nobody calculates with, such as signatures."""
    there, mask = present(values)
    try:
        data = unhexlify("".join([value[2:].zfill(64) for value in there]))
        lengths = set(map(len, there))
    except (TypeError, ValueError, KeyError):
        raise bad_quantity(there, 1 << 256) from None
    if (
        len(data) != 32 * len(there)
        or not lengths <= _LENGTHS_OF_WORDS
        or "".join(there).count("0x") != len(there)
    ):
        raise bad_quantity(there, 1 << 256)
    return cut(data, 32, mask)


def validity(mask: Mask | None) -> pa.Buffer | None:
    return None if mask is None else pa.py_buffer(np.packbits(mask, bitorder="little"))


def _spread(found: npt.NDArray[Any], mask: Mask | None) -> pa.Array:
    if mask is None:
        return pa.array(found)
    spread = np.zeros(len(mask), found.dtype)
    spread[mask] = found
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(found.dtype), len(mask), [validity(mask), pa.py_buffer(spread)]
    )


def _binary(count: int, mask: Mask | None, offsets: npt.NDArray[np.int32], data: bytes) -> pa.Array:
    if len(data) > _MOST_BYTES:
        raise Invalid("BatchTooLarge", "a column of over 2 GiB can't be made: decode fewer blocks at a time")
    return pa.Array.from_buffers(
        pa.binary(), count, [validity(mask), pa.py_buffer(offsets), pa.py_buffer(data)]
    )
