"""Hot tables as they are made: partitions where rows are, indexes for what is looked up, readers who only read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pyarrow as pa
import pytest

from tests.support.databases import role_dsn
from tests.support.hot_scene import (
    SCOPE,
    VERSION,
    Connection,
    HotScene,
    Operators,
    output_of,
    rows,
    stage,
    writer,
)
from tests.support.operator_process import an_input
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.domain.table_layout import TableLayout
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.hot.commit import HotStore
from tracelake.hot.install import READER_ROLE, WRITER_ROLE


async def partitions(admin: Connection) -> list[str]:
    found = await admin.fetch(
        "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = to_regclass("
        "'data.' || tracelake.table_of($1)) ORDER BY 1",
        VERSION,
    )
    return [row["name"].rpartition("_")[2] for row in found]


async def test_partitions_are_made_where_rows_are_and_nowhere_else(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who, span = writer(1), BlockRange(0, 10**15)
    layout = TableLayout(partition_blocks=100)
    await hot.begin(who, VERSION, span)
    far = await stage(operator, who, 5, 10**12 + 7, 99, 250)
    near = await stage(operator, who, 1)
    assert await hot.commit(who, [output_of(far, near, layout=layout)], span, []) == [5]
    assert await partitions(admin) == ["p0", f"p{10**12}", "p200"]
    again = await stage(operator, who, 199)
    assert await hot.commit(who, [output_of(again, layout=layout)], BlockRange(99, 10**13), []) == [1]
    assert await rows(admin) == [(1, "x"), (5, "x"), (199, "x")]
    assert await hot.commit(who, [output_of()], span, []) == [0]
    assert await rows(admin) == []


async def test_rows_that_would_make_a_crowd_of_partitions_are_refused(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who, span = writer(1), BlockRange(0, 10_000)
    await hot.begin(who, VERSION, span)
    staged = await stage(operator, who, *range(0, 10_000, 20))
    with pytest.raises(Invalid, match="500 partitions of 10 blocks: use larger ones"):
        await hot.commit(who, [output_of(staged, layout=TableLayout(partition_blocks=10))], span, [])
    assert await rows(admin) == []


async def test_a_table_from_before_partitions_keeps_working(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who = writer(1)
    await hot.begin(who, VERSION, SCOPE)
    await hot.commit(who, [output_of(await stage(operator, who, 1, 2))], SCOPE, [])
    layout = TableLayout(indexes=(("value",),), partition_blocks=10)
    later = output_of(await stage(operator, who, 2, 3), layout=layout)
    assert await hot.commit(who, [later], BlockRange(2, 9), []) == [2]
    assert await rows(admin) == [(1, "x"), (2, "x"), (3, "x")]
    assert await partitions(admin) == []


async def test_a_new_partition_waits_for_no_reader(
    hot: HotStore, operator: Operators, admin: Connection
) -> None:
    who, layout = writer(1), TableLayout(indexes=(("value",),), partition_blocks=5)
    await hot.begin(who, VERSION, SCOPE)
    await hot.commit(who, [output_of(await stage(operator, who, 1), layout=layout)], SCOPE, [])
    async with admin.transaction(isolation="repeatable_read"):
        assert await rows(admin) == [(1, "x")]
        second = output_of(await stage(operator, who, 7), layout=layout)
        async with asyncio.timeout(10):
            assert await hot.commit(who, [second], BlockRange(5, 9), []) == [1]
        assert await rows(admin) == [(1, "x")]
    assert await rows(admin) == [(1, "x"), (7, "x")]


@pytest.mark.parametrize("key", [("block_number",), ("value",)])
async def test_an_append_is_partitioned_if_its_key_allows_it(
    hot: HotStore, operator: Operators, admin: Connection, key: tuple[str, ...]
) -> None:
    who, layout = writer(1), TableLayout(partition_blocks=5)
    await hot.begin(who, VERSION, SCOPE)
    for _ in range(2):
        staged = await stage(operator, who, 1, 7)
        output = output_of(staged, layout=layout, appends=True, unique_key=key)
        await hot.commit(who, [output], SCOPE, [])
    by_block = key == ("block_number",)
    assert await partitions(admin) == (["p0", "p5"] if by_block else [])
    assert await rows(admin) == ([(1, "x"), (7, "x")] if by_block else [(1, "x")])


async def test_readers_read_what_is_committed_and_nothing_else(
    hot: HotStore, operator: Operators, data_dsn: str
) -> None:
    who = writer(1)
    await hot.begin(who, VERSION, SCOPE)
    layout = TableLayout(partition_blocks=5)
    await hot.commit(who, [output_of(await stage(operator, who, 1, 7), layout=layout)], SCOPE, [])
    left, _ = await stage(operator, who, 1)
    reader = await asyncpg.connect(role_dsn(data_dsn, READER_ROLE))
    table = f"d_{VERSION.hex}"
    try:
        assert len(await reader.fetch(f"TABLE {table}")) == 2
        assert await reader.fetchval("SHOW default_transaction_read_only") == "on"
        await reader.execute("SET default_transaction_read_only = off")
        for attempt in (
            f"TRUNCATE data.{table}",
            f"TABLE staging.{left}",
            "SELECT * FROM tracelake.fence",
            "SELECT tracelake.table_of(gen_random_uuid())",
            "CREATE TABLE data.mine (x int)",
            "CREATE TEMP TABLE mine (x int)",
            f"SET ROLE {WRITER_ROLE}",
        ):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await reader.execute(attempt)
    finally:
        await reader.close()


EXPLAIN = "EXPLAIN (FORMAT JSON) SELECT * FROM {} WHERE {}"
LOOKUPS = [
    (ChainTable.BLOCKS, "block_number = 15000"),
    (ChainTable.BLOCKS, "block_hash = '\\x0f'"),
    (ChainTable.TRANSACTIONS, "block_number BETWEEN 15000 AND 15009"),
    (ChainTable.TRANSACTIONS, "transaction_hash = '\\x0f'"),
    (ChainTable.TRANSACTIONS, "from_address = '\\x0f' ORDER BY block_number DESC LIMIT 10"),
    (ChainTable.TRANSACTIONS, "to_address = '\\x0f'"),
    (ChainTable.LOGS, "address = '\\x0f' AND block_number > 15000"),
    (ChainTable.LOGS, "topic0 = '\\x0f'"),
    (ChainTable.LOGS, "transaction_hash = '\\x0f'"),
]


@pytest.fixture(scope="module")
def chain() -> dict[ChainTable, pa.Table]:
    """Rows enough that reading them all would be worse than looking, in two partitions."""
    return {dataset: _many_rows(TABLES[dataset].hot_arrow) for dataset, _ in LOOKUPS}


def test_what_people_look_up_in_chain_tables_is_found_by_an_index_in_every_partition(
    hot_scene: HotScene, chain: dict[ChainTable, pa.Table]
) -> None:
    tables = {}
    for dataset, hot_rows in chain.items():
        schema = TABLES[dataset]
        ctx = hot_scene.begin(an_input(start=0, end=19_999))
        layout = TableLayout(indexes=schema.lookups, partition_blocks=10_000)
        ctx.outputs[0].stage(hot_rows, types=schema.postgres_types, layout=layout)
        ctx.finish()
        tables[dataset] = f"data.d_{ctx.task.outputs[0].dataset_version.hex}"
    plans = asyncio.run(_explain(hot_scene.dsn, [(tables[dataset], query) for dataset, query in LOOKUPS]))
    for (dataset, query), plan in zip(LOOKUPS, plans, strict=True):
        nodes = list(_nodes(plan))
        assert not [node for node in nodes if node == "Seq Scan"], (dataset, query)
        assert [node for node in nodes if "Index" in node], (dataset, query)


async def _explain(dsn: str, queries: list[tuple[str, str]]) -> list[dict[str, Any]]:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute("ANALYZE")
        found = [await connection.fetchval(EXPLAIN.format(table, query)) for table, query in queries]
        return [json.loads(each)[0]["Plan"] for each in found]
    finally:
        await connection.close()


def _nodes(plan: dict[str, Any]) -> list[str]:
    inner = [node for child in plan.get("Plans", ()) for node in _nodes(child)]
    return [plan["Node Type"], *inner]


def _many_rows(schema: pa.Schema) -> pa.Table:
    count = 20_000
    columns = {}
    for field in schema:
        if pa.types.is_binary(field.type):
            columns[field.name] = pa.array([number.to_bytes(3, "big") for number in range(count)], field.type)
        elif field.name == "block_number":
            columns[field.name] = pa.array(range(count), field.type)
        else:
            columns[field.name] = pa.nulls(count, field.type)
    return pa.table(columns, schema=schema)
