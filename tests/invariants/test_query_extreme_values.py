"""Values at the ends of their types: answered as they are or refused in words, never as others, never by a crash.

Results: every type of the engine, alone and within others, in JSON, Arrow and as a Parquet file. The engine itself
is the judge: what comes back is read by it again and must be the text that it writes for the value. Conditions:
literals at and beyond the ends of every column of a hot table; Postgres leaves rows out by them, and the answer
must be the one that the engine gives over all rows.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import pytest_asyncio
from psycopg import sql

from tests.support.conversation import dag, source
from tests.support.databases import PASSWORD, build_state_template, role_dsn
from tests.support.postgres import SharedPostgres
from tests.support.query_port import QueryPort, open_query_port, open_steps
from tracelake.contracts.query_api import ARROW_STREAM, TYPE_FIELD
from tracelake.domain.errors import Invalid
from tracelake.hot.install import READER_ROLE, install
from tracelake.query.engine.gate import parse
from tracelake.query.engine.hex_literals import with_bytes
from tracelake.query.engine.lockdown import without_rewriter
from tracelake.query.fit_relation import fit
from tracelake.query.hot_rows import find_table, narrowed, read_rows
from tracelake.tables.postgres_scan import PostgresScan
from tracelake.tables.wide_integers import as_wide_integers

pytestmark = pytest.mark.asyncio(loop_scope="module")

COLUMNS = {
    "a": "text",
    "big": "bigint",
    "small": "integer",
    "amount": "numeric",
    "ok": "boolean",
    "seen": "timestamptz",
    "data": "bytea",
    "ratio": "double",
    "id": "uuid",
}
HOT = {"storage": "postgres", "write_mode": "buffered", "schema": {"columns": COLUMNS, "unique": ["a"]}}
DAG = dag(source(), publish={"hot": HOT})
ROWS: tuple[tuple[Any, ...], ...] = (
    (1, "", -(2**63), -(2**31), 2**255, True, "0001-01-01 00:00:00+00", b"", "NaN"),
    (2, "x", 2**63 - 1, 2**31 - 1, -(2**255), False, "9999-12-31 23:59:59.999999+00", b"\0\xff", "Infinity"),
    (3, "infinity", 0, 0, 0, None, "1970-01-01 00:00:00+00", b"a", "-Infinity"),
    (4, None, None, None, None, None, None, None, None),
    (5, "-9223372036854775808", -1, -1, 1, True, "2024-02-29 12:00:00+00", b"\\x61", "0"),
    (6, "é\u2028", 2**53 + 1, 1, 2, False, "2024-01-01 00:00:00+00", b"ab", "1.5"),
)


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
    folder = tmp_path_factory.mktemp("query")
    await install(data, writer_password=PASSWORD, reader_password=PASSWORD)
    async with open_steps(state, folder) as ctx, open_query_port(ctx, state, data) as port:
        await port.talk.deploy(DAG)
        _fill(data, await _version(port))
        yield port


async def _version(port: QueryPort) -> UUID:
    [row] = await port.talk.query(
        "SELECT dataset_version FROM catalog.dataset_version WHERE dataset = 'hot' AND is_current"
    )
    version: UUID = row["dataset_version"]
    return version


CREATE = """
    CREATE TABLE {} (position bigint, a text, big bigint, small integer, amount numeric, ok boolean,
                     seen timestamptz, data bytea, ratio double precision, fixed numeric(38,0), day date,
                     local timestamp, id uuid, wide numeric(78,0))
"""
INSERT = """
    INSERT INTO {} (position, a, big, small, amount, ok, seen, data, ratio)
    VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s)
"""
DERIVE = """
    UPDATE {} SET fixed = big, day = (seen AT TIME ZONE 'UTC')::date, local = seen AT TIME ZONE 'UTC',
                  id = 'ffffffff-ffff-ffff-ffff-ffffffffffff',
                  wide = CASE position WHEN 3 THEN 2::numeric ^ 256 - 1 WHEN 5 THEN 9001 WHEN 6 THEN 10
                              ELSE amount END
