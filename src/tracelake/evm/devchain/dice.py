"""Numbers that look random and follow from a key alone, the same on every machine and Python.

SHAKE-256 of the key is the stream, since a standard defines it; Python's own generator promises less.
"""

from __future__ import annotations

from hashlib import shake_256

_REFILL = 1024


class Dice:
    """One stream per key; two streams of one key give the same throws."""

    def __init__(self, *key: str | int) -> None:
        self._key = "/".join(map(str, key)).encode()
        self._pool = b""
        self._at = 0
        self._refills = 0

    def bytes(self, size: int) -> bytes:
        end = self._at + size
        while end > len(self._pool):
            more = shake_256(b"%s#%d" % (self._key, self._refills)).digest(max(_REFILL, size))
            self._pool = self._pool[self._at :] + more
            self._refills += 1
            self._at, end = 0, size
        taken = self._pool[self._at : end]
        self._at = end
        return taken

    def hex(self, size: int) -> str:
        """Data of ``size`` bytes as JSON-RPC writes it."""
        return "0x" + self.bytes(size).hex()

    def below(self, limit: int) -> int:
        return int.from_bytes(self.bytes(8)) % limit

    def between(self, low: int, high: int) -> int:
        """Both ends included."""
        return low + self.below(high - low + 1)

    def bits(self, count: int) -> int:
        """A number of exactly ``count`` bits, which is never zero."""
        size = (count + 7) // 8
        return int.from_bytes(self.bytes(size)) >> (size * 8 - count) | 1 << (count - 1)
