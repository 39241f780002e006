"""Chains whose block hash isn't the hash of an Ethereum header: nothing in a block can be proven against it.

``bloom`` works on them. Cosmos chains take the hash from CometBFT; nodes of early versions number the logs of each
transaction from 0, their gas limit may be 2^64 − 1 for "none", and transactions of the chain itself have no
signature. Frontier (Substrate) leaves mixHash out, and writes authorizations in a form of its own.
"""

from __future__ import annotations

from typing import Any

from tracelake.evm.profiles.profile import ChainProfile


def _cosmos(name: str, about: str, *chain_ids: int) -> ChainProfile:
    return ChainProfile(
        name=name,
        about=f"{about}: Cosmos with an EVM; a gas limit of up to 2^64 − 1, logs that may be numbered per "
        "transaction",
        proves="",
        unprovable="its block hashes are CometBFT's and not those of Ethereum headers",
        chain_ids=frozenset(chain_ids),
        system_transactions=True,
        log_indexes_restart=True,
    )


COSMOS = _cosmos("cosmos", "Evmos, Kava, Injective, Sei and others", 9001, 2222, 1776, 1329, 7000)
CRONOS = _cosmos("cronos", "Cronos", 25, 338)
STABLE = _cosmos("stable", "Stable", 988)


def _rewrite(tx: dict[str, Any]) -> dict[str, Any]:
    entries = tx.get("authorizationList")
    if not entries:
        return tx
    return {**tx, "authorizationList": [_authorization(entry) for entry in entries]}


def _authorization(entry: dict[str, Any]) -> dict[str, Any]:
    signature = entry.get("signature")
    if not isinstance(signature, dict):
        return entry
    chain = entry["chain_id"]
    return {
        "chainId": hex(chain) if isinstance(chain, int) else chain,
        "address": entry["address"],
        "nonce": entry["nonce"],
        "yParity": hex(bool(signature["odd_y_parity"])),
        "r": signature["r"],
        "s": signature["s"],
    }


FRONTIER = ChainProfile(
    name="frontier",
    about="Bittensor, Moonbeam and others: Substrate with an EVM (Frontier); no mixHash",
    proves="",
    unprovable="its block hashes aren't those of Ethereum headers",
    chain_ids=frozenset({945, 964, 1284, 1285, 592}),
    rewrite=_rewrite,
)
