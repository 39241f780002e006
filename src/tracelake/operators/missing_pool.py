"""Why an operator has no RPC pool, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from tracelake.domain.errors import Invalid


def missing_pool(named: object, known: Sequence[str]) -> Invalid:
    """``named`` is what the job's config says, ``known`` what its worker has."""
    if named is None:
        return Invalid(
            "RpcPoolMissing", "the job's config names no RPC pool: add rpc_pool, as in rpc_pool: main"
        )
    if not isinstance(named, str):
        return Invalid("RpcPoolMissing", f"rpc_pool in the job's config is the name of a pool, not {named!r}")
    if not known:
        remedy = "write rpc.toml into its home, or say where it is by TRACELAKE_RPC_POOLS"
        return Invalid(
            "RpcPoolMissing", f"there is no RPC pool {named!r}: the worker has none at all; {remedy}"
        )
    return Invalid(
        "RpcPoolMissing",
        f"there is no RPC pool {named!r}: the worker knows {', '.join(sorted(known))}; "
        f"add [pools.{named}] to its rpc.toml, or name another in the job's config",
    )
