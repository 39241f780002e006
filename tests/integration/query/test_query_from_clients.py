"""The clients for people and for functions against the Query Service itself, and what a dataset's page says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import msgspec
import pyarrow as pa
import pytest
import pytest_asyncio

from tests.support.conversation import dag, reactive, source
from tests.support.databases import build_state_template
from tests.support.postgres import SharedPostgres
from tests.support.query_port import QueryPort, open_query_port, open_steps, transfers
from tracelake.client import Client
from tracelake.contracts.query_api import INVALID_QUERY, QUERY_REFUSED
from tracelake.contracts.user_api import DatasetDetail
from tracelake.domain.errors import Invalid, Unauthenticated
from tracelake.functions.tracelake_function import Task, TaskError

pytestmark = pytest.mark.asyncio(loop_scope="module")

DAG = dag(
    source(),
    reactive("work", "src", storage="parquet"),
    reactive("reader", "work"),
    publish={
        "transfers": {"from": {"job": "work"}},
        "alerts": {
            "storage": "postgres",
            "write_mode": "buffered",
            "schema": {"columns": {"key": "text", "value": "numeric"}, "unique": ["key"]},
        },
    },
)
HASH = (3).to_bytes(4, "big")


@pytest.fixture(scope="module")
def dsn(postgres_cluster: SharedPostgres) -> Iterator[str]:
    dsn = postgres_cluster.clone("state", build_state_template)
    yield dsn
    postgres_cluster.drop(dsn)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(dsn: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QueryPort]:
    folder = tmp_path_factory.mktemp("query")
    async with open_steps(dsn, folder) as ctx, open_query_port(ctx, dsn) as port:
        await port.talk.deploy(DAG)
        for start in (0, 10):
            await port.talk.trigger(start, start + 9)
            lease = await port.talk.lease("work")
            await port.commit(lease, transfers(range(start, start + 10)), start, start + 9)
        await port.talk.trigger(20, 29)
        yield port


@pytest.fixture(scope="module")
def client(port: QueryPort) -> Iterator[Client]:
    with Client(port.url, port.surfaces.user_token) as client:
        yield client


async def test_a_table_comes_back_with_its_types(client: Client) -> None:
    sql = "SELECT block_number, hash FROM transfers WHERE hash = ? OR block_number = ? ORDER BY 1"
    result = await asyncio.to_thread(client.query, sql, [HASH, 12])
    assert isinstance(result, pa.Table)
    assert result.to_pylist() == [
        {"block_number": 3, "hash": HASH},
        {"block_number": 12, "hash": (12).to_bytes(4, "big")},
    ]
    assert result.to_polars().shape == result.to_pandas().shape == (2, 2)


async def test_rows_come_back_as_people_read_them(client: Client) -> None:
    sql = "SELECT hash, value FROM transfers WHERE block_number = $block"
    answer = await asyncio.to_thread(client.query_rows, sql, {"block": 3})
    assert (answer.columns, answer.types) == (["hash", "value"], ["BLOB", "BIGINT"])
    assert (answer.rows, answer.row_count, answer.truncated) == ([["0x00000003", 3]], 1, False)
    assert [dataset.name for dataset in answer.datasets] == ["transfers"]


async def test_a_limit_cuts_and_says_so(client: Client) -> None:
    result = await asyncio.to_thread(lambda: client.query("FROM transfers", limit=5))
    assert (result.num_rows, result.truncated) == (5, True)


@pytest.mark.parametrize(
    ("sql", "reason", "said"),
    [
        ("SELECT block_number FRO transfers", INVALID_QUERY, r"at character 24"),
        ("SELECT nothing FROM transfers", INVALID_QUERY, "nothing"),
        ("SELECT * FROM elsewhere", INVALID_QUERY, "elsewhere"),
        ("SELECT * FROM read_csv('/etc/passwd')", QUERY_REFUSED, "read_csv"),
        ("DROP TABLE transfers", QUERY_REFUSED, "SELECT"),
    ],
)
async def test_what_is_wrong_with_a_query_is_said(client: Client, sql: str, reason: str, said: str) -> None:
    with pytest.raises(Invalid, match=said) as refused:
        await asyncio.to_thread(client.query, sql)
    assert refused.value.reason == reason


async def test_a_parameter_that_is_no_value_is_refused(port: QueryPort) -> None:
    answer = await port.ask("SELECT ?", params=[{"blob": "no"}])
    assert (answer.status_code, answer.json()["reason"]) == (422, "InvalidParams")


async def test_another_token_opens_nothing(port: QueryPort) -> None:
    with Client(port.url, "somebody-else") as stranger, pytest.raises(Unauthenticated):
        await asyncio.to_thread(stranger.query, "FROM transfers")


async def test_a_function_reads_its_window_and_nothing_else(port: QueryPort) -> None:
    [first, _] = await port.talk.queued("reader")
    claim = await port.talk.claim(first)
    event = msgspec.to_builtins(claim.task)
    event |= {"lease_token": str(claim.lease_token), "capability_token": claim.capability_token}
    task = Task(event, port.url)
    found = await asyncio.to_thread(
        task.query, f"FROM {task.table()} SELECT min(block_number), count(*) WHERE {task.window()}"
    )
    assert found["rows"] == [[task.start, 10]]
    by_hash = await asyncio.to_thread(task.query, "SELECT value FROM input_0 WHERE hash = ?", [HASH])
    assert by_hash["rows"] == [[3]]
    with pytest.raises(TaskError, match="alerts") as refused:
        await asyncio.to_thread(task.query, "SELECT * FROM alerts")
    assert refused.value.status == 422


async def test_a_dataset_tells_its_versions_its_blocks_and_its_lag(port: QueryPort) -> None:
    answer = await port.surfaces.user.get("/v1/datasets/transfers", headers=port.person)
    detail = msgspec.json.decode(answer.content, type=DatasetDetail)
    [version] = detail.versions
    assert version.current
    assert (version.start, version.end, version.rows, version.partitions) == (0, 19, 20, 2)
    assert detail.lag is not None
    assert detail.lag.behind == 10
    assert detail.lag.seconds is not None
    assert detail.schema is None


async def test_a_buffered_dataset_tells_its_columns(port: QueryPort) -> None:
    answer = await port.surfaces.user.get("/v1/datasets/alerts", headers=port.person)
    detail = msgspec.json.decode(answer.content, type=DatasetDetail)
    assert detail.schema is not None
    declared = [(each.name, each.type) for each in detail.schema.columns if each.by == "producer"]
    assert declared == [("key", "text"), ("value", "numeric")]
    assert "position" in {each.name for each in detail.schema.columns if each.by == "platform"}
    assert detail.schema.unique == ["key"]
    assert detail.schema_hash is not None
