"""Accounts and contracts of a dev chain, the keys of its accounts, and the random numbers that it is made of.

``SeededRandom`` gives numbers that look random and follow from a key alone, the same on every machine and Python:
the stream is SHAKE-256 of the key, which a standard defines; Python's own generator promises less. An account's
private key is such a number, and signatures are deterministic (RFC 6979), so they are the same everywhere too.
The keys protect nothing: they follow from the seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import shake_256

from coincurve import PrivateKey

from tracelake.evm.hashing import keccak256

_ACCOUNTS = 64
_COINS = 6
_COLLECTIONS = 3
_OTHERS = 5
_DICE_REFILL = 1024


@dataclass(frozen=True, slots=True)
class ChainAccounts:
    """Addresses in lower-case hex. ``keys`` are the private keys of ``accounts``; ``coins`` are ERC-20 tokens,
    ``collections`` are ERC-721 tokens."""

    accounts: tuple[str, ...]
    keys: dict[str, PrivateKey]
    coins: tuple[str, ...]
    collections: tuple[str, ...]
    others: tuple[str, ...]

    def account(self, rng: SeededRandom) -> str:
        return self.accounts[rng.below(len(self.accounts))]


@lru_cache(maxsize=64)
def accounts_of(seed: int) -> ChainAccounts:
    """Accounts and contracts of a chain, the same for every branch and chain id."""
    keys = {_address(key): key for key in (_key(seed, number) for number in range(_ACCOUNTS))}
    return ChainAccounts(
        tuple(keys),
        keys,
        _addresses(seed, "coin", _COINS),
        _addresses(seed, "collection", _COLLECTIONS),
        _addresses(seed, "other", _OTHERS),
    )


def sign(key: PrivateKey, digest: bytes) -> tuple[str, str, int]:
    """r and s as JSON-RPC writes numbers, and the parity."""
    signature = key.sign_recoverable(digest, hasher=None)
    return hex(int.from_bytes(signature[:32])), hex(int.from_bytes(signature[32:64])), signature[64]


def _key(seed: int, number: int) -> PrivateKey:
    return PrivateKey(SeededRandom(seed, "key", number).bytes(32))


def _address(key: PrivateKey) -> str:
    return "0x" + keccak256(key.public_key.format(compressed=False)[1:])[12:].hex()


def _addresses(seed: int, role: str, count: int) -> tuple[str, ...]:
    return tuple(SeededRandom(seed, role, number).hex(20) for number in range(count))


class SeededRandom:
    """Pseudo-random values from a key; the same key gives the same values."""

    def __init__(self, *key: str | int) -> None:
        self._key = "/".join(map(str, key)).encode()
        self._pool = b""
        self._at = 0
        self._refills = 0

    def bytes(self, size: int) -> bytes:
        end = self._at + size
        while end > len(self._pool):
            more = shake_256(b"%s#%d" % (self._key, self._refills)).digest(max(_DICE_REFILL, size))
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
