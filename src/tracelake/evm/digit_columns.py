"""The digit columns of a wide integer: its decimal digits in pieces that every engine sums natively.

``X_e0`` has the lowest 18 digits, ``X_e18`` the 18 above them, both as int64; ``X_e36`` has the digits above those
as text and is null where there are none, as nearly everywhere. Each has the number's sign:

    X = X_e36 * 10^36 + X_e18 * 10^18 + X_e0

So sums of the pieces, put together, are the exact sum, and no sum of int64 overflows 128 bits. Of an amount in wei,
or of a token with 18 decimals, ``X_e18`` is the whole ether or tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

DIGITS = 18
"""Of each piece but the highest: 10^18 is the largest power of ten in an int64."""
DIGIT_PARTS = ("_e0", "_e18", "_e36")
DIGIT_ARROW = (pa.int64(), pa.int64(), pa.string())
DIGIT_SPARK = ("BIGINT", "BIGINT", "STRING")
_STRING = "_string"


def digit_columns(texts: pa.Array | pa.ChunkedArray) -> tuple[pa.Array, pa.Array, pa.Array]:
    """``texts`` are whole numbers in decimal, without leading zeros."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    # As bytes, which are cut several times faster than characters.
    digits = texts.view(pa.binary())
    negative = pc.starts_with(digits, b"-")
    signed = bool(pc.any(negative).as_py())
    if signed:
        digits = pc.utf8_ltrim(texts, "-").view(pa.binary())
    longest = pc.max(pc.binary_length(digits)).as_py() or 0
    low, middle = digits, pc.if_else(pc.is_valid(texts), b"0", pa.scalar(None, pa.binary()))
    high = pa.nulls(len(texts), pa.binary())
    if longest > DIGITS:
        low = pc.binary_slice(digits, -DIGITS)
        above = pc.binary_slice(digits, -2 * DIGITS, -DIGITS)
        middle = pc.if_else(pc.equal(above, b""), b"0", above)
    if longest > 2 * DIGITS:
        rest = pc.binary_slice(digits, 0, -2 * DIGITS)
        high = pc.if_else(pc.equal(rest, b""), None, rest)
    pieces = [_integers(low), _integers(middle)]
    if signed:
        pieces = [pc.if_else(negative, pc.negate(piece), piece) for piece in pieces]
        high = pc.if_else(negative, pc.binary_join_element_wise(b"-", high, b""), high)
    return pieces[0], pieces[1], high.view(pa.string())


def _integers(digits: pa.Array) -> pa.Array:
    return digits.view(pa.string()).cast(pa.int64())


def named_digit_columns(name: str, texts: pa.Array | pa.ChunkedArray) -> Mapping[str, pa.Array]:
    return {name + part: piece for part, piece in zip(DIGIT_PARTS, digit_columns(texts), strict=True)}


def digit_column_names(names: list[str]) -> list[str]:
    """Those of ``names`` that are digit columns of another one."""
    known = set(names)
    return [name for name in names if any(_belongs(name, part, known) for part in DIGIT_PARTS)]


def _belongs(name: str, part: str, known: set[str]) -> bool:
    return name.endswith(part) and name.removesuffix(part) + _STRING in known


def with_digit_columns(rows: pa.Table, names: list[str]) -> pa.Table:
    """``rows`` of a file that was written without the digit columns ``names``, with them in their places."""
    for name in names:
        part = next(each for each in DIGIT_PARTS if name.endswith(each))
        base = name.removesuffix(part)
        made = named_digit_columns(base, rows.column(base + _STRING))
        rows = rows.set_column(rows.schema.get_field_index(name), name, made[name])
    return rows
