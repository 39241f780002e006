"""The replay server: a node's methods over a recording, as cryo, ethereum-etl and our own reader call them.

The recorded blocks are the chain, and the last of them is its head, final and safe. Blocks outside are null.
The server is a process of its own, so that its cost isn't part of a measurement.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import uvloop

from tests.support.chain_replay.recording import RecordedBlock, Recording, Span
from tracelake.domain.errors import Unavailable
from tracelake.evm.devchain.blocks import LogEntry
from tracelake.evm.devchain.jsonrpc import (
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    NULL,
    SERVER_ERROR,
    JsonBytes,
    RpcCaller,
    RpcError,
)
from tracelake.evm.devchain.methods import LogFilter, parse_filter
from tracelake.evm.devchain.server import LOOPBACK, listen, url_of
from tracelake.kernel import parent_death_hook

_TAGS = ("latest", "pending", "safe", "finalized")
READY = "ready "


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
        self._methods: dict[str, Callable[[list[Any]], JsonBytes]] = {
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

    def call(self, method: str, params: list[Any], caller: RpcCaller) -> JsonBytes:
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

    def _block(self, block: RecordedBlock | None, params: list[Any]) -> JsonBytes:
        if block is None:
            return NULL
        return self._recording.piece(block.with_transactions if params[1] else block.with_hashes)

    def _receipts(self, params: list[Any]) -> JsonBytes:
        block = self._named(params[0])
        return NULL if block is None else self._recording.piece(block.receipts)

    def _of_transaction(self, params: list[Any], which: int) -> JsonBytes:
        spans = self._transactions.get(params[0])
        return NULL if spans is None else self._recording.piece(spans[which])

    def _logs(self, params: list[Any]) -> JsonBytes:
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


@contextmanager
def replaying(path: Path) -> Iterator[str]:
    """A server for the recording at ``path``, on a free loopback port; yields its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.chain_replay", "serve", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=parent_death_hook(signal.SIGINT),
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith(READY):
            raise Unavailable("ReplayFailed", f"the replay server of {path.name} didn't start")
        yield line[len(READY) :].strip()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def serve(path: Path, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM."""
    recording = Recording(path)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(ReplayMethods(recording), port, on_ready))


async def _serve(methods: ReplayMethods, port: int, on_ready: Callable[[str], None]) -> None:
    stop_requested = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, stop_requested.set)
    server = await listen(methods, LOOPBACK, port)
    on_ready(url_of(server))
    await stop_requested.wait()
    server.close()
