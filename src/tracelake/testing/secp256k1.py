"""Signatures of Ethereum in plain Python, for the few transactions that a node won't sign for its caller.

Some milliseconds each, and nothing here is safe from observers: for keys of tests only.
"""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from tracelake.evm.keccak import keccak256

_P = 2**256 - 2**32 - 977
_N = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
_G = (
    0x79BE667EF9DCBBAC55A06295CE870B07029BFCDB2DCE28D959F2815B16F81798,
    0x483ADA7726A3C4655DA4FBFC0E1108A8FD17B448A68554199C47D08FFB10D4B8,
)

Point = tuple[int, int]


class Signature(NamedTuple):
    r: int
    s: int
    parity: int


def key_of(name: str) -> int:
    """A private key that follows from a name."""
    return int.from_bytes(sha256(name.encode()).digest()) % (_N - 1) + 1


def address_of(key: int) -> str:
    x, y = _times(key, _G)
    return "0x" + keccak256(x.to_bytes(32) + y.to_bytes(32))[12:].hex()


def sign(key: int, digest: bytes) -> Signature:
    """Deterministic, with the lower of the two possible ``s``, as chains demand."""
    nonce = int.from_bytes(sha256(key.to_bytes(32) + digest).digest()) % (_N - 1) + 1
    x, y = _times(nonce, _G)
    r = x % _N
    s = pow(nonce, -1, _N) * (int.from_bytes(digest) + r * key) % _N
    return Signature(r, s, y & 1) if s <= _N // 2 else Signature(r, _N - s, (y & 1) ^ 1)


def _times(factor: int, point: Point) -> Point:
    result: Point | None = None
    while factor:
        if factor & 1:
            result = point if result is None else _sum(result, point)
        point = _sum(point, point)
        factor >>= 1
    assert result is not None
    return result


def _sum(a: Point, b: Point) -> Point:
    """Two points that aren't each other's inverse: those don't come up when multiplying below the order."""
    if a == b:
        slope = 3 * a[0] * a[0] * pow(2 * a[1], -1, _P) % _P
    else:
        slope = (b[1] - a[1]) * pow(b[0] - a[0], -1, _P) % _P
    x = (slope * slope - a[0] - b[0]) % _P
    return x, (slope * (a[0] - x) - a[1]) % _P
