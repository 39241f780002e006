"""Comparison of everything that is stored with the node's chain: every table, every row.

The node is asked block by block, past the pool and without the Spark source. Its answers become rows by the
decoder, which has tests of its own against other readers of chains.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import psycopg
import pyarrow as pa
import pyarrow.dataset as ds
from psycopg import sql
from psycopg.rows import dict_row

from tests.support.anvil import CHAIN_ID, Anvil
from tests.support.evm_contracts import TRANSFER
from tracelake.client import Client
from tracelake.evm.columns import NESTED, ColumnKind
from tracelake.evm.decode import decode
from tracelake.evm.raw_block import ChainTable, RawBlock
from tracelake.evm.schemas import TABLES

CHAIN_TABLES = (ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.LOGS)
_PAGE = 1000
_WORD = 32
COIN, COLLECTIBLE = 3, 4

Rows = list[dict[str, Any]]


class Upto(NamedTuple):
    """The last blocks that have to be in the partitions of what is ``final``, and of what needn't be."""

    final: int
    fresh: int


@dataclass
class Truth:
    """The node's whole chain as tables."""

    head: int
    tables: dict[ChainTable, pa.Table] = field(default_factory=dict)

    @classmethod
    def of(cls, node: Anvil) -> Truth:
        head = node.head
        raw = [_raw(node, number) for number in range(head + 1)]
        tables = {
            dataset: pa.Table.from_batches([decode(raw, dataset, CHAIN_ID)], TABLES[dataset].arrow)
            for dataset in CHAIN_TABLES
        }
        return cls(head, tables)

    def cold(self, dataset: ChainTable, start: int, end: int) -> Rows:
        rows: Rows = _ordered(self.tables[dataset], dataset, start, end).to_pylist()
        return rows

    def hot(self, dataset: ChainTable) -> Rows:
        whole = _ordered(self.tables[dataset], dataset, 0, self.head)
        return [_as_postgres(row, dataset) for row in TABLES[dataset].to_hot(whole).to_pylist()]

    def transfers(self, start: int, end: int, topics: int) -> list[tuple[Any, ...]]:
        """Of coins (3 topics) or collectibles (4), by a reading of the logs that has nothing to do with the
        operator's."""
        return [
            (
                log["block_number"],
                log["block_hash"],
                log["log_index"],
                log["address"],
                log["topic1"][-20:],
                log["topic2"][-20:],
                int.from_bytes(log["data"] or log["topic3"], "big"),
            )
            for log in self.cold(ChainTable.LOGS, start, end)
            if log["topic0"] == TRANSFER
            and sum(log[f"topic{place}"] is not None for place in range(4)) == topics
            and len(log["data"]) == (_WORD if topics == COIN else 0)
        ]

    def rows(self) -> int:
        return sum(table.num_rows for table in self.tables.values())

    def busiest(self, start: int, end: int) -> dict[tuple[int, bytes], int]:
        counted: dict[tuple[int, bytes], int] = {}
        for log in self.cold(ChainTable.LOGS, start, end):
            key = (log["block_number"], log["address"])
            counted[key] = counted.get(key, 0) + 1
        return counted


def differences(truth: Truth, client: Client, data_dsn: str, upto: Upto) -> Iterator[str]:
    """Every difference, in words."""
    with psycopg.connect(data_dsn, row_factory=dict_row) as data:
        for dataset in CHAIN_TABLES:
            found = _stored(data, client, f"hot_{dataset}", TABLES[dataset].sort_by)
            yield from _unlike(f"hot {dataset}", truth.hot(dataset), found)
        coins = _stored(data, client, "transfers", ("block_number", "log_index"))
        yield from _unlike_transfers("transfers", truth.transfers(0, truth.head, COIN), coins, "value")
        for pending in data.execute("SELECT task_id, events FROM tracelake.outbox"):
            yield f"task {pending['task_id']} has committed rows and not sent {pending['events']}"
    for dataset in CHAIN_TABLES:
        yield from _cold(truth, client, dataset, upto.final)
    yield from _busiest(truth, client, upto.final)
    yield from _collectibles(truth, client, upto.fresh)
    yield from _failed(client)


def _cold(truth: Truth, client: Client, dataset: ChainTable, final_upto: int) -> Iterator[str]:
    name = f"cold_{dataset}"
    found = list(_partitions(client, name))
    yield from _uncovered(name, [(start, end) for start, end, _ in found], final_upto)
    for start, end, table in found:
        rows = _ordered(table, dataset, start, end).to_pylist() if table is not None else []
        yield from _unlike(f"{name} {start}-{end}", truth.cold(dataset, start, end), rows)
        if table is not None and len(rows) != table.num_rows:
            yield f"{name} {start}-{end}: there are rows of other blocks in it"


