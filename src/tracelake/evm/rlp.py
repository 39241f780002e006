"""RLP, the serialisation under every hash of a chain: byte strings and lists of them, one encoding for each
value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

Item: TypeAlias = "bytes | int | Sequence[Item]"

EMPTY_STRING = b"\x80"


def encode(item: Item) -> bytes:
    """An integer is its shortest big-endian bytes, zero the empty string."""
    if isinstance(item, bytes):
        return encode_bytes(item)
    if isinstance(item, int):
        return encode_integer(item)
    return encode_list(b"".join(map(encode, item)))


def encode_bytes(value: bytes) -> bytes:
    length = len(value)
    if length == 1 and value[0] < 0x80:
        return value
    if length < 56:
        return bytes((0x80 + length,)) + value
    return _long(0xB7, length) + value


def encode_integer(value: int) -> bytes:
    if value < 0:
        raise ValueError("RLP has no negative integers")
    return encode_bytes(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def encode_list(payload: bytes) -> bytes:
    """A list of items that are encoded and joined already."""
    length = len(payload)
    if length < 56:
        return bytes((0xC0 + length,)) + payload
    return _long(0xF7, length) + payload


def _long(base: int, length: int) -> bytes:
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes((base + len(size),)) + size
