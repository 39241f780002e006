"""A chain table where it is stored, in committed files or in the data database, for executors to read a span of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as pads
import pyarrow.parquet as pq

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES
from tracelake.objects.prefix import ObjectLocation
from tracelake.operators.hot_and_cold import not_cold
from tracelake.operators.inputs import Input
from tracelake.operators.parquet_file import local_path
from tracelake.operators.postgres_scan import PostgresScan
from tracelake.operators.stored_chain.hot_rows import chain_scan, hot_rows


class StoredFile(NamedTuple):
    path: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTable:
    """Travels to executors by pickle."""

    dataset: Dataset
    files: tuple[StoredFile, ...] = ()
    hot: PostgresScan | None = None

    def rows(self, start: int, end: int) -> pa.Table:
        """All rows of blocks ``start`` to ``end``, sorted as the table is, in the shape of files."""
        table = TABLES[self.dataset]
        if self.hot is not None:
            with self.hot.connected() as connection:
                rows = list(hot_rows(connection, self.hot, BlockRange(start, end)))
            return pa.concat_tables([table.arrow.empty_table(), *rows])
        rows = [table.arrow.empty_table(), *self._from_files(start, end)]
        # Ours are sorted as they are written; another writer's needn't be, and aren't wrong for it.
        return pa.concat_tables(rows).sort_by([(name, "ascending") for name in table.sort_by])

    def _from_files(self, start: int, end: int) -> Iterator[pa.Table]:
        schema = TABLES[self.dataset].arrow
        block = pc.field("block_number")
        for file in self.files:
            if file.start <= end and file.end >= start:
                stored = pads.dataset(file.path, format="parquet", schema=schema)
                yield stored.to_table(filter=(block >= start) & (block <= end))


def stored_table(source: Input) -> StoredTable | None:
    """An input as a table of a chain; None while it has neither files nor rows. Files must hold the whole scope: an
    input that doesn't trigger may be behind, and what isn't committed yet isn't missing."""
    if source.storage == "postgres":
        found = chain_scan(source.data, source.dataset_version, f"input {source.index}")
        return None if found is None else StoredTable(found[0], hot=found[1])
    listed = source.files()
    if not listed:
        return None
    if uncommitted := not_cold(source.scope, listed) if source.scope is not None else []:
        raise Unavailable(
            "InputIncomplete",
            f"blocks {uncommitted[0].partition_key} of input {source.index} aren't committed yet",
        )
    files = [_stored_file(file) for file in listed]
    names = set(pq.read_schema(files[0].path).names)
    for dataset, table in TABLES.items():
        if names == set(table.arrow.names):
            return StoredTable(dataset, files=tuple(sorted(files, key=lambda file: file.start)))
    raise Invalid(
        "NotAChainTable",
        f"input {source.index} is none of the chain's tables ({', '.join(TABLES)}): "
        f"its columns are {', '.join(sorted(names))}",
    )


def _stored_file(file: InputFile) -> StoredFile:
    """What it is known to hold; a file that doesn't say may hold anything of its partition."""
    return StoredFile(
        str(local_path(ObjectLocation.parse(file.location))),
        file.start if file.min_block is None else file.min_block,
        file.end if file.max_block is None else file.max_block,
    )
