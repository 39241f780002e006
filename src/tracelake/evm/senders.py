"""Senders of transactions, recovered from their signatures by libsecp256k1.

No hash covers a sender, but the signature determines it: of the four points that a signature may stand for, the
parity picks one, and the address is the hash of that point. Recovery is the costliest part of a proof (about
45 µs each, as much as everything else about a transaction), so it goes to the library by its plain interface,
with buffers that are made once for a block; the wrappers around it take half as long again.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any, NamedTuple

from tracelake.evm.hashing import keccak256

_SIGNATURE = 64
_POINT = 65


class SignedHash(NamedTuple):
    """The signed digest and its signature: ``compact`` is r and s, 32 bytes each."""

    digest: bytes
    compact: bytes
    parity: int


def recover_senders(signed: Iterable[SignedHash]) -> list[str | None]:
    """The address behind each signature, in lower-case hex; None for a signature that nobody can have made."""
    lib, ffi, context = _library()
    signature = ffi.new("secp256k1_ecdsa_recoverable_signature *")
    key, point = ffi.new("secp256k1_pubkey *"), ffi.new("unsigned char[]", _POINT)
    size, uncompressed = ffi.new("size_t *", _POINT), lib.SECP256K1_EC_UNCOMPRESSED
    content = ffi.buffer(point)
    parse, recover = lib.secp256k1_ecdsa_recoverable_signature_parse_compact, lib.secp256k1_ecdsa_recover
    serialize = lib.secp256k1_ec_pubkey_serialize
    senders: list[str | None] = []
    for digest, compact, parity in signed:
        # The library aborts the process when it is given another parity.
        if parity not in (0, 1) or len(compact) != _SIGNATURE or len(digest) != 32:
            senders.append(None)
        elif parse(context, signature, compact, parity) and recover(context, key, signature, digest):
            serialize(context, point, size, key, uncompressed)
            # The first byte says that the point isn't compressed.
            senders.append("0x" + keccak256(content[1:])[12:].hex())
        else:
            senders.append(None)
    return senders


def _library() -> tuple[Any, Any, Any]:
    # Imported where it is used: only ``senders: derive`` needs it.
    native: Any = import_module("coincurve._libsecp256k1")
    context: Any = import_module("coincurve.context")
    return native.lib, native.ffi, context.GLOBAL_CONTEXT.ctx
