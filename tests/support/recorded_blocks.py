"""Blocks of every fork, for tests that must hold on all of them.

``RECORDED`` are real: blocks of Ethereum's mainnet, and of a public test chain that went through all forks from
Frontier to Osaka, as nodes answered (``recorded/ethereum.json.gz``); some have no receipts. ``SYNTHETIC`` are the
dev chain's, one for each fork, with receipts and every transaction type that the fork has. Of Amsterdam there are
only those.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.forks import Fork
from tracelake.evm.raw_block import RawBlock

_FILE = Path(__file__).parent / "recorded" / "ethereum.json.gz"
_SYNTHETIC_AT = 12
"""A height at which eight transactions are of every type, and one creates, one pays and one fails, with
withdrawals."""


@dataclass(frozen=True, slots=True)
class KnownBlock:
    name: str
    fork: Fork
    chain_id: int
    raw: RawBlock

    def __str__(self) -> str:
        return self.name


def _recorded() -> list[KnownBlock]:
    entries: list[dict[str, Any]] = orjson.loads(gzip.decompress(_FILE.read_bytes()))
    return [
        KnownBlock(
            each["name"],
            Fork[each["fork"].upper()],
            each["chain_id"],
            RawBlock(int(each["block"]["number"], 16), each["block"], each["receipts"], None, "recorded"),
        )
        for each in entries
    ]


def synthetic_chain(fork: Fork, blocks: int = _SYNTHETIC_AT) -> DevChain:
    """The dev chain that the synthetic blocks of a fork are from."""
    forks, logs = (fork.name.lower(),), 1
    return DevChain(
        5, blocks=blocks, forks=forks, transactions_per_block=8, logs_per_transaction=logs, steady=True
    )


def _synthetic(fork: Fork) -> KnownBlock:
    chain = synthetic_chain(fork)
    block = chain.block(_SYNTHETIC_AT)
    assert block is not None
    contents = orjson.loads(block.with_transactions), orjson.loads(block.all_receipts)
    raw = RawBlock(_SYNTHETIC_AT, *contents, None, "synthetic")
    return KnownBlock(f"synthetic {fork.title}", fork, chain.chain_id, raw)


RECORDED = _recorded()
SYNTHETIC = [_synthetic(fork) for fork in Fork]
