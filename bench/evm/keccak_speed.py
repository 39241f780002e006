"""Microseconds per hash of the native Keccak-256 that wheels bring, for messages as long as blocks are made of.

    python bench/evm/keccak_speed.py

Candidates that aren't installed are left out: pip install safe-pysha3 pycryptodome ethash.
"""

from __future__ import annotations

import importlib
import os
import timeit
from collections.abc import Callable
from typing import Any

LENGTHS = (20, 32, 110, 200, 300, 600, 2_000, 10_000)
EMPTY = "c5d2460186f7233c927e7db2dcc703c0e500b653ca82273b7bfad8045d85a470"
CANDIDATES: dict[str, tuple[str, Callable[[Any], Callable[[bytes], bytes]]]] = {
    "tiny-keccak": ("tiny_keccak", lambda module: module.keccak256),
    "safe-pysha3": ("sha3", lambda module: lambda message: module.keccak_256(message).digest()),
    "ethash": ("ethash", lambda module: module.keccak_256),
    "pycryptodome": (
        "Crypto.Hash.keccak",
        lambda module: lambda message: module.new(digest_bits=256, data=message).digest(),
    ),
}


def main() -> None:
    print(f"{'µs per hash of … bytes':24}" + "".join(f"{length:>9,}" for length in LENGTHS))
    for name, (module, make) in CANDIDATES.items():
        try:
            hash_of = make(importlib.import_module(module))
        except ImportError:
            continue
        assert hash_of(b"").hex() == EMPTY
        print(f"{name:24}" + "".join(f"{_cost(hash_of, os.urandom(length)):9.2f}" for length in LENGTHS))


def _cost(hash_of: Callable[[bytes], bytes], message: bytes) -> float:
    number = 20_000 if len(message) < 1_000 else 3_000
    return min(timeit.repeat(lambda: hash_of(message), number=number, repeat=5)) / number * 1e6


if __name__ == "__main__":
    main()
