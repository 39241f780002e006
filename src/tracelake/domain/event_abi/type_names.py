"""The names of elementary types: ``uint256``, ``bytes4``, ``fixed128x18`` and the short forms of Solidity."""

from __future__ import annotations

import re

from tracelake.domain.event_abi.model import Array, Bytes, Tuple, Word, WordKind

MAX_DEPTH = 16
"""Arrays and tuples within each other. Far beyond any contract, and far below what exhausts a stack."""
MAX_LENGTH = 2**32

_NUMBER = re.compile(r"(uint|int)([1-9][0-9]{0,2})?", re.ASCII)
_FIXED = re.compile(r"(ufixed|fixed)(?:([1-9][0-9]{0,2})x(0|[1-9][0-9]?))?", re.ASCII)
_BYTES = re.compile(r"bytes([1-9][0-9]?)", re.ASCII)
_SIMPLE: dict[str, Word | Bytes] = {
    "address": Word(WordKind.ADDRESS),
    "bool": Word(WordKind.BOOL),
    "function": Word(WordKind.FUNCTION),
    "bytes": Bytes(text=False),
    "string": Bytes(text=True),
}


class AbiProblem(ValueError):
    """What is wrong with an ABI, for the person who wrote it."""


def elementary(name: str) -> Word | Bytes:
    if (simple := _SIMPLE.get(name)) is not None:
        return simple
    if found := _NUMBER.fullmatch(name):
        bits = int(found[2] or 256)
        if bits % 8 == 0 and bits <= 256:
            return Word(WordKind(found[1]), bits)
    elif found := _FIXED.fullmatch(name):
        bits, places = int(found[2] or 128), int(found[3] or 18)
        if bits % 8 == 0 and bits <= 256 and places <= 80:
            return Word(WordKind(found[1]), bits, places)
    elif found := _BYTES.fullmatch(name):
        size = int(found[1])
        if size <= 32:
            return Word(WordKind.BYTES, size)
    raise AbiProblem(f"{name[:100]!r} is not an ABI type{_hint(name)}")


def array(item: Word | Bytes | Array | Tuple, length: int | None) -> Array:
    if length is not None and not 1 <= length <= MAX_LENGTH:
        raise AbiProblem(f"an array has 1 to {MAX_LENGTH} items, not {length}")
    made = Array(item, length)
    check_depth(made)
    return made


def check_depth(made: Array | Tuple) -> None:
    if made.depth > MAX_DEPTH:
        raise AbiProblem(f"arrays and tuples are more than {MAX_DEPTH} deep in each other")


def _hint(name: str) -> str:
    if name == "byte":
        return "; write bytes1"
    if name[:1].isupper():
        return ": write a struct as its fields in parentheses, an enum as uint8, a contract as address"
    return ""
