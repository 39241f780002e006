"""Operators that use, show and miss an RPC pool, for the test of how workers hand them out."""

from __future__ import annotations

from tracelake.evm.rpc.pool import Pool
from tracelake.operators.context import Context
from tracelake.operators.registry import operator


@operator("asks_pool")
def asks_pool(ctx: Context) -> None:
    config = ctx.rpc_pool()
    ctx.log.info(f"the address is {config.endpoints[0].url}")
    with Pool(config) as pool:
        ctx.progress(message=f"{config.name} of chain {pool.chain_id()} is at {pool.head().number}")
    raise RuntimeError(f"nothing else to do with {config.endpoints[0].url}")
