"""Tables of a chain: the columns that the source reads and operators store, and the conversion to hot tables.

The column names are those of cryo. Every table has the chain, the block with its hash and its time, so that a
row can be traced to a block and a day without a join. ``sort_by`` orders a table's rows and identifies each
row.

In files a uint256 is several columns, in a hot table one ``numeric``. Arrow has no decimal of 78 digits and JSON
has no bytes, so on the way to Postgres and back both are text, a nested column as JSON with hexadecimal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.evm.columns import (
    ARROW,
    BLOCKS,
    EVERY_TABLE,
    LOGS,
    NESTED,
    POSTGRES,
    RECEIPTS,
    TRACES,
    TRANSACTIONS,
    UINT256_PARTS,
    WEI,
    WITHDRAWALS,
    ChainColumn,
    ColumnKind,
    Proof,
    arrow_fields,
    hot_field,
    spark_fields,
)
from tracelake.evm.digit_columns import DIGIT_PARTS, digit_columns
from tracelake.evm.hex_columns import cut
from tracelake.evm.raw_block import ChainTable

__all__ = ["TABLES", "ChainColumn", "ColumnKind", "TableSchema", "from_hot", "to_hot", "unproven_columns"]

_OF_BLOCK = ("block_number",)
_OF_TRANSACTION = ("transaction_hash",)
_DECIMAL_DIGITS = 38
_STRING_PART = UINT256_PARTS[1]


@dataclass(frozen=True)
class TableSchema:
    dataset: ChainTable
    about: str
    columns: tuple[ChainColumn, ...]
    sort_by: tuple[str, ...]
    lookups: tuple[tuple[str, ...], ...]

    @cached_property
    def arrow(self) -> pa.Schema:
        """The schema of Parquet files."""
        return pa.schema([field for column in self.columns for field in arrow_fields(column)])

    @cached_property
    def digits(self) -> tuple[str, ...]:
        """The digit columns, which files of earlier versions lack."""
        wide = [column.name for column in self.columns if column.kind is ColumnKind.UINT256]
        return tuple(name + part for name in wide for part in DIGIT_PARTS)

    def has_columns(self, names: Iterable[str]) -> bool:
        """Whether a file with columns of these names is one of this table."""
        found, own = set(names), set(self.arrow.names)
        return found in (own, own - set(self.digits))

    @cached_property
    def spark(self) -> str:
        """The same schema as a Spark DDL string."""
        return ", ".join([field for column in self.columns for field in spark_fields(column)])

    @cached_property
    def hot_arrow(self) -> pa.Schema:
        """The schema of hot rows: a uint256 is one decimal string, a nested column JSON text."""
        return pa.schema([hot_field(column) for column in self.columns])

    @cached_property
    def postgres_types(self) -> dict[str, str]:
        return {column.name: POSTGRES[column.kind] for column in self.columns}

    def to_hot(self, table: pa.Table) -> pa.Table:
        """Convert from ``arrow`` to ``hot_arrow``."""
        return to_hot(table, self.columns)

    def from_hot(self, table: pa.Table) -> pa.Table:
        """Convert back to ``arrow``. ``numeric`` may be text or decimals, JSON and times text or their own
        types."""
        return from_hot(table, self.columns)


def _table(
    dataset: ChainTable,
    about: str,
    columns: tuple[ChainColumn, ...],
    sort_by: tuple[str, ...],
    *lookups: tuple[str, ...],
) -> TableSchema:
    return TableSchema(dataset, about, EVERY_TABLE + columns, ("block_number", *sort_by), lookups)


TABLES: Mapping[ChainTable, TableSchema] = {
    table.dataset: table
    for table in (
        _table(ChainTable.BLOCKS, "One row per block: its header.", BLOCKS, (), _OF_BLOCK, ("block_hash",)),
        _table(
            ChainTable.TRANSACTIONS,
            "One row per transaction, with what its receipt says about it.",
            TRANSACTIONS,
            ("transaction_index",),
            _OF_BLOCK,
            _OF_TRANSACTION,
            ("from_address", "block_number"),
            ("to_address", "block_number"),
        ),
        _table(
            ChainTable.LOGS,
            "One row per log.",
            LOGS,
            ("log_index",),
            _OF_BLOCK,
            _OF_TRANSACTION,
            ("address", "block_number"),
            ("topic0", "block_number"),
        ),
        _table(
            ChainTable.RECEIPTS,
            "One row per receipt, as the node has it.",
            RECEIPTS,
            ("transaction_index",),
            _OF_BLOCK,
            _OF_TRANSACTION,
            ("contract_address",),
        ),
        _table(
            ChainTable.WITHDRAWALS,
            "One row per withdrawal from the beacon chain.",
            WITHDRAWALS,
            ("withdrawal_index",),
            _OF_BLOCK,
            ("address", "block_number"),
            ("validator_index", "block_number"),
        ),
        _table(
            ChainTable.TRACES,
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


def unproven_columns(dataset: ChainTable) -> list[str]:
    """The columns that are the node's word: no hash covers them, and nothing derives them."""
    return [column.name for column in TABLES[dataset].columns if column.proof is Proof.NODE]


