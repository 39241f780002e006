"""``LIES``: what an endpoint can say about a block that isn't so, one by one, each with a block to say it about.

``outcome`` is what becomes of a lie at a level of verification: the block is refused, the lie makes no
difference to any table, or it gets through. ``docs/chains.md`` has these outcomes as a table, which a test makes
anew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from tests.support.recorded_blocks import RECORDED, SYNTHETIC, KnownBlock
from tracelake.evm.columns import Proof
from tracelake.evm.decode import decode
from tracelake.evm.raw_block import (
    BlockMalformed,
    BlockMismatch,
    ChainTable,
    RawBlock,
    Senders,
    Unprovable,
    Verify,
)
from tracelake.evm.schemas import TABLES
from tracelake.evm.verify import check_block

Json = dict[str, Any]
Change = Callable[[RawBlock], object]
_BLOCKS = {known.name: known for known in (*RECORDED, *SYNTHETIC)}
_WORD, _ADDRESS = "0x" + "ab" * 32, "0x" + "cd" * 20
_NO_BLOOM = "0x" + "00" * 256
REFUSED = (BlockMismatch, BlockMalformed, Unprovable)


class Outcome(StrEnum):
    CAUGHT = "caught"
    DERIVED = "derived"
    """Nothing of it reaches a table: the columns follow from something else."""
    MISSED = "not caught"


@dataclass(frozen=True, slots=True)
class BlockLie:
    """``apply`` changes the block in place. ``chain_id`` is the chain that the endpoint says it is of."""

    name: str
    block: str
    apply: Change
    chain_id: int | None = None

    def forged(self) -> KnownBlock:
        honest = _BLOCKS[self.block]
        known = replace(honest, raw=copy.deepcopy(honest.raw), chain_id=self.chain_id or honest.chain_id)
        self.apply(known.raw)
        return known

    @property
    def honest(self) -> KnownBlock:
        return _BLOCKS[self.block]


def outcome(lie: BlockLie, level: Verify, senders: Senders = Senders.DERIVE) -> Outcome:
    known = lie.forged()
    try:
        check_block(known.raw, level, known.chain_id, senders)
        changed = columns_changed(lie.honest, known)
    except REFUSED:
        return Outcome.CAUGHT
    return Outcome.MISSED if changed else Outcome.DERIVED


def columns_changed(honest: KnownBlock, known: KnownBlock) -> set[tuple[ChainTable, str, Proof]]:
    tables = [ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.WITHDRAWALS]
    if honest.raw.receipts is not None:
        tables += [ChainTable.LOGS, ChainTable.RECEIPTS]
    changed = set()
    for table in tables:
        before = decode([honest.raw], table, honest.chain_id)
        after = decode([known.raw], table, known.chain_id)
        for column in TABLES[table].columns:
            parts = [name for name in before.schema.names if name.startswith(column.name)]
            own = [name for name in parts if name in (column.name, f"{column.name}_string")]
            if any(not before.column(name).equals(after.column(name)) for name in own):
                changed.add((table, column.name, column.proof))
    return changed


def transactions(raw: RawBlock, kind: str) -> list[Json]:
    found = [tx for tx in raw.block["transactions"] if tx.get("type", "0x0") == kind]
    assert found, f"no transaction of type {kind}"
    return found


def receipts(raw: RawBlock, kind: str | None = None) -> list[Json]:
    assert raw.receipts is not None
    return [each for each in raw.receipts if kind in (None, each.get("type", "0x0"))]


def creation(raw: RawBlock) -> tuple[Json, Json]:
    return next(
        (tx, receipt)
        for tx, receipt in zip(raw.block["transactions"], receipts(raw), strict=True)
        if tx["to"] is None
    )


def _logged(raw: RawBlock) -> Json:
    return next(each for each in receipts(raw) if each["logs"])


def _hide_logs(raw: RawBlock) -> None:
    """All logs with everything that shows that there were any."""
    raw.block["logsBloom"] = _NO_BLOOM
    for receipt in receipts(raw):
        receipt |= {"logs": [], "logsBloom": _NO_BLOOM}


def _other_senders(raw: RawBlock) -> None:
    for tx, receipt in zip(raw.block["transactions"], receipts(raw), strict=True):
        if tx["to"] is not None:
            tx["from"] = receipt["from"] = _ADDRESS


def _sender_and_contract(raw: RawBlock) -> None:
    from tests.support.evm_encoding import created_address

    tx, receipt = creation(raw)
    tx["from"] = receipt["from"] = _ADDRESS
    receipt["contractAddress"] = created_address(_ADDRESS, tx["nonce"])


def _without_chain(raw: RawBlock) -> None:
    for tx in raw.block["transactions"]:
        tx.pop("chainId", None)


_NOW, _EARLY, _LONDON, _OLD = (
    "synthetic Osaka",
    "synthetic Frontier",
    "synthetic London",
    "synthetic Byzantium",
)
_UNCLES, _AMSTERDAM = "test chain 25", "synthetic Amsterdam"
_WITHDRAWAL = {"index": "0x1", "validatorIndex": "0x2", "address": _ADDRESS, "amount": "0x3"}
_AUTHORIZATION = {
    "chainId": "0x1",
    "address": _ADDRESS,
    "nonce": "0x1",
    "yParity": "0x0",
    "r": _WORD,
    "s": _WORD,
}

LIES: tuple[BlockLie, ...] = (
    BlockLie("another block than the requested one", _NOW, lambda raw: raw.block.update(number="0x1")),
    BlockLie("a header field altered", _NOW, lambda raw: raw.block.update(stateRoot=_WORD)),
    BlockLie("a header field left out", _NOW, lambda raw: raw.block.pop("requestsHash")),
    BlockLie(
        "the block's gas altered, since Amsterdam", _AMSTERDAM, lambda raw: raw.block.update(gasUsed="0x9")
    ),
    BlockLie(
        "withdrawals invented before Shanghai",
        _LONDON,
        lambda raw: raw.block.update(withdrawals=[_WITHDRAWAL]),
    ),
    BlockLie(
        "an empty list of withdrawals before Shanghai", _LONDON, lambda raw: raw.block.update(withdrawals=[])
    ),
    BlockLie(
        "blob fields invented before Cancun",
        _LONDON,
        lambda raw: raw.block.update(blobGasUsed="0x20000", excessBlobGas="0x1"),
    ),
    BlockLie(
        "a beacon root invented before Cancun",
        _LONDON,
        lambda raw: raw.block.update(parentBeaconBlockRoot=_WORD),
    ),
    BlockLie(
        "an access list's hash invented before Amsterdam",
        _LONDON,
        lambda raw: raw.block.update(blockAccessListHash=_WORD),
    ),
    BlockLie("a withdrawal altered", _NOW, lambda raw: raw.block["withdrawals"][0].update(amount="0x1")),
    BlockLie("withdrawals left out", _NOW, lambda raw: raw.block.update(withdrawals=[])),
    BlockLie("uncles invented", _NOW, lambda raw: raw.block.update(uncles=[_WORD])),
    BlockLie("uncles left out", _UNCLES, lambda raw: raw.block.update(uncles=[])),
    BlockLie("other uncles than the block's", _UNCLES, lambda raw: raw.block.update(uncles=[_WORD])),
    BlockLie("the block's size altered", _NOW, lambda raw: raw.block.update(size="0x7")),
    BlockLie("a total difficulty invented", _NOW, lambda raw: raw.block.update(totalDifficulty="0x7")),
    BlockLie("a transaction altered", _NOW, lambda raw: transactions(raw, "0x2")[0].update(value="0x7")),
    BlockLie("a transaction left out", _NOW, lambda raw: raw.block["transactions"].pop()),
    BlockLie("other senders", _NOW, _other_senders),
    BlockLie("another sender and the contract that it would create", _NOW, _sender_and_contract),
    BlockLie(
        "fees on a legacy transaction",
        _NOW,
        lambda raw: transactions(raw, "0x0")[0].update(maxFeePerGas="0x7", maxPriorityFeePerGas="0x7"),
    ),
    BlockLie(
        "an access list on a legacy transaction",
        _NOW,
        lambda raw: transactions(raw, "0x0")[0].update(accessList=[{"address": _ADDRESS, "storageKeys": []}]),
    ),
    BlockLie(
        "blobs on a transaction without",
        _NOW,
        lambda raw: transactions(raw, "0x2")[0].update(blobVersionedHashes=[_WORD], maxFeePerBlobGas="0x7"),
    ),
    BlockLie(
        "authorizations on a transaction without",
        _NOW,
        lambda raw: transactions(raw, "0x2")[0].update(authorizationList=[_AUTHORIZATION]),
    ),
    BlockLie(
        "the highest price in place of the price paid",
        _NOW,
        lambda raw: [tx.update(gasPrice=tx["maxFeePerGas"]) for tx in transactions(raw, "0x2")],
    ),
    BlockLie(
        "another price on a transaction with fees",
        _NOW,
        lambda raw: transactions(raw, "0x2")[0].update(gasPrice="0x7"),
    ),
    BlockLie(
        "`v` of a typed transaction in the legacy form",
        _NOW,
        lambda raw: [tx.update(v=hex(27 + int(tx["v"], 16))) for tx in transactions(raw, "0x2")],
    ),
    BlockLie(
        "`v` of a typed transaction with the other parity",
        _NOW,
        lambda raw: [tx.update(v=hex(1 - int(tx["v"], 16))) for tx in transactions(raw, "0x2")],
    ),
    BlockLie("a chain that signatures aren't for", _OLD, _without_chain, chain_id=5),
    BlockLie("a receipt left out", _NOW, lambda raw: (raw.receipts or []).pop()),
    BlockLie("a status altered", _NOW, lambda raw: _logged(raw).update(status="0x0")),
    BlockLie("a status invented before Byzantium", _EARLY, lambda raw: _logged(raw).update(status="0x1")),
    BlockLie("a root beside the status", _NOW, lambda raw: _logged(raw).update(root=_WORD)),
    BlockLie("the gas of a transaction altered", _NOW, lambda raw: _logged(raw).update(gasUsed="0x7")),
    BlockLie("a price paid altered", _NOW, lambda raw: _logged(raw).update(effectiveGasPrice="0x7")),
    BlockLie(
        "prices paid left out", _NOW, lambda raw: [each.pop("effectiveGasPrice") for each in receipts(raw)]
    ),
    BlockLie(
        "a created contract altered", _NOW, lambda raw: creation(raw)[1].update(contractAddress=_ADDRESS)
    ),
    BlockLie("a created contract left out", _NOW, lambda raw: creation(raw)[1].update(contractAddress=None)),
    BlockLie(
        "a contract that nobody created", _NOW, lambda raw: _logged(raw).update(contractAddress=_ADDRESS)
    ),
    BlockLie("the blobs' gas altered", _NOW, lambda raw: receipts(raw, "0x3")[0].update(blobGasUsed="0x7")),
    BlockLie("the blobs' gas left out", _NOW, lambda raw: receipts(raw, "0x3")[0].pop("blobGasUsed")),
    BlockLie(
        "blobs' gas on a transaction without",
        _NOW,
        lambda raw: receipts(raw, "0x2")[0].update(blobGasUsed="0x20000", blobGasPrice="0x1"),
    ),
    BlockLie(
        "the price of blob gas altered", _NOW, lambda raw: receipts(raw, "0x3")[0].update(blobGasPrice="0x7")
    ),
    BlockLie("a log altered", _NOW, lambda raw: _logged(raw)["logs"][0].update(data="0x07")),
    BlockLie("a log left out", _NOW, lambda raw: _logged(raw)["logs"].pop()),
    BlockLie("all logs left out, with their filters", _NOW, _hide_logs),
)
