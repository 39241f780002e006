"""A uint256 in SQL is one number: hot or cold, decoded or not, in conditions, sums, orders and parameters."""

from __future__ import annotations

import operator
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psycopg
import pyarrow as pa
import pytest
import pytest_asyncio
from psycopg import sql

from tests.support.conversation import dag, reactive, source
from tests.support.databases import PASSWORD, build_state_template
from tests.support.postgres import SharedPostgres
from tests.support.query_port import QueryPort, open_query_port, open_steps
from tests.support.wide_integers import stored_integer
from tracelake.contracts.query_api import ARROW_STREAM
from tracelake.evm.columns import UINT256_ARROW, UINT256_PARTS
from tracelake.hot.install import READER_ROLE, install

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOST = 2**256 - 1
DAG = dag(
    source(),
    reactive("files", "src", storage="parquet"),
    reactive("table", "src", storage="postgres"),
    publish={"cold": {"from": {"job": "files"}}, "hot": {"from": {"job": "table"}}},
)
#: Above and below 9000 as text and as a number, at the ends, and around the engine's own integers.
AMOUNTS = (
    *(0, 1, 9, 10, 8999, 9000, 9001, 10_000, 99_999, 2**63 - 1, 2**63, 2**64 + 5, 2**127, 2**128 - 1),
    *(2**128, 2**200 + 5, 2**255, MOST - 1, MOST, -1, -9000, -(2**255)),
)
HASHES = [number.to_bytes(32, "big") for number in range(len(AMOUNTS))]