"""
POSITIONS = "SELECT position FROM hot WHERE {}"


def _fill(dsn: str, version: UUID) -> None:
    table = sql.Identifier("data", f"d_{version.hex}")
    with psycopg.connect(dsn, autocommit=True) as admin, admin.cursor() as cursor:
        cursor.execute(sql.SQL(CREATE).format(table))
        cursor.executemany(sql.SQL(INSERT).format(table), ROWS)
        cursor.execute(sql.SQL(DERIVE).format(table))
        cursor.execute(sql.SQL("GRANT SELECT ON {} TO {}").format(table, sql.Identifier(READER_ROLE)))


@pytest.fixture(scope="module")
def hot_table(dsns: tuple[str, str]) -> Iterator[psycopg.Connection]:
    with psycopg.connect(role_dsn(dsns[1], READER_ROLE), autocommit=True) as connection:
        yield connection


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scan(port: QueryPort, hot_table: psycopg.Connection) -> PostgresScan:
    found = find_table(hot_table, await _version(port))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        without_rewriter(connection)
        yield connection


SCALARS = (
    *("true", "(-128)::TINYINT", "255::UTINYINT", "(-32768)::SMALLINT", "65535::USMALLINT"),
    *("(-2147483648)::INTEGER", "4294967295::UINTEGER", "(-9223372036854775808)::BIGINT"),
    *("9223372036854775807", "18446744073709551615::UBIGINT"),
    *("99999999999999999999999999999999999999::HUGEINT", "100000000000000000000000000000000000000::HUGEINT"),
    *(
        "'-99999999999999999999999999999999999999'::HUGEINT",
        "'-100000000000000000000000000000000000000'::HUGEINT",
    ),
    *(
        "170141183460469231731687303715884105727::HUGEINT",
        "'-170141183460469231731687303715884105728'::HUGEINT",
    ),
    *("0::UHUGEINT", "170141183460469231731687303715884105728::UHUGEINT"),
    *(
        "340282366920938463463374607431768211455::UHUGEINT",
        "99999999999999999999999999999999999999::UHUGEINT",
    ),
    *("0::BIGNUM", "'-5'::BIGNUM", "repeat('9', 60)::BIGNUM", "('-' || repeat('9', 5000))::BIGNUM"),
    *("repeat('9', 38)::DECIMAL(38,0)", "('-0.' || repeat('9', 38))::DECIMAL(38,38)", "9.9::DECIMAL(2,1)"),
    *(
        "1.7976931348623157e308::DOUBLE",
        "5e-324::DOUBLE",
        "'-0.0'::DOUBLE",
        "3.4028235e38::FLOAT",
        "1e-45::FLOAT",
    ),
    *("'infinity'::DATE", "'-infinity'::DATE", "'5881580-07-10'::DATE", "'5877642-06-25 (BC)'::DATE"),
    *("'0001-12-31 (BC)'::DATE", "'0001-01-01'::DATE", "'10000-02-29'::DATE", "'1600-02-29'::DATE"),
    *("'infinity'::TIMESTAMP", "'-infinity'::TIMESTAMP", "'290309-12-22 (BC) 00:00:00'::TIMESTAMP"),
    *("'294247-01-10 04:00:54.775806'::TIMESTAMP", "'0001-12-31 (BC) 23:59:59.999999'::TIMESTAMP"),
    *(
        "'1969-12-31 23:59:59.999999'::TIMESTAMP",
        "'0000-01-01'::TIMESTAMP",
        "'9999-12-31 23:59:59.999999'::TIMESTAMP",
    ),
    *(
        "'infinity'::TIMESTAMPTZ",
        "'-infinity'::TIMESTAMPTZ",
        "'294247-01-10 04:00:54.775806+00'::TIMESTAMPTZ",
    ),
    *("'290309-12-22 (BC) 00:00:00.5+00'::TIMESTAMPTZ", "'0001-01-01 00:00:00+14:00'::TIMESTAMPTZ"),
    *("'infinity'::TIMESTAMP_S", "'-infinity'::TIMESTAMP_S", "'294247-01-10 04:00:54'::TIMESTAMP_S"),
    *("'infinity'::TIMESTAMP_MS", "'-infinity'::TIMESTAMP_MS", "'294247-01-10 04:00:54.775'::TIMESTAMP_MS"),
    *(
        "'infinity'::TIMESTAMP_NS",
        "'-infinity'::TIMESTAMP_NS",
        "'2262-04-11 23:47:16.854775806'::TIMESTAMP_NS",
    ),
    *("'1677-09-22 00:00:00'::TIMESTAMP_NS", "'2024-01-01 00:00:00.000000001'::TIMESTAMP_NS"),
    *("'24:00:00'::TIME", "'00:00:00'::TIME", "'23:59:59.999999'::TIME", "'12:00:00.5'::TIME"),
    *("'24:00:00'::TIMETZ", "'00:00:00+15:59:59'::TIMETZ", "'24:00:00-15:59:59'::TIMETZ"),
    *("'12:34:56.5+02:30'::TIMETZ", "'23:59:59.999999-15:59:59'::TIMETZ"),
    *("INTERVAL (-2147483648) MONTH", "to_months(2147483647)", "to_days(2147483647)", "to_days(-2147483648)"),
    *("to_microseconds(9223372036854775807)", "to_microseconds(-9223372036854775808)", "INTERVAL '0' DAY"),
    *("'ffffffff-ffff-ffff-ffff-ffffffffffff'::UUID", "'00000000-0000-0000-0000-000000000000'::UUID"),
    *("'0'::BIT", "'10101010101'::BIT", "repeat('1', 1000)::BIT", "''::BLOB", r"'\x00\xff'::BLOB"),
    *("''", "'a' || chr(0) || 'b'", "chr(1114111)", "chr(8232)", "'{\"a\": 1e400}'::JSON", "NULL"),
)
#: Refused in Arrow and in Parquet, each for itself; the rest is there as it is.
BEYOND_ARROW = frozenset(
    (
        "'24:00:00'::TIME",
        "{'x': '24:00:00'::TIME, 'y': 1}",
        "['24:00:00'::TIME]::TIME[1]",
    )
)
#: Beyond Arrow's decimals, so all integers of the result's HUGEINT columns are text.
OF_39_DIGITS = (
    "[340282366920938463463374607431768211455::UHUGEINT]",
    "MAP {1: 170141183460469231731687303715884105727::HUGEINT}",
    "{'a': [{'b': 170141183460469231731687303715884105727::HUGEINT}]}",
)
NESTED = (
    *("[{}]", "[NULL, {}]", "[[{}], []]", "{{'x': {}, 'y': 1}}", "{{'d': 5::DECIMAL(38,0), 'x': {}}}"),
    *("MAP {{1: {}}}", "[{0}, {0}]::{1}[2]", "{{'a\"b': [{{'c': {}}}]}}"),
)
HARD = (
    "99999999999999999999999999999999999999::UHUGEINT",
    "to_microseconds(9223372036854775807)",
    "'infinity'::TIMESTAMP_S",
    "'00:00:00+15:59:59'::TIMETZ",
    "'5877642-06-25 (BC)'::DATE",
    "'-5'::BIGNUM",
    "'101'::BIT",
    "NULL::HUGEINT",
)
PARQUET_HAS_NO_TYPE = (
    "INTERVAL '1' DAY",
    "[to_microseconds(1)]",
    "union_value(x := 1)",
    "{'u': union_value(x := 1)}",
)


def _written(engine: duckdb.DuckDBPyConnection, expression: str) -> tuple[str | None, str]:
    [row] = engine.sql(f"SELECT ({expression})::VARCHAR, typeof({expression})").fetchall()
    return row


def _nested(engine: duckdb.DuckDBPyConnection) -> Iterator[str]:
    for value in HARD:
        kind = _written(engine, value)[1]
        yield from (form.format(value, kind) for form in NESTED)


def _select(expressions: list[str]) -> str:
    return f"SELECT {', '.join(f'{each} AS c{place}' for place, each in enumerate(expressions))}"


def _read_back(engine: duckdb.DuckDBPyConnection, source: str, columns: int) -> list[str | None]:
    listed = ", ".join(f"c{place}::VARCHAR" for place in range(columns))
    [row] = engine.sql(" ".join(("SELECT", listed, "FROM", source))).fetchall()
    return list(row)


async def test_json_has_every_value_as_the_engine_writes_it(
    port: QueryPort, engine: duckdb.DuckDBPyConnection
) -> None:
    expressions = sorted({*SCALARS, *BEYOND_ARROW, *OF_39_DIGITS})
    answer = await port.ask(_select(expressions))
    assert answer.status_code == 200, answer.text
    body = json.loads(answer.text, parse_int=str)
    [row] = body["rows"]
    for expression, value, shown in zip(expressions, row, body["types"], strict=True):
        text, kind = _written(engine, expression)
        assert shown == kind, expression
        if text is None:
            assert value is None, expression
        elif kind == "BLOB":
            assert engine.execute("SELECT ?::VARCHAR", [bytes.fromhex(value[2:])]).fetchall() == [(text,)]
        elif isinstance(value, float | bool):
            assert engine.execute(f"SELECT (?::{kind})::VARCHAR", [value]).fetchall() == [(text,)], expression
        elif not isinstance(value, list | dict):
            # Reading it again gives the value itself.
            same = engine.execute(f"SELECT (?::{kind})::VARCHAR", [value]).fetchall()
            assert same == [(text,)], (expression, value)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (
            "[340282366920938463463374607431768211455::UHUGEINT, NULL]",
            [340282366920938463463374607431768211455, None],
        ),
        ("{'d': 5::DECIMAL(38,0), 'h': 5::HUGEINT}", {"d": "5", "h": 5}),
        ("MAP {'24:00:00'::TIME: 'infinity'::TIMESTAMP}", [["24:00:00", "infinity"]]),
        ("union_value(t := '24:00:00'::TIME)", "24:00:00"),
        ("['12:00:00.5'::TIME]::TIME[1]", ["12:00:00.500000"]),
        ("[NULL::HUGEINT[2]]", [None]),
        ("row('101'::BIT, '-5'::BIGNUM)", {"element1": "101", "element2": -5}),
        ("{'t': '12:34:56.5+02:30'::TIMETZ}", {"t": "12:34:56.5+02:30"}),
        ("[to_microseconds(9223372036854775807)]", ["2562047788:00:54.775807"]),
        ("'0044-03-15 (BC)'::DATE", "0044-03-15 (BC)"),
        ("'0044-03-15 (BC) 12:00:00.5'::TIMESTAMP", "0044-03-15 (BC) 12:00:00.500000"),
        ("'12024-03-15 12:00:00+00'::TIMESTAMPTZ", "12024-03-15T12:00:00Z"),
        ("'infinity'::TIMESTAMP_NS", "infinity"),
    ],
)
async def test_values_within_others_and_far_days_are_written_by_the_same_rules(
    port: QueryPort, expression: str, value: Any
) -> None:
    assert await port.rows(f"SELECT {expression} AS v") == [[value]]


async def test_arrow_holds_the_value_or_says_that_it_cannot(
    port: QueryPort, engine: duckdb.DuckDBPyConnection
) -> None:
    held = [each for each in (*SCALARS, *OF_39_DIGITS, *_nested(engine)) if each not in BEYOND_ARROW]
    answer = await port.ask(_select(held), accept=ARROW_STREAM)
    assert answer.status_code == 200, answer.text
    with pa.ipc.open_stream(answer.content) as reader:
        table = reader.read_all()
    table.validate(full=True)
    engine.register("answered", table)
    assert _read_back(engine, "answered", len(held)) == [_written(engine, each)[0] for each in held]
    for expression in BEYOND_ARROW:
        for more in ({"accept": ARROW_STREAM}, {"export": True}):
            _explained(await port.ask(f"SELECT {expression} AS v", **more), expression)


async def test_an_exported_file_holds_every_value_that_arrow_does(
    port: QueryPort, engine: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    every = [each for each in (*SCALARS, *OF_39_DIGITS, *_nested(engine)) if each not in BEYOND_ARROW]
    held = [each for each in every if "INTERVAL" not in _written(engine, each)[1]]
    answer = await port.ask(_select(held), export=True)
    assert answer.status_code == 200, answer.text
    exported = await port.http.get(answer.json()["download"], headers=port.person)
    file = tmp_path / "all.parquet"
    file.write_bytes(exported.content)
    found = _read_back(engine, f"read_parquet('{file}')", len(held))
    assert found == [_written(engine, each)[0] for each in held]
    for expression in PARQUET_HAS_NO_TYPE:
        refused = await port.ask(f"SELECT {expression} AS v", export=True)
        assert (refused.status_code, refused.json()["reason"]) == (422, "ExportUnsupported"), expression


def _explained(answer: Any, what: object) -> None:
    """Refused by a 4xx with a reason that isn't a crash."""
    body = answer.json()
    assert (answer.status_code, body.get("reason")) == (422, "InvalidQuery"), (what, body)
    assert "VARCHAR" in body["detail"], what


