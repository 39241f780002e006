"""Recordings of a chain, made from a node over JSON-RPC or from a dev chain without one.

    magic · pieces · index (msgpack) · the index's place (8 bytes)

A recording is a file of the node's JSON, encoded once, and an index of its pieces. A receipt is a piece of its
block's receipts, and its logs are a piece of it: nothing is stored twice but the hashes. The file is mapped
into memory, so serving a piece copies it once, into the response.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import orjson

from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.chain import DevChain

MAGIC = b"tracelake chain 1\n"
_PLACE_BYTES = 8
Span = tuple[int, int]
_BATCH = 50
_TIMEOUT = 120.0
Block = tuple[dict[str, Any], list[dict[str, Any]]]


class RecordedBlock(msgspec.Struct, array_like=True, frozen=True):
    """Spans are places in the file: where a piece begins and how long it is. ``logs`` has one per receipt, of what
    stands between the brackets."""

    number: int
    hash: str
    with_transactions: Span
    with_hashes: Span
    receipts: Span
    hashes: list[str]
    each_transaction: list[Span]
    each_receipt: list[Span]
    logs: list[Span]


class Index(msgspec.Struct, array_like=True, frozen=True):
    chain_id: int
    blocks: list[RecordedBlock]


class Recording:
    """A file that was recorded, ready to be read."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            # Read ahead where the system can, so that the first client isn't slower than the next.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            mapped = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
        self._view = memoryview(mapped)
        if bytes(self._view[: len(MAGIC)]) != MAGIC:
            raise Invalid("NotARecording", f"{path} isn't a recorded chain")
        place = int.from_bytes(self._view[-_PLACE_BYTES:])
        index = msgspec.msgpack.decode(self._view[place:-_PLACE_BYTES], type=Index)
        self.chain_id = index.chain_id
        self.blocks = index.blocks

    def piece(self, span: Span) -> memoryview:
        begin, size = span
        return self._view[begin : begin + size]


def write_recording(
    path: Path, chain_id: int, blocks: Iterable[tuple[dict[str, Any], list[dict[str, Any]]]]
) -> int:
    """Write blocks (with whole transactions) and their receipts, in the order of their numbers. The file is there
    when it is complete. How many blocks there are."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    with unfinished.open("wb") as file:
        file.write(MAGIC)
        place = len(MAGIC)
        recorded = []
        for block, receipts in blocks:
            pieces, entry = _pieces(block, receipts, place)
            recorded.append(entry)
            file.write(pieces)
            place += len(pieces)
        file.write(msgspec.msgpack.encode(Index(chain_id, recorded)))
        file.write(place.to_bytes(_PLACE_BYTES))
    unfinished.replace(path)
    return len(recorded)


def _pieces(block: dict[str, Any], receipts: list[dict[str, Any]], place: int) -> tuple[bytes, RecordedBlock]:
    """A block's part of the file, which begins at ``place``."""
    transactions: list[dict[str, Any]] = block["transactions"]
    hashes = [each["hash"] for each in transactions]
    bare = orjson.dumps({name: value for name, value in block.items() if name != "transactions"})[:-1]
    written = bytearray()

    def put(piece: bytes) -> Span:
        written.extend(piece)
        return place + len(written) - len(piece), len(piece)

    def put_list(pieces: Iterable[bytes]) -> list[Span]:
        spans = []
        written.extend(b"[")
        for number, piece in enumerate(pieces):
            if number:
                written.extend(b",")
            spans.append(put(piece))
        written.extend(b"]")
        return spans

    begin = place
    put(bare + b',"transactions":')
    each_transaction = put_list(map(orjson.dumps, transactions))
    put(b"}")
    with_transactions = (begin, place + len(written) - begin)
    with_hashes = put(bare + b',"transactions":' + orjson.dumps(hashes) + b"}")
    begin = place + len(written)
    encoded = [orjson.dumps(each) for each in receipts]
    each_receipt = put_list(encoded)
    all_receipts = (begin, place + len(written) - begin)
    logs = [
        _logs_in(piece, receipt, span)
        for piece, receipt, span in zip(encoded, receipts, each_receipt, strict=True)
    ]
    entry = RecordedBlock(
        number=int(block["number"], 16),
        hash=block["hash"],
        with_transactions=with_transactions,
        with_hashes=with_hashes,
        receipts=all_receipts,
        hashes=hashes,
        each_transaction=each_transaction,
        each_receipt=each_receipt,
        logs=logs,
    )
    return bytes(written), entry


def _logs_in(encoded: bytes, receipt: dict[str, Any], span: Span) -> Span:
    logs = orjson.dumps(receipt["logs"])[1:-1]
    return span[0] + encoded.index(b'"logs":[' + logs) + len(b'"logs":['), len(logs)


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
