"""A dev chain's rows in hot tables, put there without a follower: for tests of what reads and compacts them."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID, uuid4

import orjson
import psycopg
import pyarrow as pa
from psycopg import sql

from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.raw_block import Dataset, RawBlock
from tracelake.evm.schemas import TABLES
from tracelake.operators.postgres_csv import OPTIONS, encoded

USUAL = (Dataset.BLOCKS, Dataset.TRANSACTIONS, Dataset.LOGS)


def raw_blocks(chain: DevChain, start: int, end: int) -> list[RawBlock]:
    return [
        RawBlock(
            block.number,
            orjson.loads(block.with_transactions),
            [orjson.loads(receipt) for receipt in block.receipts],
            None,
            "dev",
        )
        for block in chain.blocks(start, end)
    ]


def rows_of(chain: DevChain, dataset: Dataset, start: int, end: int) -> pa.Table:
    """What the chain says, in the shape of files."""
    return pa.Table.from_batches([decode(raw_blocks(chain, start, end), dataset, chain.chain_id)])


class HotChain:
    """Tables in the schema ``data`` of a database of the test's own, named as the platform names them."""

    def __init__(
        self, dsn: str, datasets: Sequence[Dataset] = USUAL, versions: Sequence[UUID] | None = None
    ) -> None:
        self.dsn = dsn
        names = [uuid4() for _ in datasets] if versions is None else versions
        self.versions: dict[Dataset, UUID] = dict(zip(datasets, names, strict=True))
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._connection.execute("CREATE SCHEMA IF NOT EXISTS data")
        for dataset in datasets:
            columns = sql.SQL(", ").join(
                sql.SQL("{} {}").format(sql.Identifier(name), sql.SQL(kind))
                for name, kind in TABLES[dataset].postgres_types.items()
            )
            self._connection.execute(sql.SQL("CREATE TABLE {} ({})").format(self.table(dataset), columns))
            self._connection.execute(sql.SQL("CREATE INDEX ON {} (block_number)").format(self.table(dataset)))

    def table(self, dataset: Dataset) -> sql.Identifier:
        return sql.Identifier("data", f"d_{self.versions[dataset].hex}")

    def store(self, chain: DevChain, start: int, end: int) -> None:
        """Replace these blocks by the chain's, in one transaction, as a follower does."""
        raw = raw_blocks(chain, start, end)
        with self._connection.transaction():
            for dataset in self.versions:
                self.delete(start, end, dataset)
                rows = pa.Table.from_batches([decode(raw, dataset, chain.chain_id)])
                statement = sql.SQL("COPY {} FROM STDIN ({})").format(self.table(dataset), sql.SQL(OPTIONS))
                with self._connection.cursor().copy(statement) as copy:
                    for piece in encoded(TABLES[dataset].to_hot(rows)):
                        copy.write(piece)

    def delete(self, start: int, end: int, *datasets: Dataset) -> None:
        for dataset in datasets or tuple(self.versions):
            self.execute(dataset, "DELETE FROM {} WHERE block_number BETWEEN %s AND %s", start, end)

    def execute(self, dataset: Dataset, statement: str, *arguments: object) -> None:
        """A statement about a table, which stands in it as ``{}``."""
        self._connection.execute(sql.SQL(statement).format(self.table(dataset)), arguments)

    def close(self) -> None:
        self._connection.close()