async def test_rows_keep_their_order_and_names_when_columns_are_cast(port: QueryPort) -> None:
    query = 'SELECT n::HUGEINT AS "a""b", -n AS x, n::UHUGEINT AS x FROM range(3000) t(n) ORDER BY n DESC'
    body = (await port.ask(query)).json()
    assert body["columns"] == ['a"b', "x", "x"]
    assert body["types"] == ["HUGEINT", "BIGINT", "UHUGEINT"]
    assert body["rows"] == [[n, -n, n] for n in range(2999, -1, -1)]


WIDE_AT_LAST = """
    SELECT CASE WHEN n = 99999 THEN 170141183460469231731687303715884105727 ELSE n END::HUGEINT AS v
    FROM range(100000) t(n)
"""
LATE = """
    SELECT CASE WHEN n = 99999 THEN '24:00:00' ELSE '12:00:00' END::TIME AS t, n::{} FROM range(100000) t(n)
"""


async def test_a_hugeint_of_39_digits_on_a_later_row_is_exact_in_arrow_and_in_a_file(
    port: QueryPort, engine: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    """The rows before it were decimals already; both forms carry the engine's type beside the text."""
    query = WIDE_AT_LAST
    with pa.ipc.open_stream((await port.ask(query, accept=ARROW_STREAM, limit=100_000)).content) as reader:
        table = reader.read_all()
    assert [*map(int, table.column("v").to_pylist())] == [*range(99_999), 2**127 - 1]
    assert table.schema.field("v").metadata == {TYPE_FIELD.encode(): b"HUGEINT"}
    answer = await port.ask(query, export=True)
    exported = await port.http.get(answer.json()["download"], headers=port.person)
    (tmp_path / "v.parquet").write_bytes(exported.content)
    assert pq.read_schema(tmp_path / "v.parquet").field("v").metadata[TYPE_FIELD.encode()] == b"HUGEINT"
    found = engine.read_parquet(str(tmp_path / "v.parquet")).aggregate("count(*), max(v::HUGEINT)").fetchall()
    assert found == [(100_000, 2**127 - 1)]


@pytest.mark.parametrize("kind", ["HUGEINT", "DOUBLE"])
async def test_what_fails_on_a_later_row_is_no_crash(port: QueryPort, kind: str) -> None:
    answer = await port.ask(LATE.format(kind), accept=ARROW_STREAM, limit=1_000_000)
    assert (answer.status_code, answer.json()["reason"]) == (422, "InvalidQuery")
    assert "VARCHAR" in answer.json()["detail"]


PARAMETERS: tuple[Any, ...] = (
    *(
        -(2**63),
        2**63,
        2**64,
        -(2**127),
        2**127,
        2**128,
        10**38,
        10**100,
        -(10**400),
        10**4000,
        0.1,
        1e308,
        -0.0,
    ),
    *(
        "",
        "\u0000",
        "a\u0000b",
        "infinity",
        "24:00:00",
        "\u2028",
        {"blob": "0x"},
        {"blob": "0x00ff"},
        None,
        True,
    ),
    *([10**100], [1, "x"], [[1], [None]], [{"blob": "0x00"}, None]),
)


async def test_parameters_at_their_ends_are_taken_or_refused(port: QueryPort) -> None:
    for value in PARAMETERS:
        for query in ("SELECT $1 AS v", POSITIONS.format("big = $1 OR a = $1::VARCHAR")):
            answer = await port.ask(query, params=[value])
            if _answered(answer, (query, value)) and query == "SELECT $1 AS v":
                [[found]] = answer.json()["rows"]
                if isinstance(value, int) and not isinstance(value, bool):
                    assert found == value, "or refused, but no other number"
    for value in (2**128, 2**256 - 1, -(2**255)):
        assert await port.rows("SELECT $1 AS v, [$1] AS w", params=[value]) == [[value, [value]]]
        assert await port.rows("SELECT $1 AS v", params=[[1, value, None]]) == [[[1, value, None]]]


def _answered(answer: Any, what: object) -> bool:
    if answer.status_code == 200:
        return True
    reasons = ("InvalidQuery", "InvalidParams", "BadRequest", "InvalidRequest")
    assert 400 <= answer.status_code < 500, (what, answer.text)
    assert answer.json()["reason"] in reasons, (what, answer.text)
    return False


LITERALS = (
    *("-9223372036854775808", "(-9223372036854775808)::BIGINT", "9223372036854775807", "9223372036854775808"),
    *("-9223372036854775809", "18446744073709551615", "18446744073709551616", "-18446744073709551617"),
    *(
        "170141183460469231731687303715884105727",
        "100000000000000000000000000000000000000",
        "'1e400'",
        "1e400",
    ),
    *("1e100", "-1e308", "1.5", "-0.0", ".5", "5.", "0", "-2147483648", "2147483648", "9007199254740993"),
    *(
        "9007199254740993.5",
        "0.1",
        "NULL",
        "true",
        "'nan'",
        "'inf'",
        "'-infinity'",
        "'infinity'",
        "'nan'::DOUBLE",
    ),
    *(
        "'infinity'::DOUBLE",
        "'-inf'::FLOAT",
        "''",
        "'x'",
        "'a' || chr(0)",
        "'\\x00\\xff'::BLOB",
        "x''",
        "x'00ff'",
    ),
    *(
        "'\\x61'",
        "'é\u2028'",
        "'0001-01-01'",
        "'0001-01-01 00:00:00+14:00'",
        "'9999-12-31 23:59:59.999999-14:00'",
    ),
    *(
        "TIMESTAMPTZ '0001-01-01 00:00:00+14:00'",
        "TIMESTAMPTZ '9999-12-31 23:59:59-14:00'",
        "DATE '9999-12-31'",
    ),
    *("'0000-01-01'", "'10000-01-01'", "DATE '10000-01-01'", "TIMESTAMP 'infinity'", "DATE '-infinity'"),
    *(
        "TIMESTAMP '0044-03-15 (BC) 00:00:00'",
        "'2024-02-30'",
        "'2024-01-01 24:00:00'",
        "'epoch'",
        "DATE '2024-02-29'",
    ),
    *(
        "'ffffffff-ffff-ffff-ffff-ffffffffffff'",
        "115792089237316195423570985008687907853269984665640564039457584007",
    ),
    *(str(2**256 - 1), str(2**256), str(2**255), str(-(2**255)), f"'{2**256 - 1}'", "'9000'", "'10'", "10"),
    *("'-1'", "'10.4'", "'0x00ff'", "'0X'", "'0x61'", "'0x6'"),
)
CONDITIONS = (
    *("{c} = {l}", "{l} = {c}", "{c} <> {l}", "{c} < {l}", "{c} <= {l}", "{c} > {l}", "{c} >= {l}"),
    *("{c} IN ({l})", "{c} IN ({l}, {l}, NULL)", "{c} NOT IN ({l})", "{c} BETWEEN {l} AND {l}"),
    *("{c} NOT BETWEEN {l} AND {l}", "({c} = {l} OR {c} IS NULL)", "{c} = CAST({l} AS DOUBLE)"),
)
STORED = (
    "position",
    "a",
    "big",
    "small",
    "amount",
    "ok",
    "seen",
    "data",
    "ratio",
    "fixed",
    "day",
    "local",
    "id",
    "wide",
)


async def test_conditions_at_the_ends_leave_out_only_rows_that_do_not_fulfil_them(
    port: QueryPort, hot_table: psycopg.Connection, engine: duckdb.DuckDBPyConnection, scan: PostgresScan
) -> None:
    """The engine decides over what Postgres gives for the condition, and over all rows: both answer the same."""
    whole = _rows(scan, hot_table)
    seen = as_wide_integers(scan.whole, scan.wide)
    pushed = 0
    for column in STORED:
        for place, literal in enumerate(LITERALS):
            for turn in range(2):
                form = CONDITIONS[(place * 2 + turn * 5 + len(column)) % len(CONDITIONS)]
                query = POSITIONS.format(form.format(c=column, l=literal))
                use = parse(engine, query).relations["hot"]
                predicate = fit(use, seen).predicate
                expected = None if predicate is None else _decided(engine, whole, query)
                if expected is None:
                    continue
                pushed += 1
                found = _rows(narrowed(scan, scan.whole.names, predicate, None), hot_table)
                assert _decided(engine, found, query) == expected, query
    assert pushed > 150


def _rows(scan: PostgresScan, connection: psycopg.Connection) -> pa.Table:
    memory = read_rows(scan, connection, scan.schema, 2**30)
    if memory is None:
        return scan.schema.empty_table()
    with os.fdopen(memory, "rb") as file:
        file.seek(0)
        return pa.ipc.open_stream(file.read()).read_all()


def _decided(engine: duckdb.DuckDBPyConnection, rows: pa.Table, query: str) -> list[Any] | None:
    """None for a condition that fails."""
    engine.register("stored", rows)
    engine.execute("CREATE OR REPLACE VIEW hot AS SELECT * REPLACE (wide::BIGNUM AS wide) FROM stored")
    try:
        return sorted(engine.sql(with_bytes(engine, query, ())).fetchall())
    except (duckdb.Error, Invalid):
        return None


@pytest.mark.parametrize(
    "literal", ["-9223372036854775808", "1e400", "TIMESTAMPTZ '0001-01-01 00:00:00+14:00'"]
)
@pytest.mark.parametrize("column", ["big", "amount", "seen", "ratio"])
async def test_no_condition_on_a_hot_table_is_an_outage(port: QueryPort, column: str, literal: str) -> None:
    for form in ("{c} >= {l}", "{c} IN ({l}, {l})"):
        answer = await port.ask(POSITIONS.format(form.format(c=column, l=literal)))
        assert answer.status_code in (200, 422), answer.text
        assert answer.status_code == 200 or answer.json()["reason"] == "InvalidQuery"


async def test_the_smallest_number_is_found_in_a_hot_table(port: QueryPort) -> None:
    for condition in (
        "big = -9223372036854775808",
        "big <= -9223372036854775808",
        "-9223372036854775808 >= big",
    ):
        assert await port.rows(POSITIONS.format(condition)) == [[1]], condition


async def test_long_lists_and_many_conditions_are_no_outage(port: QueryPort) -> None:
    values = ", ".join(str(-(2**63) + n) for n in range(1000))
    assert await port.rows(POSITIONS.format(f"big IN ({values})")) == [[1]]
    many = " OR ".join(f"big = {n - 2**63}" for n in range(2000))
    assert await port.rows(POSITIONS.format(many)) == [[1]]
