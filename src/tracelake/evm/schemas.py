"""The tables of a chain, in one place: what the source reads, what operators store, and what the docs page
shows.

The names are those that the field knows from cryo. Every table has the chain, the block with its hash and its
time, so that a row can be traced to a block and a day without a join. ``sort_by`` orders a table's rows and
identifies each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from tracelake.evm.columns import POSTGRES, Column, Kind, arrow_fields, hot_field, spark_fields
from tracelake.evm.hot_shape import from_hot, to_hot
from tracelake.evm.raw_block import Dataset
from tracelake.evm.table_columns import (
    BLOCKS,
    EVERY_TABLE,
    LOGS,
    RECEIPTS,
    TRACES,
    TRANSACTIONS,
    WITHDRAWALS,
)


@dataclass(frozen=True)
class TableSchema:
    dataset: Dataset
    about: str
    columns: tuple[Column, ...]
    sort_by: tuple[str, ...]
    lookups: tuple[tuple[str, ...], ...]

    @cached_property
    def arrow(self) -> pa.Schema:
        """As in Parquet."""
        return pa.schema([field for column in self.columns for field in arrow_fields(column)])

    @cached_property
    def spark(self) -> str:
        """The same as a Spark DDL string."""
        return ", ".join([field for column in self.columns for field in spark_fields(column)])

    @cached_property
    def hot_arrow(self) -> pa.Schema:
        """The rows of the hot table as Arrow: a uint256 is one decimal string, a nested column JSON text."""
        return pa.schema([hot_field(column) for column in self.columns])

    @cached_property
    def postgres_types(self) -> dict[str, str]:
        return {column.name: POSTGRES[column.kind] for column in self.columns}

    def to_hot(self, table: pa.Table) -> pa.Table:
        """From the shape of ``arrow`` to that of ``hot_arrow``."""
        return to_hot(table, self.columns)

    def from_hot(self, table: pa.Table) -> pa.Table:
        """Back again. ``numeric`` may come as text or decimals, JSON and times as text or their own types."""
        return from_hot(table, self.columns)


def _table(
    dataset: Dataset,
    about: str,
    columns: tuple[Column, ...],
    sort_by: tuple[str, ...],
    *lookups: tuple[str, ...],
) -> TableSchema:
    return TableSchema(dataset, about, EVERY_TABLE + columns, ("block_number", *sort_by), lookups)


_OF_BLOCK = ("block_number",)
_OF_TRANSACTION = ("transaction_hash",)

TABLES: Mapping[Dataset, TableSchema] = {
    table.dataset: table
    for table in (
        _table(Dataset.BLOCKS, "One row per block: its header.", BLOCKS, (), _OF_BLOCK, ("block_hash",)),
        _table(
            Dataset.TRANSACTIONS,
            "One row per transaction, with what its receipt says about it.",
            TRANSACTIONS,
            ("transaction_index",),
            _OF_BLOCK,
            _OF_TRANSACTION,
            ("from_address", "block_number"),
            ("to_address", "block_number"),
        ),
        _table(
            Dataset.LOGS,
            "One row per log.",
            LOGS,
            ("log_index",),
            _OF_BLOCK,
            _OF_TRANSACTION,
            ("address", "block_number"),
            ("topic0", "block_number"),
        ),
        _table(
            Dataset.RECEIPTS,
            "One row per receipt, as the node has it.",
            RECEIPTS,
            ("transaction_index",),
            _OF_BLOCK,
            _OF_TRANSACTION,
            ("contract_address",),
        ),
        _table(
            Dataset.WITHDRAWALS,
            "One row per withdrawal from the beacon chain.",
            WITHDRAWALS,
            ("withdrawal_index",),
            _OF_BLOCK,
            ("address", "block_number"),
            ("validator_index", "block_number"),
        ),
        _table(
            Dataset.TRACES,
            "One row per call, creation, destruction or reward, in the shape of trace_block.",
            TRACES,
            ("trace_index",),
            _OF_BLOCK,
            _OF_TRANSACTION,
            ("action_from", "block_number"),
            ("action_to", "block_number"),
        ),
    )
}

__all__ = ["TABLES", "Column", "Kind", "TableSchema"]
