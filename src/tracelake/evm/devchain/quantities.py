"""Parameters of JSON-RPC calls: quantities, hashes and block names, refused as a node refuses them."""

from __future__ import annotations

import re
from typing import Any

from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.jsonrpc import INVALID_PARAMS, SERVER_ERROR, RpcError

_QUANTITY = re.compile(r"0x(0|[1-9a-f][0-9a-f]{0,15})", re.IGNORECASE)
_HASH = re.compile(r"0x[0-9a-f]{64}", re.IGNORECASE)
_ADDRESS = re.compile(r"0x[0-9a-f]{40}", re.IGNORECASE)


def height_of(chain: DevChain, given: Any) -> int:
    """The height that a number in hex, ``latest``, ``pending``, ``safe``, ``finalized`` or ``earliest`` means."""
    match given:
        case "latest" | "pending":
            return chain.head
        case "earliest":
            return 0
        case "safe" | "finalized":
            height = chain.safe if given == "safe" else chain.finalized
            if height is None:
                raise RpcError(SERVER_ERROR, f"{given} block not found")
            return height
        case str() if _QUANTITY.fullmatch(given):
            return int(given, 16)
        case _:
            raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is no block number or tag")


def hash_of(given: Any) -> str:
    if isinstance(given, str) and _HASH.fullmatch(given):
        return given.lower()
    raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is no hash of 32 bytes")


def address_of(given: Any) -> str:
    if isinstance(given, str) and _ADDRESS.fullmatch(given):
        return given.lower()
    raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is no address of 20 bytes")


def count_of(given: Any) -> int:
    """A plain number or one in hex, for the control methods."""
    if isinstance(given, int) and not isinstance(given, bool):
        return given
    if isinstance(given, str) and _QUANTITY.fullmatch(given):
        return int(given, 16)
    raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is no number")


def flag_of(given: Any) -> bool:
    if isinstance(given, bool):
        return given
    raise RpcError(INVALID_PARAMS, f"invalid argument: {given!r} is neither true nor false")


def at_most(params: list[Any], least: int, most: int) -> list[Any]:
    """``params`` with None for what was left out."""
    if len(params) < least:
        raise RpcError(INVALID_PARAMS, f"missing value for required argument {len(params)}")
    if len(params) > most:
        raise RpcError(INVALID_PARAMS, f"too many arguments, want at most {most}")
    return params + [None] * (most - len(params))
