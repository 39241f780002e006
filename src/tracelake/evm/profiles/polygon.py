"""Polygon PoS: messages from Ethereum (state syncs) appear as one transaction at the end of a block.

Until the Madhugiri upgrade (December 2025, block 80,084,800) no root and no filter covers it. Endpoints make it up
from the block's number and hash, which give its own hash; its receipt and its logs are the node's word, and some
endpoints leave its receipt out of the receipts of the block. Since then it is a transaction of type 0x7f in the
roots, and JSON-RPC doesn't show the messages that its hash covers.
"""

from __future__ import annotations

from tracelake.evm.forks import JsonMapping
from tracelake.evm.hashing import keccak256
from tracelake.evm.profiles.profile import ZERO_ADDRESS, ChainProfile, TransactionType


def state_sync_hash(number: int, block_hash: str) -> str:
    content = b"matic-bor-receipt-" + number.to_bytes(8, "big") + bytes.fromhex(block_hash[2:])
    return "0x" + keccak256(content).hex()


def _state_sync(block: JsonMapping) -> tuple[int, ...]:
    """The place of the transaction: the last one, if it has the hash that only this one can have."""
    transactions = block["transactions"]
    if not transactions:
        return ()
    last = transactions[-1]
    # Most last transactions are signed, and need no hash to be computed.
    if (last.get("type") or "0x0") != "0x0" or (last.get("from") or "").lower() != ZERO_ADDRESS:
        return ()
    if last["hash"].lower() != state_sync_hash(int(block["number"], 16), block["hash"]):
        return ()
    return (len(transactions) - 1,)


POLYGON = ChainProfile(
    name="polygon",
    about="Polygon PoS: a state-sync transaction at the end of some blocks, outside of the roots, or of type 0x7f "
    "since Madhugiri",
    proves="the same as on Ethereum; of a state sync outside of the roots that it belongs there, while its receipt "
    "and logs are the node's word. Blocks with type 0x7f can't be proven",
    chain_ids=frozenset({137, 80002}),
    types={"0x7f": TransactionType("state sync")},
    outside_roots=_state_sync,
    fields_outside_roots={
        "from": ZERO_ADDRESS,
        "to": ZERO_ADDRESS,
        "nonce": "0x0",
        "gas": "0x0",
        "gasPrice": "0x0",
        "value": "0x0",
        "input": "0x",
    },
    may_lack_receipts=True,
    log_indexes_restart=True,
)
