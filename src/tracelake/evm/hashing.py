"""Hashes an EVM chain is made of: Keccak-256, RLP, the roots of ordered tries and the bloom filters of logs.

Keccak has the padding of the original submission, not that of SHA-3. Proving one block takes a few hundred
hashes of messages that are mostly shorter than 600 bytes, so the cost of a call matters more than the
throughput; the native implementation was chosen by measuring (docs/adr).

``ordered_root`` is how a header commits to its transactions, receipts and withdrawals: the root of a trie from
indexes to values. Its keys are the RLP of 0, 1, 2, …, so no key is a prefix of another and no branch has a
value of its own. The shape of such a trie depends on the number of values alone: it is computed once for each
size and then filled.

A header's bloom filter covers all logs of its block: a log that is missing from an answer leaves bits that nothing
explains, and a log that doesn't belong there has bits that aren't set.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tiny_keccak import keccak256

__all__ = [
    "BITS_OF",
    "EMPTY_HASH",
    "EMPTY_ROOT",
    "EMPTY_STRING",
    "NO_UNCLES",
    "BoundedCache",
    "RlpItem",
    "bits_of",
    "bloom_bits",
    "encode_bytes",
    "encode_integer",
    "encode_list",
    "keccak256",
    "logs_bloom",
    "ordered_root",
    "rlp_encode",
]

Argument = TypeVar("Argument")
Result = TypeVar("Result")
RlpItem: TypeAlias = "bytes | int | Sequence[RlpItem]"

EMPTY_HASH = keccak256(b"")
EMPTY_STRING = b"\x80"
EMPTY_ROOT = keccak256(EMPTY_STRING)
NO_UNCLES = "0x" + keccak256(b"\xc0").hex()
"""The ``sha3Uncles`` of a block without uncles: the hash of the empty list."""
_END = b"\x20"  # the path of a leaf whose branch has spelled out the whole key


class BoundedCache(dict[Argument, Result]):
    """A memory for a pure function of one argument, with at most ``most`` results.

    A hit is one native lookup and no call, a third of the cost of ``functools.lru_cache``. A full memory starts
    over, so it needs no bookkeeping.
    """

    def __init__(self, compute: Callable[[Argument], Result], most: int) -> None:
        super().__init__()
        self._compute, self._most = compute, most

    def __missing__(self, argument: Argument) -> Result:
        result = self._compute(argument)
        if len(self) >= self._most:
            self.clear()
        self[argument] = result
        return result


def rlp_encode(item: RlpItem) -> bytes:
    """Encode an integer as its shortest big-endian bytes, zero as the empty string."""
    if isinstance(item, bytes):
        return encode_bytes(item)
    if isinstance(item, int):
        return encode_integer(item)
    return encode_list(b"".join(map(rlp_encode, item)))


def encode_bytes(value: bytes) -> bytes:
    length = len(value)
    # RLP has one encoding for each value: a small byte is its own, and any other form hashes differently.
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
    """Encode a list whose items are encoded and joined already."""
    length = len(payload)
    if length < 56:
        return bytes((0xC0 + length,)) + payload
    return _long(0xF7, length) + payload


def _long(base: int, length: int) -> bytes:
    size = length.to_bytes((length.bit_length() + 7) // 8, "big")
    return bytes((base + len(size),)) + size


class Leaf(NamedTuple):
    path: bytes
    place: int


class Extension(NamedTuple):
    path: bytes
    below: TrieNode


class Branch(NamedTuple):
    children: tuple[tuple[int, TrieNode], ...]


TrieNode: TypeAlias = Leaf | Extension | Branch


def ordered_root(values: Sequence[bytes]) -> bytes:
    """The root of the trie from the RLP of each index to the value at that index."""
    return keccak256(_filled(_shape(len(values)), values)) if values else EMPTY_ROOT


# The numbers of transactions in a block repeat, so shapes do.
@lru_cache(maxsize=1024)
def _shape(count: int) -> TrieNode:
    """The trie of ``count`` keys. Keys are hexadecimal text here: one character is one nibble."""
    return _node(sorted((encode_integer(index).hex(), index) for index in range(count)), 0)


def _node(keys: list[tuple[str, int]], depth: int) -> TrieNode:
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
    # Hex-prefix encoding: the first nibble has the kind of node, and whether the path has an odd length.
    flag = 2 if leaf else 0
    packed = f"{flag + 1:x}{nibbles}" if len(nibbles) % 2 else f"{flag:x}0{nibbles}"
    return encode_bytes(bytes.fromhex(packed))


def _filled(node: TrieNode, values: Sequence[bytes]) -> bytes:
    """The encoding of a node with its values."""
    if isinstance(node, Leaf):
        return encode_list(node.path + encode_bytes(values[node.place]))
    if isinstance(node, Extension):
        return encode_list(node.path + _reference(_filled(node.below, values)))
    # The last place is the value of a branch, which ordered tries never have.
    children = [EMPTY_STRING] * 17
    for nibble, child in node.children:
        # Most values of a block hang here: their leaf is put together without encoding its parts again.
        if isinstance(child, Leaf) and child.path == _END and len(value := values[child.place]) > 31:
            children[nibble] = b"\xa0" + keccak256(_HEAD_OF_LEAF[len(value)] + value)
        else:
            children[nibble] = _reference(_filled(child, values))
    return encode_list(b"".join(children))


def _reference(node: bytes) -> bytes:
    """A parent holds a short node itself, and the hash of a longer one."""
    # The yellow paper's rule: a node shorter than its hash is put in place of the hash.
    return node if len(node) < 32 else b"\xa0" + keccak256(node)


def _head_of_leaf(length: int) -> bytes:
    """The bytes before a value of more than one byte in a leaf that has no path of its own."""
    blank = bytes(length)
    return encode_list(_END + encode_bytes(blank))[:-length]


_HEAD_OF_LEAF = BoundedCache(_head_of_leaf, 1 << 14)


def logs_bloom(logs: Iterable[Mapping[str, Any]]) -> bytes:
    """The filter of logs as JSON-RPC gives them."""
    return bloom_bits(logs).to_bytes(256, "big")


def bloom_bits(logs: Iterable[Mapping[str, Any]]) -> int:
    """The same filter as a number, which takes one operation to join with another."""
    bits = 0
    for log in logs:
        bits |= BITS_OF[log["address"]]
        for topic in log["topics"]:
            bits |= BITS_OF[topic]
    return bits


def bits_of(value: str) -> int:
    """The three bits of an address or a topic in hexadecimal."""
    return BITS_OF[value]


def _bits(value: str) -> int:
    # Each of the first three pairs of bytes gives 11 bits: the number of a bit in the filter.
    digest = int.from_bytes(keccak256(unhexlify(value[2:]))[:6], "big")
    return 1 << (digest >> 32 & 2047) | 1 << (digest >> 16 & 2047) | 1 << (digest & 2047)


# Addresses and topics repeat from log to log. An entry takes about half a kilobyte.
BITS_OF = BoundedCache(_bits, 1 << 15)
