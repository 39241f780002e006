"""The tables of a chain have one definition, and every shape of them follows from it."""

import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from scripts.reference.schemas_page import schemas_page
from tests.support.evm_blocks import CHAIN_ID, made_block
from tracelake.evm.columns import UINT256_PARTS
from tracelake.evm.decode import decode
from tracelake.evm.raw_block import ChainTable, RawBlock
from tracelake.evm.schemas import TABLES, ColumnKind
from tracelake.tables.stored_types import stored_schema

ROOT = Path(__file__).parents[3]


def test_the_docs_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "schemas.md").read_text(encoding="utf-8")
    assert page == schemas_page(), "run: python -m scripts.reference"


@pytest.mark.parametrize("dataset", list(ChainTable))
def test_every_table_has_the_columns_that_trace_a_row_to_its_block(dataset: ChainTable) -> None:
    table = TABLES[dataset]
    assert table.arrow.names[:4] == ["chain_id", "block_number", "block_hash", "timestamp"]
    assert table.sort_by[0] == "block_number"
    assert ("block_number",) in table.lookups


@pytest.mark.parametrize("dataset", list(ChainTable))
def test_a_table_is_stored_in_the_types_that_it_is_decoded_to(dataset: ChainTable) -> None:
    table = TABLES[dataset]
    assert stored_schema(table.arrow).equals(table.arrow, check_metadata=True)
    assert not table.arrow.metadata


@pytest.mark.parametrize("dataset", list(ChainTable))
def test_keys_lookups_and_postgres_types_name_columns_that_exist(dataset: ChainTable) -> None:
    table = TABLES[dataset]
    hot = set(table.hot_arrow.names)
    assert set(table.postgres_types) == hot
    assert {name for lookup in table.lookups for name in lookup} <= hot
    assert set(table.sort_by) <= hot & set(table.arrow.names)


@pytest.mark.parametrize("dataset", list(ChainTable))
def test_the_spark_schema_has_the_same_columns_in_the_same_order(dataset: ChainTable) -> None:
    table = TABLES[dataset]
    assert len(table.arrow) == len(
        [column for column in table.columns if column.kind is not ColumnKind.UINT256]
    ) + len(UINT256_PARTS) * len([column for column in table.columns if column.kind is ColumnKind.UINT256])
    for name in table.arrow.names:
        assert f"{name} " in table.spark


def some_rows(dataset: ChainTable) -> pa.Table:
    raws = [made_block(random.Random(number), number, transactions=9, logs=2) for number in range(3)]
    trace = {"type": "call", "action": {"value": hex(2**256 - 1)}, "subtraces": 0, "traceAddress": [0]}
    traced = [RawBlock(raw.number, raw.block, raw.receipts, [trace], "made") for raw in raws]
    return pa.Table.from_batches([decode(traced, dataset, CHAIN_ID)])


@pytest.mark.parametrize("dataset", list(ChainTable))
def test_rows_go_to_the_hot_shape_and_back_unchanged(dataset: ChainTable) -> None:
    table, rows = TABLES[dataset], some_rows(dataset)
    hot = table.to_hot(rows)
    assert hot.schema.equals(table.hot_arrow)
    assert table.from_hot(hot).equals(rows)
    assert table.from_hot(table.to_hot(rows.slice(0, 0))).equals(rows.slice(0, 0))


def test_a_uint256_is_one_number_in_the_hot_shape() -> None:
    rows = some_rows(ChainTable.TRANSACTIONS)
    hot = TABLES[ChainTable.TRANSACTIONS].to_hot(rows)
    assert hot["value"].to_pylist() == rows["value_string"].to_pylist()
    assert str(2**256 - 1) in hot["value"].to_pylist()


def test_nested_columns_are_json_with_hexadecimal_in_the_hot_shape() -> None:
    rows = some_rows(ChainTable.TRANSACTIONS)
    texts = TABLES[ChainTable.TRANSACTIONS].to_hot(rows)["authorization_list"].to_pylist()
    given = [row for row in rows["authorization_list"].to_pylist() if row]
    assert given
    assert f'"address":"0x{given[0][0]["address"].hex()}"' in next(text for text in texts if text)


def test_numbers_may_come_back_from_postgres_as_decimals() -> None:
    table, rows = TABLES[ChainTable.BLOCKS], some_rows(ChainTable.BLOCKS)
    hot = table.to_hot(rows)
    place = hot.schema.get_field_index("difficulty")
    decimals = pa.array([Decimal(0)] * 3, pa.decimal128(38, 0))
    as_decimals = hot.set_column(place, pa.field("difficulty", decimals.type), decimals)
    place = hot.schema.get_field_index("base_fee_per_gas")
    as_text = as_decimals.set_column(place, "base_fee_per_gas", hot["base_fee_per_gas"].cast(pa.string()))
    assert table.from_hot(as_text).equals(rows)
