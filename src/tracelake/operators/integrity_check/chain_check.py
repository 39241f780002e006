"""Stored rows of some blocks against what the chain says of them now.

``bloom`` asks for headers alone: the hash of each block, how many transactions it has, and the filter of its logs.
``full`` fetches the blocks, proves them as an ingest would, and compares every value. That a stored block isn't the
chain's is believed only if no endpoint has it: while some do, they are to agree first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.domain.errors import Unavailable
from tracelake.evm.bloom import bits_of
from tracelake.evm.decode import decode
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.portions import need_receipts, portions
from tracelake.evm.raw_block import Dataset, Verify
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.operators.stored_chain.finding import Finding

Rows = Mapping[Dataset, pa.Table]

# What some nodes leave out or count in their own way; nothing in a header proves it.
_AT_LIBERTY = ("size", "total_difficulty_binary", "total_difficulty_string", "total_difficulty_f64")
_ALSO_AT_LIBERTY = ("gas_price", "y_parity", "blob_gas_price", "blob_gas_used")
_NOT_PROVEN = {*_AT_LIBERTY, *_ALSO_AT_LIBERTY}
_TOPICS = ("topic0", "topic1", "topic2", "topic3")


def against_headers(pool: Pool, stored: Rows, start: int, end: int) -> Iterator[Finding]:
    headers = _headers(pool, start, end)
    yield from _other_hashes(pool, stored, {number: header["hash"] for number, header in headers.items()})
    if Dataset.TRANSACTIONS in stored:
        counts = _by_block(stored[Dataset.TRANSACTIONS], start, end)
        for number, header in headers.items():
            if counts[number - start] != len(header["transactions"]):
                what = f"has {counts[number - start]} transactions, the chain {len(header['transactions'])}"
                yield Finding(number, number, what)
    if Dataset.LOGS in stored:
        blooms = _blooms(stored[Dataset.LOGS])
        for number, header in headers.items():
            if blooms.get(number, 0) != int(header["logsBloom"], 16):
                yield Finding(number, number, "has other logs than the filter of the chain's block says")


def against_content(pool: Pool, stored: Rows, start: int, end: int, chain_id: int) -> Iterator[Finding]:
    """Blocks become rows as they come in: as JSON, a hundred dense ones wouldn't fit."""
    hashes: dict[int, str] = {}
    decoded: dict[Dataset, list[pa.RecordBatch]] = {dataset: [] for dataset in stored}
    blocks = fetch_blocks(
        pool,
        range(start, end + 1),
        receipts=need_receipts(stored),
        traces=Dataset.TRACES in stored,
        verify=Verify.FULL,
    )
    for portion in portions(blocks):
        hashes |= {raw.number: raw.block["hash"] for raw in portion}
        for dataset, batches in decoded.items():
            batches.append(decode(portion, dataset, chain_id))
    yield from _other_hashes(pool, stored, hashes)
    for dataset, rows in stored.items():
        chain = pa.Table.from_batches(decoded[dataset], TABLES[dataset].arrow)
        yield from _other_rows(dataset, rows, chain, start, end)


def _other_hashes(pool: Pool, stored: Rows, hashes: Mapping[int, str]) -> Iterator[Finding]:
    """By the hash of every stored row, whatever tables there are."""
    seen: set[tuple[int, bytes]] = set()
    for rows in stored.values():
        pairs = (
            rows.select(["block_number", "block_hash"]).group_by(["block_number", "block_hash"]).aggregate([])
        )
        seen |= {(row["block_number"], row["block_hash"]) for row in pairs.to_pylist()}
    for number, stored_hash in sorted(seen, key=lambda pair: pair[0]):
        here, there = "0x" + (stored_hash or b"").hex(), hashes[number]
        if here == there:
            continue
        believers = [
            name
            for name, header in pool.headers_by_endpoint(number).items()
            if header and header["hash"] == here
        ]
        if believers:
            raise Unavailable(
                "EndpointsDisagree",
                f"block {number} is stored as {here}, as {', '.join(believers)} has it; others have {there}",
            )
        yield Finding(number, number, f"is stored as {here}, the chain's is {there}")


def _headers(pool: Pool, start: int, end: int) -> dict[int, dict[str, Any]]:
    numbers = range(start, end + 1)
    answers = pool.batch([("eth_getBlockByNumber", (hex(number), False)) for number in numbers])
    found = {}
    for number, answer in zip(numbers, answers, strict=True):
        header = answer if answer is not None else pool.header(number)
        if header is None:
            raise Unavailable("BlockNotFound", f"block {number} is stored, but no endpoint has it now")
        found[number] = header
    return found


def _other_rows(
    dataset: Dataset, stored: pa.Table, chain: pa.Table, start: int, end: int
) -> Iterator[Finding]:
    names = [name for name in chain.column_names if name not in _NOT_PROVEN]
    stored, chain = stored.select(names), chain.select(names)
    if stored.equals(chain):
        return
    for number in range(start, end + 1):
        here, there = _of_block(stored, number), _of_block(chain, number)
        if here.num_rows != there.num_rows:
            what = f"has {here.num_rows} rows in {dataset}, the chain {there.num_rows}"
            yield Finding(number, number, what)
        elif different := [name for name in names if not here.column(name).equals(there.column(name))]:
            yield Finding(number, number, f"has other values in {dataset}: {', '.join(different)}")


def _of_block(rows: pa.Table, number: int) -> pa.Table:
    return rows.filter(pc.equal(rows.column("block_number"), number)).combine_chunks()


def _by_block(rows: pa.Table, start: int, end: int) -> npt.NDArray[np.int64]:
    blocks = rows.column("block_number").to_numpy() - start
    return np.bincount(blocks, minlength=end - start + 1)


def _blooms(logs: pa.Table) -> dict[int, int]:
    """The filter of each block's stored logs, as a number."""
    found: dict[int, int] = {}
    columns = [logs.column(name).to_pylist() for name in ("block_number", "address", *_TOPICS)]
    for number, *values in zip(*columns, strict=True):
        bits = found.get(number, 0)
        for value in values:
            if value is not None:
                bits |= bits_of("0x" + value.hex())
        found[number] = bits
    return found
