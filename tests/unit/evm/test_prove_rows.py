"""Stored rows proven from themselves: every column that is flipped is found out, unless it is the node's word."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.support.evm_blocks import CHAIN_ID, made_block, seal
from tests.support.hot_scene import rows_of
from tests.support.profile_blocks import recorded
from tracelake.evm.columns import UINT256_PARTS
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.prove_rows import RowProof, prove_rows
from tracelake.evm.raw_block import ChainTable, RawBlock
from tracelake.evm.schemas import TABLES, unproven_columns

LAST = 24
PROVEN = [table for table in ChainTable if table is not ChainTable.TRACES]


@cache
def stored() -> dict[ChainTable, pa.Table]:
    chain = DevChain(seed=5, blocks=LAST, forks=("osaka", "amsterdam@20"))
    return {dataset: rows_of(chain, dataset, 0, LAST) for dataset in PROVEN}


def without(*missing: ChainTable) -> dict[ChainTable, pa.Table]:
    return {dataset: rows for dataset, rows in stored().items() if dataset not in missing}


def test_all_tables_together_prove_every_block_in_every_way() -> None:
    proven = prove_rows(stored())
    assert proven.wrong == []
    assert proven.blocks == dict.fromkeys(RowProof, LAST + 1)


@pytest.mark.parametrize(
    ("missing", "lost"),
    [
        ([ChainTable.WITHDRAWALS, ChainTable.RECEIPTS], {RowProof.WITHDRAWALS}),
        ([ChainTable.LOGS], {RowProof.RECEIPTS, RowProof.BLOOM}),
        (
            [ChainTable.TRANSACTIONS, ChainTable.RECEIPTS],
            {RowProof.TRANSACTIONS, RowProof.RECEIPTS},
        ),
        (PROVEN[1:], {RowProof.TRANSACTIONS, RowProof.RECEIPTS, RowProof.BLOOM, RowProof.WITHDRAWALS}),
    ],
)
def test_what_the_tables_do_not_have_is_not_claimed(
    missing: Sequence[ChainTable], lost: set[RowProof]
) -> None:
    proven = prove_rows(without(*missing))
    assert proven.wrong == []
    assert set(RowProof) - set(proven.blocks) == lost
    assert set(proven.blocks.values()) == {LAST + 1}


def flipped(dataset: ChainTable, name: str) -> dict[ChainTable, pa.Table] | None:
    """The rows of one block, with another value in one of them; None if no row has a value."""
    values = stored()[dataset].column(name).to_pylist()
    places = [index for index, value in enumerate(values) if value not in (None, [], b"")]
    if not places:
        return None
    place = places[-1]
    block = stored()[dataset].column("block_number")[place].as_py()
    of_block = {each: rows.filter(pc.field("block_number") == block) for each, rows in stored().items()}
    rows = of_block[dataset]
    own = rows.column(name).to_pylist()
    first = own.index(values[place])
    own[first] = _other(own[first])
    column = pa.array(own, rows.schema.field(name).type)
    of_block[dataset] = rows.set_column(rows.schema.get_field_index(name), name, column)
    return of_block


def _other(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case bytes():
            return bytes([value[0] ^ 1]) + value[1:]
        case str():
            return str(int(value) + 1)
        case float():
            return value * 2 + 1
        case list():
            return [*value, value[0]]
        case _ if hasattr(value, "tzinfo"):
            return value + timedelta(seconds=1)
        case _:
            return value + 1


UNCLES = (ChainTable.BLOCKS, "uncles")
"""The block's hash covers the uncles' headers, which aren't stored."""


@pytest.mark.parametrize("dataset", PROVEN)
def test_every_column_that_is_flipped_is_found_out_unless_it_is_the_nodes_word(dataset: ChainTable) -> None:
    undetected = set()
    for name in TABLES[dataset].arrow.names:
        changed = flipped(dataset, name)
        if changed is not None and not prove_rows(changed).wrong:
            part = next((part for part in UINT256_PARTS if name.endswith(part)), "")
            undetected.add(name.removesuffix(part))
    assert undetected <= {*unproven_columns(dataset), *([UNCLES[1]] if dataset is UNCLES[0] else [])}