def amount_columns(amounts: list[int | None]) -> dict[str, pa.Array]:
    """The columns of an integer in a decoded table's files."""
    rows = [stored_integer("value", each) for each in amounts]
    kinds = {f"value{part}": kind for part, kind in zip(UINT256_PARTS, UINT256_ARROW, strict=True)}
    return {name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def dsns(postgres_cluster: SharedPostgres) -> Iterator[tuple[str, str]]:
    state = postgres_cluster.clone("state", build_state_template)
    data = postgres_cluster.clone("data", lambda dsn: None)
    yield state, data
    for dsn in (state, data):
        postgres_cluster.drop(dsn)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(dsns: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[QueryPort]:
    state, data = dsns
    await install(data, writer_password=PASSWORD, reader_password=PASSWORD)
    folder = tmp_path_factory.mktemp("query")
    async with open_steps(state, folder) as ctx, open_query_port(ctx, state, data) as port:
        await port.talk.deploy(DAG)
        await port.talk.trigger(0, 9)
        amounts = [*AMOUNTS, None]
        rows = pa.table(
            {
                "block_number": pa.array([each % 10 for each in range(len(amounts))], pa.int64()),
                "hash": pa.array([*HASHES, None], pa.binary()),
                "label": pa.array([f"0x{each:064x}" for each in range(len(amounts))], pa.string()),
                **amount_columns(amounts),
            }
        )
        await port.commit(await port.talk.lease("files"), rows, 0, 9)
        _fill(data, (await port.talk.output("table"))["dataset_version"].hex, rows)
        yield port


CREATE = "CREATE TABLE {} (block_number bigint, hash bytea, label text, value numeric(78,0))"


def _fill(dsn: str, version: str, rows: pa.Table) -> None:
    table = sql.Identifier("data", f"d_{version}")
    names = ("block_number", "hash", "label", "value_string")
    with psycopg.connect(dsn, autocommit=True) as admin, admin.cursor() as cursor:
        cursor.execute(sql.SQL(CREATE).format(table))
        cursor.executemany(
            sql.SQL("INSERT INTO {} VALUES (%s, %s, %s, %s::numeric)").format(table),
            [tuple(row[name] for name in names) for row in rows.to_pylist()],
        )
        cursor.execute(sql.SQL("GRANT SELECT ON {} TO {}").format(table, sql.Identifier(READER_ROLE)))


VALUES = "SELECT value FROM given WHERE {} ORDER BY value"
COUNT = "SELECT count(*) FROM given WHERE {}"


@dataclass(frozen=True)
class Given:
    """One of the two relations, under the name ``given`` in every query."""

    port: QueryPort
    relation: str

    async def ask(self, query: str, **more: Any) -> httpx.Response:
        return await self.port.ask(query.replace("FROM given", f"FROM {self.relation}"), **more)

    async def rows(self, query: str, **more: Any) -> list[list[Any]]:
        answer = await self.ask(query, **more)
        assert answer.status_code == 200, (query, answer.text)
        rows: list[list[Any]] = answer.json()["rows"]
        return rows

    async def first(self, query: str, **more: Any) -> list[Any]:
        """The first column."""
        return [row[0] for row in await self.rows(query, **more)]


@pytest.fixture(params=["cold", "hot"])
def given(request: pytest.FixtureRequest, port: QueryPort) -> Given:
    return Given(port, request.param)


async def test_it_compares_sorts_and_sums_as_a_number(given: Given) -> None:
    above = sorted(each for each in AMOUNTS if each > 9000)
    for condition in ("value > 9000", "value > '9000'", "value > 9000::HUGEINT", "NOT value <= 9000"):
        assert await given.first(VALUES.format(condition)) == above, condition
    falling = "SELECT value FROM given ORDER BY value DESC NULLS LAST"
    assert await given.first(falling) == [*sorted(AMOUNTS, reverse=True), None]
    [found] = await given.rows("SELECT sum(value), min(value), max(value), count(value) FROM given")
    assert found == [sum(AMOUNTS), min(AMOUNTS), max(AMOUNTS), len(AMOUNTS)]
    joined = "SELECT count(*) FROM given JOIN (SELECT value FROM given) USING (value)"
    assert await given.first(joined) == [len(AMOUNTS)]


async def test_every_bound_leaves_the_rows_that_a_number_leaves(given: Given) -> None:
    """As a literal, as a parameter and as text; Postgres evaluates some of them, the engine all."""
    for bound, op, holds in (
        (MOST, "=", operator.eq),
        (MOST, "<", operator.lt),
        (2**200 + 5, ">=", operator.ge),
        (9000, "<>", operator.ne),
        (2**63, "<=", operator.le),
        (-(2**255), ">", operator.gt),
    ):
        expected = sorted(each for each in AMOUNTS if holds(each, bound))
        bounded = VALUES.format(f"value {op} ?")
        assert await given.first(bounded, params=[bound]) == expected, (op, bound)
        assert await given.first(bounded, params=[str(bound)]) == expected, (op, bound)
        assert await given.first(VALUES.format(f"value {op} {bound}")) == expected, (op, bound)
    listed = VALUES.format("value IN (?, 5, ?)")
    assert await given.first(listed, params=[MOST, 2**200 + 5]) == [2**200 + 5, MOST]


async def test_powers_and_exponents_compare_as_doubles(given: Given) -> None:
    above = sorted(each for each in AMOUNTS if each > 10**20)
    for bound in ("1e20", "10^20", "10**20"):
        assert await given.first(VALUES.format(f"value > {bound}")) == above, bound
    near = sorted(each for each in AMOUNTS if float(each) == float(MOST))
    assert await given.first(VALUES.format("value = 2^256 - 1")) == near


async def test_a_decimal_beside_it_needs_a_cast(given: Given) -> None:
    refused = await given.ask("SELECT value > 5::DECIMAL(38,0) FROM given")
    assert (refused.status_code, refused.json()["reason"]) == (422, "InvalidQuery")
    assert await given.first("SELECT typeof(value + 5::DECIMAL(38,0)) FROM given LIMIT 1") == ["DOUBLE"]
    exact = "SELECT max(value + 5::DECIMAL(38,0)::BIGNUM) FROM given WHERE value > 5::DECIMAL(38,0)::BIGNUM"
    assert await given.first(exact) == [MOST + 5]


async def test_a_number_of_64_bits_beside_a_wider_one_stays_itself(given: Given) -> None:
    """The engine would compare with the lowest 64 bits of the wider one."""
    for bound in (2**200 + 5, -(2**200)):
        below = len(AMOUNTS) + 1 if bound > 0 else 0
        assert await given.first(COUNT.format("block_number < ?"), params=[bound]) == [below]
        assert await given.first(COUNT.format(f"block_number < {bound}")) == [below]
        assert await given.first(COUNT.format(f"block_number = {bound}")) == [0]
    expected = sum(place % 10 < each < 2**100 for place, each in enumerate(AMOUNTS))
    assert await given.first(COUNT.format(f"block_number < value AND value < {2**100}")) == [expected]


async def test_a_cast_of_it_is_exact_or_an_error(given: Given) -> None:
    fitting = "SELECT sum(value::{})::VARCHAR FROM given WHERE value BETWEEN 0 AND 9223372036854775807"
    too_wide = "SELECT value::{} FROM given WHERE value > 1000000000000000000000000000000000000000"
    expected = sum(each for each in AMOUNTS if 0 <= each < 2**63)
    for kind in ("BIGINT", "HUGEINT", "DECIMAL(38,0)"):
        assert await given.first(fitting.format(kind)) == [str(expected)], kind
        refused = await given.ask(too_wide.format(kind))
        assert (refused.status_code, refused.json()["reason"]) == (422, "InvalidQuery"), kind
        tried = COUNT.format(f"value >= {2**200} AND TRY_CAST(value AS {kind}) IS NULL")
        assert await given.first(tried) == [sum(each >= 2**200 for each in AMOUNTS)]
    assert (await given.ask("SELECT value::UBIGINT FROM given WHERE value = -1")).status_code == 422
    assert await given.first("SELECT max(value)::DOUBLE FROM given") == [float(MOST)]


async def test_it_comes_back_exact_in_arrow(given: Given) -> None:
    answer = await given.ask("SELECT value, sum(value) OVER () AS total FROM given", accept=ARROW_STREAM)
    with pa.ipc.open_stream(answer.content) as reader:
        rows = reader.read_all().to_pydict()
    assert [int(each) for each in rows["value"] if each is not None] == list(AMOUNTS)
    assert {int(each) for each in rows["total"]} == {sum(AMOUNTS)}


async def test_bytes_are_found_by_their_usual_text(given: Given) -> None:
    wanted, other = f"0x{HASHES[7].hex()}", f"0X{HASHES[3].hex().upper()}"
    conditions: tuple[tuple[str, Any], ...] = (
        (f"hash = '{wanted}'", []),
        (f"'{wanted}' = hash", []),
        ("hash = ?", [wanted]),
        ("hash = $h", {"h": wanted}),
        (f"hash BETWEEN '{wanted}' AND '{wanted}'", []),
        (f"hash IN ('{wanted}', '0x')", []),
        ("hash = ? AND label = ?", [wanted, wanted]),
        (f"label = '{wanted}'", []),
        (f"hash IS NOT DISTINCT FROM '{wanted}'", []),
    )
    for condition, params in conditions:
        assert await given.first(VALUES.format(condition), params=params) == [AMOUNTS[7]], condition
    both = await given.first(VALUES.format("hash IN (?, ?)"), params=[wanted, other])
    assert both == [AMOUNTS[3], AMOUNTS[7]]
    assert await given.first(COUNT.format(f"hash <> '{wanted}'")) == [len(AMOUNTS) - 1]


async def test_bytes_are_found_wherever_they_come_from(given: Given) -> None:
    wanted = f"0x{HASHES[-1].hex()}"
    nested = "WITH h AS (SELECT max(hash) AS x FROM given) SELECT x = ? FROM h"
    assert await given.first(nested, params=[wanted]) == [True]
    renamed = "SELECT hash FROM (SELECT label AS hash FROM given) WHERE hash = ?"
    assert await given.first(renamed, params=[wanted]) == [wanted], "text stays text"
    half = await given.ask(VALUES.format("hash = '0xabc'"))
    assert (half.status_code, half.json()["reason"]) == (422, "InvalidQuery")
    assert "odd number of digits" in half.json()["detail"]


async def test_files_keep_their_columns_beside_it(port: QueryPort) -> None:
    body = (await port.ask("SELECT * FROM cold LIMIT 1")).json()
    assert dict(zip(body["columns"], body["types"], strict=True)) == {
        "block_number": "BIGINT",
        "hash": "BLOB",
        "label": "VARCHAR",
        "value": "BIGNUM",
        "value_binary": "BLOB",
        "value_string": "VARCHAR",
        "value_f64": "DOUBLE",
    }
    assert (await port.ask("SELECT value FROM hot LIMIT 1")).json()["types"] == ["BIGNUM"]
