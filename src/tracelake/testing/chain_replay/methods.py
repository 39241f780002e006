"""The methods of a node over a recording: what cryo, ethereum-etl and this project's own reader ask for.

The recorded blocks are the chain, the last of them its head, final and safe. Blocks outside are null.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import orjson

from tracelake.evm.devchain.jsonrpc import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    NULL,
    SERVER_ERROR,
    Caller,
    Json,
    RpcError,
)
from tracelake.evm.devchain.log_filter import LogFilter, parse_filter
from tracelake.evm.devchain.seal import LogEntry
from tracelake.testing.chain_replay.recording import RecordedBlock, Recording, Span

_TAGS = ("latest", "pending", "safe", "finalized")


class ReplayMethods:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._blocks = {each.number: each for each in recording.blocks}
        self._first, self._head = recording.blocks[0].number, recording.blocks[-1].number
        self._by_hash = {each.hash: each for each in recording.blocks}
        self._transactions: dict[str, tuple[Span, Span]] = {
            name: (transaction, receipt)
            for each in recording.blocks
            for name, transaction, receipt in zip(
                each.hashes, each.each_transaction, each.each_receipt, strict=True
            )
        }
        chain_id = recording.chain_id
        self._methods: dict[str, Callable[[list[Any]], Json]] = {
            "eth_chainId": lambda params: orjson.dumps(hex(chain_id)),
            "net_version": lambda params: orjson.dumps(str(chain_id)),
            "web3_clientVersion": lambda params: b'"tracelake-replay"',
            "eth_syncing": lambda params: b"false",
            "eth_blockNumber": lambda params: orjson.dumps(hex(self._head)),
            "eth_getBlockByNumber": lambda params: self._block(self._named(params[0]), params),
            "eth_getBlockByHash": lambda params: self._block(self._named(params[0]), params),
            "eth_getBlockReceipts": self._receipts,
            "eth_getTransactionByHash": lambda params: self._of_transaction(params, 0),
            "eth_getTransactionReceipt": lambda params: self._of_transaction(params, 1),
            "eth_getLogs": self._logs,
        }

    def call(self, method: str, params: list[Any], caller: Caller) -> Json:
        known = self._methods.get(method)
        if known is None:
            raise RpcError(METHOD_NOT_FOUND, f"the method {method} does not exist/is not available")
        try:
            return known(params)
        except (IndexError, TypeError, ValueError, AttributeError):
            raise RpcError(INVALID_PARAMS, f"{method} can't be called with these parameters") from None

    def _named(self, name: str) -> RecordedBlock | None:
        if len(name) == 66:
            return self._by_hash.get(name)
        return self._blocks.get(self._height(name))

    def _height(self, name: str) -> int:
        if name in _TAGS:
            return self._head
        return self._first if name == "earliest" else int(name, 16)

    def _block(self, block: RecordedBlock | None, params: list[Any]) -> Json:
        if block is None:
            return NULL
        return self._recording.piece(block.with_transactions if params[1] else block.with_hashes)

    def _receipts(self, params: list[Any]) -> Json:
        block = self._named(params[0])
        return NULL if block is None else self._recording.piece(block.receipts)

    def _of_transaction(self, params: list[Any], which: int) -> Json:
        spans = self._transactions.get(params[0])
        return NULL if spans is None else self._recording.piece(spans[which])

    def _logs(self, params: list[Any]) -> Json:
        given = params[0]
        wanted = parse_filter(given)
        pieces = (
            self._recording.piece(span) for block in self._range(given) for span in block.logs if span[1]
        )
        if not wanted.addresses and not wanted.topics:
            return b"[" + b",".join(pieces) + b"]"
        return b"[" + b",".join(log for piece in pieces for log in _matching(piece, wanted)) + b"]"

    def _range(self, given: dict[str, Any]) -> Iterator[RecordedBlock]:
        if "blockHash" in given:
            block = self._by_hash.get(given["blockHash"])
            if block is None:
                raise RpcError(SERVER_ERROR, "unknown block")
            yield block
            return
        start = max(self._first, self._height(given.get("fromBlock") or "latest"))
        end = min(self._head, self._height(given.get("toBlock") or "latest"))
        for height in range(start, end + 1):
            yield self._blocks[height]


def _matching(piece: memoryview, wanted: LogFilter) -> Iterator[bytes]:
    for log in orjson.loads(b"".join((b"[", piece, b"]"))):
        if wanted.matches(LogEntry(log["address"], tuple(log["topics"]), b"")):
            yield orjson.dumps(log)
