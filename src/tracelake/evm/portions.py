"""Fetched blocks, a few hundred at a time: what is decoded at once, and what is in memory at once.

Decoding has a fixed price per call, and parsed JSON is several times as large as the columns that it becomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tracelake.evm.raw_block import Dataset, RawBlock

MAX_BLOCKS = 200
MAX_ITEMS = 20_000

_OF_RECEIPTS = frozenset({Dataset.TRANSACTIONS, Dataset.LOGS, Dataset.RECEIPTS})


def need_receipts(datasets: Iterable[Dataset]) -> bool:
    return not _OF_RECEIPTS.isdisjoint(datasets)


def portions(blocks: Iterable[RawBlock]) -> Iterator[list[RawBlock]]:
    """In their order, none of them empty; one block that is larger than a portion is one by itself."""
    portion: list[RawBlock] = []
    items = 0
    for raw in blocks:
        portion.append(raw)
        items += _items(raw)
        if len(portion) >= MAX_BLOCKS or items >= MAX_ITEMS:
            yield portion
            portion, items = [], 0
    if portion:
        yield portion


def _items(raw: RawBlock) -> int:
    """Receipts that weren't verified may be without logs, or with something else: decoding says so."""
    logs = sum(len(logs) for receipt in raw.receipts or () if type(logs := receipt.get("logs")) is list)
    return len(raw.block["transactions"]) + logs + len(raw.traces or ())
