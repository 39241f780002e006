"""RLP in hexadecimal text: what JSON-RPC gives is joined as text with the heads of its items, and becomes
bytes once.

``HEAD_OF_LIST`` and ``HEAD_OF_BYTES`` give the head for a length in bytes; a single byte below 0x80 is its
own encoding and has none. ``QUANTITY`` gives an integer's whole encoding.
"""

from __future__ import annotations

from tracelake.evm.remembered import Remembered


def _head(base: int, length: int) -> str:
    if length < 56:
        return f"{base + length:02x}"
    size = f"{length:x}"
    size = "0" + size if len(size) % 2 else size
    return f"{base + 55 + len(size) // 2:02x}{size}"


def _quantity(value: str) -> str:
    if len(value) < 3 or value[:2] != "0x":
        raise ValueError(f"{value[:20]!r} isn't a number")
    digits = value[2:].lstrip("0")
    if len(digits) % 2:
        digits = "0" + digits
    if len(digits) == 2 and digits < "80":
        return digits
    return HEAD_OF_BYTES[len(digits) // 2] + digits


HEAD_OF_BYTES: Remembered[int, str] = Remembered(lambda length: _head(0x80, length), 1 << 14)
HEAD_OF_LIST: Remembered[int, str] = Remembered(lambda length: _head(0xC0, length), 1 << 14)
QUANTITY = Remembered(_quantity, 1 << 15)  # gas, fees, nonces and chains repeat from block to block


def word(value: str) -> str:
    """An integer that mostly takes all of its 32 bytes and never comes again: half of a signature."""
    if len(value) == 66 and value[2] != "0":
        return "a0" + value[2:]
    return _quantity(value)


def data(value: str) -> str:
    length = len(value) // 2 - 1
    if length == 1 and value[2] < "8":
        return value[2:]
    return HEAD_OF_BYTES[length] + value[2:]


def listed(payload: str) -> str:
    """A list of items that are encoded and joined already."""
    return HEAD_OF_LIST[len(payload) // 2] + payload


def words(values: list[str]) -> str:
    """A list of 32 bytes each: an x stands in no other place than after the 0 of a prefix."""
    return listed("".join(values).replace("0x", "a0"))
