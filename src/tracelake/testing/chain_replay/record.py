"""Recording a chain: from a node over JSON-RPC, or from a dev chain without one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson

from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.chain import DevChain
from tracelake.testing.chain_replay.recording import MAGIC, write_recording

_BATCH = 50
_TIMEOUT = 120.0

Block = tuple[dict[str, Any], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Standard:
    """A chain that benchmarks are run on: block 0, which is empty, and ``blocks`` more."""

    blocks: int
    transactions: int
    logs: int
    seed: int = 4


# As many logs per block as the busiest chains have, and as many blocks as make the same order of bytes.
STANDARD = {
    "plain": Standard(blocks=3_000, transactions=20, logs=1),
    "dense": Standard(blocks=200, transactions=20, logs=50),
}


def record(url: str, start: int, end: int, path: Path) -> int:
    """The blocks from ``start`` to ``end`` of the chain behind ``url``; how many there are."""
    with httpx.Client(timeout=_TIMEOUT, trust_env=False) as http:
        (chain_id,) = _call(http, url, [("eth_chainId", [])])
        return write_recording(path, int(chain_id, 16), _of_node(http, url, start, end))


def record_devchain(chain: DevChain, start: int, end: int, path: Path) -> int:
    """The same for a dev chain of this process."""
    return write_recording(path, chain.chain_id, _of_devchain(chain, start, end))


def standard_recording(name: str, folder: Path) -> Path:
    """The file of one of the standard chains, which is made if it isn't there yet."""
    standard = STANDARD[name]
    version = MAGIC.split()[-1].decode()
    shape = f"{standard.blocks}x{standard.transactions}x{standard.logs}"
    path = folder / f"{name}_{shape}_seed{standard.seed}_v{version}.chain"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        chain = DevChain(
            standard.seed,
            transactions_per_block=standard.transactions,
            logs_per_transaction=standard.logs,
            steady=True,
            blocks=standard.blocks,
            cache_bytes=0,
        )
        record_devchain(chain, 0, standard.blocks, path)
    return path


def _of_devchain(chain: DevChain, start: int, end: int) -> Iterator[Block]:
    for height in range(start, end + 1):
        block = chain.block(height)
        if block is None:
            raise Invalid("NoSuchBlock", f"the chain ends before block {height}")
        yield orjson.loads(block.with_transactions), orjson.loads(block.all_receipts)


def _of_node(http: httpx.Client, url: str, start: int, end: int) -> Iterator[Block]:
    for first in range(start, end + 1, _BATCH):
        heights = [hex(height) for height in range(first, min(first + _BATCH, end + 1))]
        blocks = _call(http, url, [("eth_getBlockByNumber", [height, True]) for height in heights])
        receipts = _call(http, url, [("eth_getBlockReceipts", [height]) for height in heights])
        for height, block, its_receipts in zip(heights, blocks, receipts, strict=True):
            if block is None or its_receipts is None:
                raise Invalid("NoSuchBlock", f"the node doesn't have block {int(height, 16)}")
            yield block, its_receipts


def _call(http: httpx.Client, url: str, calls: list[tuple[str, list[Any]]]) -> list[Any]:
    body = [
        {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
        for number, (method, params) in enumerate(calls)
    ]
    headers = {"content-type": "application/json"}
    response = http.post(url, content=orjson.dumps(body), headers=headers).raise_for_status()
    answers = sorted(orjson.loads(response.content), key=lambda answer: int(answer["id"]))
    for answer in answers:
        if "error" in answer:
            raise Invalid("RecordingFailed", f"{calls[answer['id']][0]}: {answer['error']}")
    return [answer["result"] for answer in answers]
