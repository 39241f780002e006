"""Keccak-256, the hash of every EVM chain: the padding is the submission's, not that of the later SHA-3
standard.

Proving one block takes some hundred hashes of messages that are mostly shorter than 600 bytes, so what counts
is the cost of a call, not the throughput. The native implementation was chosen by measuring (docs/adr).
"""

from __future__ import annotations

from tiny_keccak import keccak256

__all__ = ["EMPTY_HASH", "keccak256"]

EMPTY_HASH = keccak256(b"")
