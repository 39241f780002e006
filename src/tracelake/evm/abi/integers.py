"""256-bit integers as columns: exact text and the nearest float, by Arrow's own casts instead of a loop.

``words`` is a matrix of one 32-byte word per row, big-endian.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Words: TypeAlias = "npt.NDArray[np.uint8]"


def integer_texts(words: Words, *, signed: bool) -> pa.StringArray:
    rows = len(words)
    if not words[:, :24].any():
        return pc.cast(pa.array(_low(words)), pa.string())
    little = np.ascontiguousarray(words[:, ::-1])
    # Arrow's widest decimal is a signed 256-bit integer within, whatever precision its type claims.
    decimals = pa.Array.from_buffers(pa.decimal256(76, 0), rows, [None, pa.py_buffer(little)])
    texts = pc.cast(decimals, pa.string())
    above = words[:, 0] >= 0x80
    if signed or not above.any():
        return texts
    huge = [str(int.from_bytes(word.tobytes(), "big")) for word in words[above]]
    return pc.replace_with_mask(texts, pa.array(above), pa.array(huge, pa.string()))


def integer_floats(texts: pa.StringArray) -> pa.DoubleArray:
    """The nearest double, as parsing the digits gives it."""
    return pc.cast(texts, pa.float64())


def small_integers(words: Words) -> pa.Int64Array:
    """For words that are known to fit."""
    return pa.array(_low(words).view(np.int64))


def _low(words: Words) -> npt.NDArray[np.uint64]:
    low: Any = np.ascontiguousarray(words[:, 24:]).view(">u8").reshape(-1)
    return np.asarray(low.astype(np.uint64))
