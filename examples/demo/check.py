"""Compares the stored rows with the chain's, read past the code that stored them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urlsplit

import orjson
import psycopg
from psycopg import sql

from tracelake.client import Client
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.hashing import keccak256

_TRANSFER = "0x" + keccak256(b"Transfer(address,address,uint256)").hex()
_TOPICS_OF_A_COIN = 3
_WORD = 2 + 64


def hashes(chain: DevChain, start: int, end: int) -> list[str]:
    return [block.hash for block in chain.blocks(start, end)]


def count_transfers(chain: DevChain, start: int, end: int) -> int:
    """The number of coin transfers; transfers of collectibles have the same signature and one topic more."""
    return sum(map(_is_transfer, _logs(chain, start, end)))


def large_transfers(chain: DevChain, start: int, end: int, least: int) -> set[str]:
    """Transactions and log indexes of large transfers, as alerts name them, by the watchers' own comparison."""
    return {
        f"{log['transactionHash']}:{int(log['logIndex'], 16)}"
        for log in _logs(chain, start, end)
        if _is_transfer(log) and float(int(log["data"], 16)) >= float(least)
    }


def standing_alerts(client: Client) -> set[str]:
    found = client.query_rows("SELECT dedupe_key FROM alerts WHERE retracted_at IS NULL")
    return {str(key) for (key,) in found.rows}


def retracted_alerts(client: Client) -> int:
    [[count]] = client.query_rows("SELECT count(*) FROM alerts WHERE retracted_at IS NOT NULL").rows
    return int(count)


def queried_hashes(client: Client) -> list[str]:
    """Hashes of the compacted dataset of blocks, by the Query Service, hot and cold rows as one."""
    found = client.query_rows("SELECT block_hash FROM blocks ORDER BY block_number")
    return [str(value) for (value,) in found.rows]


def stored_hashes(client: Client, dataset: str) -> list[str]:
    """Hashes of a dataset of blocks in Parquet, in block order."""
    return ["0x" + value.hex() for value in _column(client, dataset, "block_hash")]


def hot_hashes(client: Client, data_owner_dsn: str, dataset: str) -> list[str]:
    """Hashes of a dataset of blocks in Postgres, in block order."""
    rows = _hot(client, data_owner_dsn, dataset, "SELECT block_hash FROM {} ORDER BY block_number")
    return ["0x" + bytes(row[0]).hex() for row in rows]


def hot_rows(client: Client, data_owner_dsn: str, dataset: str) -> int:
    [(rows,)] = _hot(client, data_owner_dsn, dataset, "SELECT count(*) FROM {}")
    return int(rows)


def _hot(client: Client, data_owner_dsn: str, dataset: str, query: str) -> list[tuple[Any, ...]]:
    table = sql.Identifier("data", f"d_{client.dataset(dataset).dataset_version.hex}")
    with psycopg.connect(data_owner_dsn) as data:
        return data.execute(sql.SQL(query).format(table)).fetchall()


def _column(client: Client, dataset: str, column: str) -> Iterator[bytes]:
    """A column of the committed files."""
    import pyarrow.parquet as pq

    for partition in client.partitions(dataset, limit=1000).partitions:
        for location in partition.files:
            yield from pq.read_table(unquote(urlsplit(location).path)).column(column).to_pylist()


def _is_transfer(log: dict[str, Any]) -> bool:
    return (
        log["topics"][:1] == [_TRANSFER]
        and len(log["topics"]) == _TOPICS_OF_A_COIN
        and len(log["data"]) == _WORD
    )


def _logs(chain: DevChain, start: int, end: int) -> Iterator[dict[str, Any]]:
    for block in chain.blocks(start, end):
        for receipt in block.receipts:
            yield from orjson.loads(receipt)["logs"]
