"""Chains that follow Ethereum's rules for blocks, and differ in how blocks are agreed on."""

from __future__ import annotations

from tracelake.evm.forks import JsonMapping
from tracelake.evm.profiles.profile import ChainProfile

_AS_ETHEREUM = "the same as on Ethereum"

BSC = ChainProfile(
    name="bsc",
    about="BNB Smart Chain: system transactions are signed by the validator, free, with a gas limit of 2^63 − 1",
    proves=_AS_ETHEREUM,
    chain_ids=frozenset({56, 97}),
)

MONAD = ChainProfile(
    name="monad",
    about="Monad: blocks about every 400 ms, no blobs; gas used is the gas limit",
    proves=_AS_ETHEREUM,
    chain_ids=frozenset({143, 10143}),
)


def _system_places(block: JsonMapping) -> list[int]:
    """Transfers from the exchange's side. They are shown as legacy transactions that pay nothing."""
    return [
        place
        for place, tx in enumerate(block["transactions"])
        if (tx.get("type") or "0x0") == "0x0" and int(tx.get("gasPrice") or "0x0", 16) == 0
    ]


HYPERLIQUID = ChainProfile(
    name="hyperliquid",
    about="Hyperliquid's EVM: no state root; some nodes show transfers from its exchange among the transactions, "
    "with or without receipts",
    proves=f"{_AS_ETHEREUM}, but nothing of transfers from the exchange, which no root covers",
    chain_ids=frozenset({999, 998}),
    outside_roots=_system_places,
    may_lack_receipts=True,
    log_indexes_restart=True,
)