def _busiest(truth: Truth, client: Client, final_upto: int) -> Iterator[str]:
    partitions = list(_partitions(client, "busiest"))
    yield from _uncovered("busiest", [(start, end) for start, end, _ in partitions], final_upto)
    for start, end, table in partitions:
        rows: Rows = table.to_pylist() if table is not None else []
        found = {(row["block_number"], row["address"]): row["logs"] for row in rows}
        if found != truth.busiest(start, end) or len(found) != len(rows):
            yield f"busiest {start}-{end} isn't what the logs of these blocks give"


def _uncovered(name: str, partitions: list[tuple[int, int]], final_upto: int) -> Iterator[str]:
    expected = 0
    for start, end in partitions:
        if start != expected:
            yield f"{name}: {start}-{end} follows after {expected - 1}"
        expected = end + 1
    if expected <= final_upto:
        yield f"{name}: nothing from {expected} on, though {final_upto} is final"


def _collectibles(truth: Truth, client: Client, upto: int) -> Iterator[str]:
    partitions = list(_partitions(client, "collectibles"))
    yield from _uncovered("collectibles", [(start, end) for start, end, _ in partitions], upto)
    for start, end, table in partitions:
        expected = truth.transfers(start, end, COLLECTIBLE)
        rows: Rows = table.to_pylist() if table is not None else []
        yield from _unlike_transfers(f"collectibles {start}-{end}", expected, rows, "token_id_string")


def _unlike_transfers(what: str, expected: list[tuple[Any, ...]], found: Rows, amount: str) -> Iterator[str]:
    rows = [
        (
            row["block_number"],
            bytes(row["block_hash"]),
            row["log_index"],
            bytes(row["address"]),
            bytes(row["from_address"]),
            bytes(row["to_address"]),
            int(row[amount]),
        )
        for row in found
    ]
    if rows != expected:
        missing, strange = set(expected) - set(rows), set(rows) - set(expected)
        blocks = sorted({row[0] for row in missing | strange})
        yield (
            f"{what}: {len(rows)} rows, {len(expected)} in the logs; "
            f"{len(missing)} missing, {len(strange)} strange, in blocks {blocks[:10]}"
        )


def _failed(client: Client) -> Iterator[str]:
    """Tasks that failed. Passing faults are retried: no task has a reason to fail for good."""
    for task in client.tasks(status="Failed").tasks:
        yield f"task {task.task_id} of {task.job} has failed: {task.error_message}"


def _partitions(client: Client, name: str) -> Iterator[tuple[int, int, pa.Table | None]]:
    after: str | None = None
    while True:
        page = client.partitions(name, limit=_PAGE, after=after)
        for part in page.partitions:
            paths = [file.removeprefix("file://") for file in part.files]
            yield part.start, part.end, ds.dataset(paths, format="parquet").to_table() if paths else None
        if (after := page.next) is None:
            return


def _stored(data: psycopg.Connection[Any], client: Client, name: str, order: tuple[str, ...]) -> Rows:
    """A table is made by the first commit to it."""
    version = client.dataset(name).dataset_version.hex
    if data.execute("SELECT to_regclass(%s) AS made", (f"data.d_{version}",)).fetchone() == {"made": None}:
        return []
    columns = sql.SQL(", ").join(map(sql.Identifier, order))
    statement = sql.SQL("SELECT * FROM {} ORDER BY {}").format(
        sql.Identifier("data", f"d_{version}"), columns
    )
    return data.execute(statement).fetchall()


def _unlike(what: str, expected: Rows, found: Rows) -> Iterator[str]:
    if len(expected) != len(found):
        yield f"{what}: {len(found)} rows, the node has {len(expected)}"
    for wanted, got in zip(expected, found, strict=False):
        if wanted != got:
            names = [name for name in {**wanted, **got} if wanted.get(name) != got.get(name)]
            yield f"{what}: block {wanted['block_number']} differs in {', '.join(names)}"
            return


def _ordered(table: pa.Table, dataset: ChainTable, start: int, end: int) -> pa.Table:
    blocks = ds.field("block_number")
    cut = table.filter((blocks >= start) & (blocks <= end))
    return cut.sort_by([(name, "ascending") for name in TABLES[dataset].sort_by])


def _raw(node: Anvil, number: int) -> RawBlock:
    block, receipts = node.batch(
        [("eth_getBlockByNumber", (hex(number), True)), ("eth_getBlockReceipts", (hex(number),))]
    )
    return RawBlock(number, block, receipts, None, "node")


def _as_postgres(row: dict[str, Any], dataset: ChainTable) -> dict[str, Any]:
    """As a driver gives it: what travels as text comes back as a number or as JSON."""
    plain = dict(row)
    for column in TABLES[dataset].columns:
        if row[column.name] is None:
            continue
        if column.kind is ColumnKind.UINT256:
            plain[column.name] = Decimal(row[column.name])
        elif column.kind in NESTED:
            plain[column.name] = json.loads(row[column.name])
    return plain
