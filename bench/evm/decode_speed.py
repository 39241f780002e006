"""Microseconds of one core per block for decoding and verifying, without network or files.

python bench/evm/decode_speed.py [--blocks 300] [--transactions 20] [--logs 1]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import orjson

from tests.support.evm_blocks import CHAIN_ID, made_block
from tracelake.evm.decode import decode
from tracelake.evm.hashing import BITS_OF
from tracelake.evm.raw_block import ChainTable, RawBlock, Verify
from tracelake.evm.verify import check_block

TABLES = (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.LOGS)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--transactions", type=int, default=20)
    parser.add_argument("--logs", type=int, default=1, help="per transaction")
    asked = parser.parse_args()
    rng = random.Random(4)
    made = [
        made_block(rng, number, transactions=asked.transactions, logs=asked.logs, kinds=("0x0", "0x2", "0x2"))
        for number in range(asked.blocks)
    ]
    answers = [orjson.dumps((raw.block, raw.receipts)) for raw in made]
    size = sum(map(len, answers)) / len(answers) / 1024
    print(
        f"{asked.blocks} blocks × {asked.transactions} transactions × {asked.logs} logs, {size:.0f} KiB each\n"
    )
    print(f"{'step':34} µs per block")
    _print("parse (orjson)", asked.blocks, lambda blocks: None, answers)
    for dataset in TABLES:
        _print(f"decode {dataset}", asked.blocks, partial(_decode, [dataset]), answers)
    _print(
        "decode all three",
        asked.blocks,
        partial(_decode, TABLES),
        answers,
    )
    for level in (Verify.BLOOM, Verify.FULL):
        _print(f"verify {level}", asked.blocks, partial(_verify, level), answers)


def _decode(datasets: Sequence[ChainTable], blocks: list[RawBlock]) -> None:
    for dataset in datasets:
        decode(blocks, dataset, CHAIN_ID)


def _verify(level: Verify, blocks: list[RawBlock]) -> None:
    BITS_OF.clear()
    for raw in blocks:
        check_block(raw, level, CHAIN_ID)


def _print(name: str, count: int, step: Callable[[list[RawBlock]], object], answers: list[bytes]) -> None:
    """The best of five on freshly parsed blocks, as they come off the wire."""
    best = float("inf")
    for _ in range(5):
        started = time.process_time()
        blocks = [_parse(number, answer) for number, answer in enumerate(answers)]
        if name.startswith("parse"):
            best = min(best, time.process_time() - started)
            continue
        started = time.process_time()
        step(blocks)
        best = min(best, time.process_time() - started)
    print(f"{name:34} {best / count * 1e6:12.1f}")


def _parse(number: int, answer: bytes) -> RawBlock:
    block, receipts = orjson.loads(answer)
    return RawBlock(number, block, receipts, None, "bench")


if __name__ == "__main__":
    main()
