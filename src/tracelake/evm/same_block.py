"""Whether the parts of a block belong together: places, hashes and bloom filters, without computing a root.

Fields are compared as text, which is what they come as; numbers and hashes that differ as text are looked at
closer, since some clients pad numbers or write capitals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracelake.evm.bloom import BITS_OF

Json = dict[str, Any]

_PLACES = [hex(place) for place in range(1 << 12)]
_MANY = 4  # logs that are likely to repeat addresses and topics
_NO_LOGS = "0x" + "0" * 512


class Contradiction(Exception):
    """What doesn't match, as a clause that follows the block and the endpoint."""


def check_parts(block: Json, receipts: list[Json] | None, chain_id: int | None) -> None:
    transactions = block["transactions"]
    _check_transactions(block, transactions, None if chain_id is None else hex(chain_id))
    if receipts is None:
        return
    if len(receipts) != len(transactions):
        raise Contradiction(f"{len(receipts)} receipts for {len(transactions)} transactions")
    bits = _check_receipts(block, transactions, receipts)
    if not _stands_for(block["logsBloom"], bits):
        raise Contradiction("the logs don't give the block's logsBloom")


def same_number(given: str, expected: str) -> bool:
    return given == expected or int(given, 16) == int(expected, 16)


def same_text(given: str, expected: str) -> bool:
    return given == expected or given.lower() == expected.lower()


def _stands_for(bloom: str, bits: int) -> bool:
    return same_text(bloom, "0x" + bits.to_bytes(256, "big").hex())


def _check_transactions(block: Json, transactions: Sequence[Json], chain: str | None) -> None:
    block_hash, number = block["hash"], block["number"]
    for place, (tx, index) in enumerate(zip(transactions, _places(0, len(transactions)), strict=True)):
        if tx["blockHash"] != block_hash and not same_text(tx["blockHash"], block_hash):
            raise Contradiction(f"transaction {place} is of block {tx['blockHash']}, not {block_hash}")
        if tx["blockNumber"] != number and not same_number(tx["blockNumber"], number):
            raise Contradiction(f"transaction {place} is of block number {tx['blockNumber']}")
        if tx["transactionIndex"] != index and not same_number(tx["transactionIndex"], index):
            raise Contradiction(f"transaction {place} has the index {tx['transactionIndex']}")
        if chain is not None and (own := tx.get("chainId")) != chain and own and not same_number(own, chain):
            raise Contradiction(f"transaction {place} is of chain {int(own, 16)}, not {int(chain, 16)}")


def _check_receipts(block: Json, transactions: Sequence[Json], receipts: Sequence[Json]) -> int:
    """Each receipt is its transaction's, and its filter that of its logs; returns the filter of them all."""
    block_hash, number = block["hash"], block["number"]
    bits = logs_before = 0
    for place, (receipt, index) in enumerate(zip(receipts, _places(0, len(receipts)), strict=True)):
        tx_hash = transactions[place]["hash"]
        if receipt["transactionHash"] != tx_hash and not same_text(receipt["transactionHash"], tx_hash):
            raise Contradiction(
                f"receipt {place} is of transaction {receipt['transactionHash']}, not {tx_hash}"
            )
        if receipt["blockHash"] != block_hash and not same_text(receipt["blockHash"], block_hash):
            raise Contradiction(f"receipt {place} is of block {receipt['blockHash']}, not {block_hash}")
        if receipt["blockNumber"] != number and not same_number(receipt["blockNumber"], number):
            raise Contradiction(f"receipt {place} is of block number {receipt['blockNumber']}")
        if receipt["transactionIndex"] != index and not same_number(receipt["transactionIndex"], index):
            raise Contradiction(f"receipt {place} has the index {receipt['transactionIndex']}")
        logs, bloom = receipt["logs"], receipt["logsBloom"]
        if logs:
            own = _check_logs(receipt, logs, logs_before)
            if not _stands_for(bloom, own):
                raise Contradiction(f"the logs of receipt {place} don't give its logsBloom")
            bits |= own
            logs_before += len(logs)
        elif bloom != _NO_LOGS:
            raise Contradiction(f"receipt {place} has no logs, and a logsBloom that stands for some")
    return bits


def _check_logs(receipt: Json, logs: Sequence[Json], before: int) -> int:
    """The logs are their receipt's, and numbered on; returns their bloom filter."""
    block_hash, number = receipt["blockHash"], receipt["blockNumber"]
    tx_hash, index = receipt["transactionHash"], receipt["transactionIndex"]
    filtered: list[str] = []
    for log, place in zip(logs, _places(before, len(logs)), strict=True):
        if log["logIndex"] != place and not same_number(log["logIndex"], place):
            raise Contradiction(
                f"log {int(place, 16)} has the index {int(log['logIndex'], 16)}: one is missing or double"
            )
        if log["blockHash"] != block_hash and not same_text(log["blockHash"], block_hash):
            raise Contradiction(f"log {int(place, 16)} is of block {log['blockHash']}, not {block_hash}")
        if log["transactionHash"] != tx_hash and not same_text(log["transactionHash"], tx_hash):
            raise Contradiction(
                f"log {int(place, 16)} is of transaction {log['transactionHash']}, not {tx_hash}"
            )
        if log["blockNumber"] != number and not same_number(log["blockNumber"], number):
            raise Contradiction(f"log {int(place, 16)} is of block number {log['blockNumber']}")
        if log["transactionIndex"] != index and not same_number(log["transactionIndex"], index):
            raise Contradiction(f"log {int(place, 16)} is of transaction index {log['transactionIndex']}")
        if log.get("removed"):
            raise Contradiction(f"log {int(place, 16)} is marked as removed")
        filtered.append(log["address"])
        filtered += log["topics"]
    bits = 0
    for value in filtered if len(logs) < _MANY else set(filtered):
        bits |= BITS_OF[value]
    return bits


def _places(start: int, count: int) -> list[str]:
    """Numbers as JSON-RPC writes them."""
    end = start + count
    return _PLACES[start:end] if end <= len(_PLACES) else list(map(hex, range(start, end)))
