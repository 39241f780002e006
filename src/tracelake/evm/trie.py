"""The root of a trie from indexes to values: how a header commits to its transactions, receipts and
withdrawals.

The keys are the RLP of 0, 1, 2, …, so no key is the start of another and no branch carries a value of its
own. That leaves three shapes: leaf, extension and branch. Which there are depends on the number of values
alone, so the shape of a trie is worked out once for each size, and a root is computed by filling it from
below.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from tracelake.evm.keccak import keccak256
from tracelake.evm.remembered import Remembered
from tracelake.evm.rlp import EMPTY_STRING, encode_bytes, encode_integer, encode_list

EMPTY_ROOT = keccak256(EMPTY_STRING)

_END = b"\x20"  # the path of a leaf that its branch has named completely


class Leaf(NamedTuple):
    path: bytes
    place: int


class Extension(NamedTuple):
    path: bytes
    below: Node


class Branch(NamedTuple):
    children: tuple[tuple[int, Node], ...]


Node: TypeAlias = Leaf | Extension | Branch


def ordered_root(values: Sequence[bytes]) -> bytes:
    return keccak256(_filled(_shape(len(values)), values)) if values else EMPTY_ROOT


@lru_cache(maxsize=1024)
def _shape(count: int) -> Node:
    """Over the keys as text, in which one character is one nibble."""
    return _node(sorted((encode_integer(index).hex(), index) for index in range(count)), 0)


def _node(keys: list[tuple[str, int]], depth: int) -> Node:
    """The node of sorted keys that agree in their first ``depth`` nibbles."""
    first, last = keys[0][0], keys[-1][0]
    if len(keys) == 1:
        return Leaf(_path(first[depth:], leaf=True), keys[0][1])
    fork = depth
    while first[fork] == last[fork]:
        fork += 1
    if fork > depth:
        return Extension(_path(first[depth:fork], leaf=False), _node(keys, fork))
    nibbles = sorted({key[depth] for key, _ in keys})
    below = [[(key, index) for key, index in keys if key[depth] == nibble] for nibble in nibbles]
    return Branch(
        tuple((int(nibble, 16), _node(own, depth + 1)) for nibble, own in zip(nibbles, below, strict=True))
    )


def _path(nibbles: str, *, leaf: bool) -> bytes:
    flag = 2 if leaf else 0
    packed = f"{flag + 1:x}{nibbles}" if len(nibbles) % 2 else f"{flag:x}0{nibbles}"
    return encode_bytes(bytes.fromhex(packed))


def _filled(node: Node, values: Sequence[bytes]) -> bytes:
    """A node's encoding with the values in it."""
    if isinstance(node, Leaf):
        return encode_list(node.path + encode_bytes(values[node.place]))
    if isinstance(node, Extension):
        return encode_list(node.path + _reference(_filled(node.below, values)))
    children = [EMPTY_STRING] * 17
    for nibble, child in node.children:
        if isinstance(child, Leaf) and child.path == _END and len(value := values[child.place]) > 31:
            children[nibble] = b"\xa0" + keccak256(_HEAD_OF_LEAF[len(value)] + value)
        else:
            children[nibble] = _reference(_filled(child, values))
    return encode_list(b"".join(children))


def _reference(node: bytes) -> bytes:
    """A parent holds a short node itself and of a longer one its hash."""
    return node if len(node) < 32 else b"\xa0" + keccak256(node)


def _head_of_leaf(length: int) -> bytes:
    """What stands before a value of more than one byte in a leaf that has no path of its own."""
    blank = bytes(length)
    return encode_list(_END + encode_bytes(blank))[:-length]


_HEAD_OF_LEAF = Remembered(_head_of_leaf, 1 << 14)