def test_a_row_that_is_lost_doubled_or_of_another_block_is_found_out() -> None:
    logs = stored()[ChainTable.LOGS]
    for changed in (logs.slice(1), pa.concat_tables([logs.slice(0, 1), logs]), logs.slice(0, len(logs) - 1)):
        assert prove_rows({**stored(), ChainTable.LOGS: changed}).wrong


def altered(rows: pa.Table, place: int, **values: Any) -> pa.Table:
    for name, value in values.items():
        own = rows.column(name).to_pylist()
        own[place] = value
        column = pa.array(own, rows.schema.field(name).type)
        rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows


@pytest.mark.parametrize("missing", [[], [ChainTable.RECEIPTS]])
@pytest.mark.parametrize("all_of_them", [False, True])
def test_a_lost_outcome_does_not_excuse_a_block_from_the_proof_of_its_receipts(
    missing: Sequence[ChainTable], all_of_them: bool
) -> None:
    tables = without(*missing)
    source = ChainTable.TRANSACTIONS if missing else ChainTable.RECEIPTS
    rows = tables[source]
    for place in range(len(rows)) if all_of_them else [0]:
        rows = altered(rows, place, success=None)
    assert "neither a status nor a root" in str(prove_rows({**tables, source: rows}).wrong[0])


@pytest.mark.parametrize(
    ("dataset", "values"),
    [
        (ChainTable.BLOCKS, {"difficulty_string": "x"}),
        (ChainTable.BLOCKS, {"timestamp": None}),
        (ChainTable.BLOCKS, {"wide_values": "x"}),
        (ChainTable.TRANSACTIONS, {"value_string": None}),
        (ChainTable.TRANSACTIONS, {"value_string": ""}),
        (ChainTable.LOGS, {"address": None}),
        (ChainTable.LOGS, {"block_number": None}),
        (ChainTable.RECEIPTS, {"transaction_index": None}),
    ],
)
def test_a_value_that_can_not_be_read_is_a_finding(dataset: ChainTable, values: dict[str, Any]) -> None:
    assert prove_rows({**stored(), dataset: altered(stored()[dataset], 0, **values)}).wrong


def decoded(raw: RawBlock, chain_id: int) -> dict[ChainTable, pa.Table]:
    return {dataset: pa.Table.from_batches([decode([raw], dataset, chain_id)]) for dataset in PROVEN}


def test_a_number_beyond_its_column_is_proven_by_the_column_that_has_it() -> None:
    raw = made_block(random.Random(1), 8, transactions=3)
    raw.block["gasLimit"] = hex(2**64 - 1)
    seal(raw)
    tables = decoded(raw, CHAIN_ID)
    assert tables[ChainTable.BLOCKS].column("gas_limit").null_count == 1
    assert prove_rows(tables).wrong == []


@pytest.mark.parametrize("name", ["base_274", "gnosis_10000000", "tempo_17708868", "cronos_10000"])
def test_blocks_whose_hashes_cover_more_than_the_tables_are_counted_and_not_called_wrong(name: str) -> None:
    proven = prove_rows(decoded(*recorded(name)))
    assert (proven.wrong, proven.blocks, proven.beyond_rows) == ([], {}, 1)


def test_ethereums_header_is_proven_on_a_chain_that_had_others() -> None:
    tables = decoded(*recorded("gnosis_30000000"))
    assert prove_rows(tables).blocks[RowProof.HEADER] == 1
    blocks = altered(tables[ChainTable.BLOCKS], 0, gas_used=1)
    assert prove_rows({**tables, ChainTable.BLOCKS: blocks}).wrong


def test_a_chain_whose_profile_only_its_pool_knows_is_not_called_wrong() -> None:
    raw, _ = recorded("base_274")
    tables = decoded(raw, 81457)
    assert prove_rows(tables).wrong
    assert prove_rows(tables, raw.profile).beyond_rows == 1
