"""Converters from JSON-RPC's hexadecimal text to Arrow arrays, a whole column at a time.

A column's values are joined, converted by one native call and cut by offsets that numpy computes. Lists
(hashes, access lists, authorizations) are flattened over the whole column first, since most are absent or
empty. No value is examined on its own unless its column turns out to be invalid; then ``BadValue`` names the
value and the problem.
"""

from __future__ import annotations

import binascii
import re
from binascii import unhexlify
from collections.abc import Sequence
from itertools import chain, repeat
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracelake.domain.errors import Invalid
from tracelake.evm.columns import ACCESS_LIST, AUTHORIZATIONS, BYTES_LIST, WEI
from tracelake.evm.raw_block import shown

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
_BYTES = re.compile(r"0x(?:[0-9a-fA-F]{2})*")
_QUANTITY = re.compile(r"0x[0-9a-fA-F]+")


def present(values: Values) -> tuple[list[Any], Mask | None]:
    """The values that aren't None, and a mask of their places; no mask if all are there."""
    # The usual case, checked natively; an empty value only takes the longer way.
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
    """The bytes of values of one width, joined."""
    try:
        text = np.frombuffer("".join(values).encode("ascii"), np.uint8)
        # Together the lengths could be right while two values are wrong.
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
    """Cut joined bytes into values of one width; the mask is true where a value is."""
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
    # Two values of odd length would join to valid bytes, cut in the wrong place.
    if (digits & 1).any() or prefixes != "0x" * len(there):
        raise bad_bytes(there, None)
    if mask is None:
        return cut_at(data, digits >> 1)
    lengths = np.zeros(len(values), np.int64)
    lengths[mask] = digits >> 1
    return cut_at(data, lengths, mask)


def numbers(values: Values) -> list[int]:
    """Quantities as integers of any size; none is None."""
    try:
        # ``int`` accepts signs, spaces and underscores: besides digits there may be only the x of each prefix.
        # ``translate`` deletes the digits natively.
        foreign = "".join(values).encode("ascii").translate(None, _DIGITS)
        found = list(map(int, values, repeat(16)))
    except (TypeError, ValueError):
        raise bad_quantity(values, 1 << 256) from None
    if foreign != b"x" * len(found):
        raise bad_quantity(values, 1 << 256)
    return found


def places(values: Values) -> pa.Array:
    """Indexes of transactions and logs; none is None, and most are small."""
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
    """Seconds in the unit of timestamps; none is None."""
    found = numbers(values)
    # A product beyond 64 bits would wrap around silently.
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
    # A decimal128 is two little-endian words, the low one first.
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
    """Quantities as 32 bytes, for numbers that aren't used in arithmetic, such as signatures."""
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
    # Offsets would wrap around silently.
    if len(data) > _MOST_BYTES:
        raise Invalid("BatchTooLarge", "a column of over 2 GiB can't be made: decode fewer blocks at a time")
    return pa.Array.from_buffers(
        pa.binary(), count, [validity(mask), pa.py_buffer(offsets), pa.py_buffer(data)]
    )


def hash_lists(values: Values) -> pa.Array:
    """Lists of 32 bytes each."""
    return _lists(values, BYTES_LIST, lambda hashes: fixed_bytes(hashes, 32))


def access_lists(values: Values) -> pa.Array:
    return _lists(values, ACCESS_LIST, _access_entries)


def authorization_lists(values: Values) -> pa.Array:
    return _lists(values, AUTHORIZATIONS, _authorizations)


def must_be_lists(values: Values) -> None:
    if not set(map(type, values)) <= {list}:
        index = next(index for index, value in enumerate(values) if type(value) is not list)
        raise BadValue(index, f"isn't a list: {shown(values[index])}")


def _lists(values: Values, kind: pa.DataType, convert: Any) -> pa.Array:
    there, mask = present(values)
    if not there:
        return pa.nulls(len(values), kind)
    must_be_lists(there)
    lengths = np.zeros(len(values), np.int64)
    lengths[slice(None) if mask is None else mask] = np.fromiter(map(len, there), np.int64, len(there))
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = list(chain.from_iterable(there))
    try:
        elements = convert(flat)
        if elements.null_count:
            raise BadValue(flat.index(None), "has an empty entry")
    except BadValue as bad:
        # The index is that of an entry: find the list that it belongs to.
        owner = int(np.searchsorted(np.cumsum([len(value) for value in there]), bad.index, side="right"))
        raise BadValue(owner, f"has an entry that {bad.problem}") from None
    buffers = [validity(mask), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(kind, len(values), buffers, children=[elements])


def _access_entries(entries: list[Any]) -> pa.Array:
    addresses, keys = _parts(entries, "address", "storageKeys")
    return _structs(ACCESS_LIST, fixed_bytes(addresses, 20), hash_lists(keys))


def _authorizations(entries: list[Any]) -> pa.Array:
    chains, addresses, nonces, r, s = _parts(entries, "chainId", "address", "nonce", "r", "s")
    # Older clients call the parity ``v``.
    parities = [entry.get("v") if entry.get("yParity") is None else entry["yParity"] for entry in entries]
    return _structs(
        AUTHORIZATIONS,
        pa.array(list(map(str, numbers(chains))), pa.string()),
        fixed_bytes(addresses, 20),
        wei(nonces),
        integers(parities),
        words(r),
        words(s),
    )


def _parts(entries: list[Any], *names: str) -> list[list[Any]]:
    """The members of each entry, one list for each name."""
    try:
        # The fast path; only incomplete entries are examined one by one below.
        parts = [list(map(itemgetter(name), entries)) for name in names]
        if not any(None in part for part in parts):
            return parts
    except (KeyError, TypeError, IndexError):
        pass
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or any(entry.get(name) is None for name in names):
            raise BadValue(index, f"lacks one of {', '.join(names)}: {shown(entry)}")
    raise AssertionError("entries were found to be incomplete and then weren't")


def _structs(of_list: pa.DataType, *members: pa.Array) -> pa.Array:
    return pa.StructArray.from_arrays(list(members), fields=list(of_list.value_type))


class BadValue(ValueError):
    """The value at ``index`` can't be converted. ``problem`` is a clause that follows the field's name."""

    def __init__(self, index: int, problem: str) -> None:
        super().__init__(problem)
        self.index, self.problem = index, problem


class TooWide(BadValue):
    """A number that its column can't hold: it is ``limit`` or more, but no more than 256 bits."""

    def __init__(self, index: int, problem: str, limit: int) -> None:
        super().__init__(index, problem)
        self.limit = limit


def bad_bytes(values: Sequence[Any], width: int | None) -> BadValue:
    for index, value in enumerate(values):
        if not isinstance(value, str) or not _BYTES.fullmatch(value):
            return BadValue(index, f"isn't hexadecimal bytes: {shown(value)}")
        if width is not None and len(value) != 2 + 2 * width:
            return BadValue(index, f"has {len(value) // 2 - 1} bytes instead of {width}: {shown(value)}")
    return BadValue(0, "can't be read")


def bad_quantity(values: Sequence[Any], limit: int) -> BadValue:
    for index, value in enumerate(values):
        if not isinstance(value, str) or not _QUANTITY.fullmatch(value):
            return BadValue(index, f"isn't a hexadecimal number: {shown(value)}")
    for index, value in enumerate(values):
        if int(value, 16) >= limit:
            problem = f"is too large: {shown(value)}"
            # Hundreds of digits are no number of any chain.
            return BadValue(index, problem) if int(value, 16) >> 256 else TooWide(index, problem, limit)
    return BadValue(0, "can't be read")