def to_hot(table: pa.Table, columns: Sequence[ChainColumn]) -> pa.Table:
    return pa.table(
        [_hot_column(table, column) for column in columns],
        schema=pa.schema([hot_field(column) for column in columns]),
    )


def from_hot(table: pa.Table, columns: Sequence[ChainColumn]) -> pa.Table:
    found = [part for column in columns for part in _stored_columns(table.column(column.name), column)]
    return pa.table(found, schema=pa.schema([field for column in columns for field in arrow_fields(column)]))


def _hot_column(table: pa.Table, column: ChainColumn) -> pa.ChunkedArray | pa.Array:
    if column.kind is ColumnKind.UINT256:
        return table.column(column.name + _STRING_PART)
    values = table.column(column.name)
    return _json_texts(values) if column.kind in NESTED else values


def _json_texts(lists: pa.ChunkedArray) -> pa.Array:
    """Write lists as JSON. Most are absent or empty; only the others are handled one by one."""
    lengths = pc.list_value_length(lists).combine_chunks()
    texts = pc.if_else(pc.equal(lengths, 0), "[]", pa.scalar(None, pa.string()))
    filled = pc.fill_null(pc.greater(lengths, 0), False)
    if not pc.any(filled).as_py():
        return texts
    written = [orjson.dumps(value, default=_plain).decode() for value in lists.filter(filled).to_pylist()]
    return pc.replace_with_mask(texts, filled, pa.array(written, pa.string()))


def _stored_columns(values: pa.ChunkedArray, column: ChainColumn) -> list[pa.ChunkedArray | pa.Array]:
    if column.kind is ColumnKind.UINT256:
        texts = pc.cast(values, pa.string()).combine_chunks()
        return [_big_endian(texts), texts, pc.cast(texts, pa.float64()), *digit_columns(texts)]
    kind = ARROW[column.kind]
    return [_parsed(values, kind) if column.kind in NESTED else pc.cast(values, kind)]


def _parsed(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    """Parse each distinct text once; most are ``[]``."""
    coded = texts.combine_chunks().dictionary_encode()
    parsed = [_from_json(orjson.loads(text), kind) for text in coded.dictionary.to_pylist()]
    return pa.array(parsed, kind).take(coded.indices)


def _big_endian(texts: pa.Array) -> pa.Array:
    """Decimal text as 32 bytes. Numbers that fit Arrow's decimal are converted all at once."""
    short = pc.fill_null(pc.less(pc.utf8_length(texts), _DECIMAL_DIGITS), False)
    decimals = pc.cast(pc.if_else(short, texts, "0"), WEI)
    # Arrow stores a decimal128 as 16 little-endian bytes.
    halves = np.frombuffer(decimals.buffers()[1], np.uint8)[: 16 * len(texts)].reshape(-1, 16)
    digits = np.zeros((len(texts), 32), np.uint8)
    digits[:, 16:] = halves[:, ::-1]
    mask = texts.is_valid().to_numpy(zero_copy_only=False)
    long = mask & ~short.to_numpy(zero_copy_only=False)
    whole = b"".join([int(text).to_bytes(32, "big") for text in texts.filter(pa.array(long)).to_pylist()])
    digits[long] = np.frombuffer(whole, np.uint8).reshape(-1, 32)
    return cut(digits[mask].tobytes(), 32, None if mask.all() else mask)


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, Decimal):
        return str(value)
    raise TypeError(type(value).__name__)


def _from_json(value: Any, kind: pa.DataType) -> Any:
    """A JSON value with bytes and decimals where ``kind`` has them."""
    if value is None:
        return None
    if pa.types.is_list(kind):
        return [_from_json(element, kind.value_type) for element in value]
    if pa.types.is_struct(kind):
        return {field.name: _from_json(value.get(field.name), field.type) for field in kind}
    if pa.types.is_binary(kind):
        return bytes.fromhex(value[2:])
    return Decimal(value) if pa.types.is_decimal(kind) else value
