"""The bloom filter of logs: 2,048 bits, three for every address and topic.

A header's filter covers all logs of its block, so a log that is missing from an answer leaves bits that
nothing explains, and one that doesn't belong there has bits that aren't set. Addresses and topics repeat, and
are hashed once as long as they're remembered.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Iterable, Mapping
from typing import Any

from tracelake.evm.keccak import keccak256
from tracelake.evm.remembered import Remembered


def logs_bloom(logs: Iterable[Mapping[str, Any]]) -> bytes:
    """The filter of logs as JSON-RPC gives them."""
    return bloom_bits(logs).to_bytes(256, "big")


def bloom_bits(logs: Iterable[Mapping[str, Any]]) -> int:
    """The same as a number, which takes one operation to join with others."""
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
    digest = int.from_bytes(keccak256(unhexlify(value[2:]))[:6], "big")
    return 1 << (digest >> 32 & 2047) | 1 << (digest >> 16 & 2047) | 1 << (digest & 2047)


BITS_OF = Remembered(_bits, 1 << 15)  # at about half a kilobyte each
