"""Parameters of one word, whole columns at a time: which rows hold a value of the type, and their values.

Strict, as a decoder in a contract would be: an address has twelve zero bytes before it, a bool is 0 or 1, a short
integer is zero- or sign-extended, and short bytes end in zeros. So a log of another event with the same signature
hash is found out instead of being stored as something else.
"""

from __future__ import annotations

from typing import Any, assert_never

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tracelake.domain.event_abi.model import Word, WordKind
from tracelake.evm.abi.integers import Words
from tracelake.evm.abi.outcome import Skip

ADDRESS_BYTES = 20
FUNCTION_BYTES = 24


def wrong_rows(kind: Word, words: Words) -> tuple[npt.NDArray[np.bool_], Skip]:
    """Which rows don't hold a value of the type, and what that is called."""
    match kind.kind:
        case WordKind.UINT | WordKind.UFIXED:
            return _any(words[:, : 32 - kind.size // 8]), Skip.PADDING
        case WordKind.INT | WordKind.FIXED:
            before = 32 - kind.size // 8
            extension = np.where(words[:, before] & 0x80, 0xFF, 0).astype(np.uint8)
            return _any(words[:, :before] != extension[:, None]), Skip.PADDING
        case WordKind.ADDRESS:
            return _any(words[:, : 32 - ADDRESS_BYTES]), Skip.PADDING
        case WordKind.BOOL:
            return _any(words[:, :31]) | (words[:, 31] > 1), Skip.BAD_BOOL
        case WordKind.BYTES | WordKind.FUNCTION:
            return _any(words[:, byte_count(kind) :]), Skip.PADDING
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
    """One value per row of a matrix of bytes."""
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(
        pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows))]
    )


def matrix(values: pa.BinaryArray, width: int) -> Words:
    """The bytes of values that all have this width and are all there."""
    if not len(values):
        return np.zeros((0, width), dtype=np.uint8)
    data, start = flat_bytes(values)
    return data[start[0] : start[-1]].reshape(len(values), width)


def flat_bytes(values: pa.BinaryArray) -> tuple[Words, npt.NDArray[np.int32]]:
    """All bytes behind an array, and where each value starts; one more for the end of the last."""
    _, offsets, data = values.buffers()
    starts = np.frombuffer(offsets, dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    content = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, dtype=np.uint8)
    return content, starts
