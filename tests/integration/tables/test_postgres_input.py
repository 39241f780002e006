"""Inputs in Postgres: what is committed, in one snapshot, cut and filtered as files are, in the shape they have."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import msgspec
import psycopg
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql

from tests.support.hot_scene import HotScene, Wrapper
from tests.support.operator_process import EXTREME_PREDICATES, QUOTED_PREDICATES, an_input
from tests.support.wide_integers import stored_integer
from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.domain.literals import read_boolean, read_double, read_integer, read_numeric
from tracelake.domain.where import Where
from tracelake.domain.where_parse import parse_where
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.operators import Context
from tracelake.tables.hot_and_cold import cut_evenly, read_postgres_arrow, scan_of_request, split_scan
from tracelake.tables.postgres_scan import postgres_condition

VERSION = UUID(int=11)
HIGH = datetime(2024, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
TYPED = pa.table(
    {
        "block_number": pa.array([1, 2, 3, 4, 5], pa.int64()),
        "n": pa.array([1, 2, None, -1, 2**63 - 1], pa.int64()),
        "m": pa.array([1, 1, 3, None, 5], pa.int64()),
        "f": pa.array([1.5, float("nan"), None, -0.0, 2.0]),
        "d": pa.array([Decimal("1.50"), None, Decimal("-3"), Decimal(0), Decimal(2)], pa.decimal128(20, 2)),
        "s": ["a", 'b"\n', None, "é", ""],
        "b": [True, False, None, True, False],
        "x": [b"\x01", b"\xff", None, b"", b"\x01\x02"],
        "at": pa.array(
            [HIGH, None, HIGH.replace(microsecond=0), HIGH.replace(year=1), HIGH], pa.timestamp("us", "UTC")
        ),
        "day": [date(2024, 1, 1), None, date(2024, 1, 2), date(1, 1, 1), date(9999, 12, 31)],
    }
)


def committed(scene: HotScene, table: pa.Table, version: UUID = VERSION, **how: Any) -> None:
    ctx = scene.begin(an_input(start=0, end=10**6), versions=[version])
    ctx.outputs[0].stage(table, **how)
    ctx.finish()
    ctx.close()


def hot_input(version: UUID = VERSION, where: Where | None = None, **scope: Any) -> PayloadInput:
    tree = None if where is None else msgspec.to_builtins(where.tree)
    return PayloadInput(0, uuid4(), version, 0, "hot", "postgres", where_tree=tree, **scope)


def reading(scene: HotScene, *sources: PayloadInput) -> Context:
    return scene.begin(*sources, versions=[])


def test_rows_come_back_as_they_were_committed(hot_scene: HotScene) -> None:
    committed(hot_scene, TYPED)
    ctx = reading(hot_scene, hot_input())
    read = ctx.inputs[0].arrow().sort_by("block_number")
    assert read.schema == TYPED.schema
    # NaN isn't equal to itself.
    assert repr(read.to_pylist()) == repr(TYPED.to_pylist())


def test_other_kinds_of_columns_are_read_as_exact_text(hot_scene: HotScene) -> None:
    uint256 = pa.table(
        {"block_number": [1], "v": [str(2**256 - 1)], "j": [[1, None]], "u": [str(UUID(int=1))]}
    )
    committed(hot_scene, uint256, types={"v": "numeric(78,0)", "u": "uuid"})
    [row] = reading(hot_scene, hot_input()).inputs[0].arrow().to_pylist()
    assert row == {"block_number": 1, "v": str(2**256 - 1), "j": "[1, null]", "u": str(UUID(int=1))}


def test_rows_are_cut_to_the_scope_and_narrowed_further_on_demand(hot_scene: HotScene) -> None:
    committed(hot_scene, TYPED)

    def blocks(*args: Any, **scope: Any) -> list[int]:
        source = reading(hot_scene, hot_input(**scope)).inputs[0]
        return sorted(read_postgres_arrow(source.request(), *args).column("block_number").to_pylist())

    assert blocks(start=2, end=4) == [2, 3, 4]
    assert blocks(after=3, upto=9) == [4, 5]
    assert blocks(after=3, upto=3) == []
    assert blocks([BlockRange(0, 2), BlockRange(4, 4)], start=2, end=9) == [2, 4]
    assert blocks([BlockRange(0, 2), BlockRange(4, 4)]) == [1, 2, 4]
    assert blocks([]) == []


def test_nothing_committed_yet_is_an_empty_table_and_for_spark_a_reason_to_wait(hot_scene: HotScene) -> None:
    ctx = reading(hot_scene, hot_input(uuid4(), start=0, end=9))
    assert ctx.inputs[0].arrow().num_rows == 0
    with pytest.raises(Conflict) as refused:
        ctx.inputs[0].dataframe()
    assert refused.value.reason == "InputEmpty"


def test_rows_without_a_block_number_cannot_be_cut(hot_scene: HotScene) -> None:
    ctx = hot_scene.begin(
        an_input(start=0, end=9), versions=[VERSION], update_strategy="append", unique_key=["name"]
    )
    ctx.outputs[0].stage(pa.table({"name": ["a"]}))
    ctx.finish()
    assert reading(hot_scene, hot_input()).inputs[0].arrow().to_pylist() == [{"name": "a"}]
    with pytest.raises(Invalid, match="has no column block_number"):
        reading(hot_scene, hot_input(start=0, end=9)).inputs[0].arrow()


def test_all_inputs_of_an_attempt_are_read_as_of_one_moment(hot_scene: HotScene) -> None:
    other = UUID(int=12)
    for version in (VERSION, other):
        committed(hot_scene, pa.table({"block_number": [1]}), version)
    ctx = reading(hot_scene, hot_input(), hot_input(other))
    assert ctx.inputs[0].arrow().num_rows == 1
    for version in (VERSION, other):
        committed(hot_scene, pa.table({"block_number": [1, 2]}), version)
    assert [source.arrow().num_rows for source in ctx.inputs] == [1, 1]
    assert reading(hot_scene, hot_input()).inputs[0].arrow().num_rows == 2


def test_a_snapshot_that_was_lost_is_not_replaced_by_another(hot_scene: HotScene) -> None:
    committed(hot_scene, TYPED)
    ctx = reading(hot_scene, hot_input())
    ctx.inputs[0].arrow()
    query = """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE starts_with(usename, 'tracelake_t_') AND datname = current_database()"""
    with psycopg.connect(hot_scene.dsn, autocommit=True) as admin:
        admin.execute(query)
    with pytest.raises(Unavailable):
        ctx.inputs[0].arrow()


def test_a_worker_that_cannot_read_hot_tables_says_how_it_could(hot_scene: HotScene) -> None:
    task = reading(hot_scene, hot_input()).task
    ctx = Context(task, Wrapper(hot_scene.dsn, task))
    with pytest.raises(Invalid, match="TRACELAKE_DATA_WRITE_DSN"):
        ctx.inputs[0].arrow()


@pytest.mark.parametrize("dataset", TABLES)
def test_chain_tables_come_in_the_shape_of_their_files(hot_scene: HotScene, dataset: ChainTable) -> None:
    table = TABLES[dataset]
    rows = pa.Table.from_pylist([chain_row(table.arrow, block) for block in (1, 2)], table.arrow)
    committed(hot_scene, table.to_hot(rows), types=table.postgres_types)
    where = parse_where("block_number = 2 and chain_id = 5")
    ctx = reading(hot_scene, hot_input(where=where))
    assert ctx.inputs[0].arrow().equals(rows.slice(1))


def chain_row(schema: pa.Schema, block: int) -> dict[str, Any]:
    """Something in every column of a chain table; uint256 columns hold one number, near the top."""
    value = 2**256 - block
    row: dict[str, Any] = {}
    for field in schema:
        name, kind = field.name, field.type
        if name in row:
            continue
        if name.endswith("_binary") and f"{name.removesuffix('_binary')}_string" in schema.names:
            row |= stored_integer(name.removesuffix("_binary"), value)
        elif pa.types.is_binary(kind):
            row[name] = bytes([block]) * 20
        elif pa.types.is_integer(kind):
            row[name] = block if name == "block_number" else 5
        elif pa.types.is_timestamp(kind):
            row[name] = HIGH
        elif pa.types.is_floating(kind):
            row[name] = 0.5
        elif pa.types.is_boolean(kind):
            row[name] = True
        elif pa.types.is_string(kind):
            row[name] = "text"
    return row


PUSHED = [
    *(
        "n = 1",
        "n <> 1",
        "n < 1.5",
        "n >= 1.5",
        "n = 1.5",
        "n <> 1.5",
        "n < 1e26",
        "n > 1e26",
        "n not in (1, 2)",
    ),
    *("n in (1, 9223372036854775807)", "n is null", "n is not null", "n = m", "n > m", "n = 'one'"),
    *("f > 1", "f = 1.5", "f <> 2", "f < 2", "d = 1.5", "d >= 0", "d < 1e41", "s = 'a'", "s > 'b'", "s = 1"),
    *("s in ('a', '')", "b = true", "b <> true", "b = 1", "x = '\\x01'", "x > '\\x01'", "x = 'nothex'"),
    *(
        "at >= '2024-01-02'",
        "at < '2024-01-02T04:04:05.678901+01:00'",
        "at = 'yesterday'",
        "day > '2024-01-01'",
    ),
    *EXTREME_PREDICATES,
    *QUOTED_PREDICATES,
    *("gone = 1", "gone is null", "not (n = 1 or s = 'b')", "(n = 1 and f > 1) or day = '2024-01-02'"),
]
COLUMNS = {field.name: field.type for field in TYPED.schema}


def test_where_means_in_postgres_what_it_means_row_by_row(hot_scene: HotScene) -> None:
    committed(hot_scene, TYPED)
    with psycopg.connect(hot_scene.dsn) as connection:
        for predicate in PUSHED:
            where = parse_where(predicate)
            expected = [row["block_number"] for row in TYPED.to_pylist() if where.matches(row)]
            source = reading(hot_scene, hot_input(where=where)).inputs[0]
            assert sorted(source.arrow().column("block_number").to_pylist()) == expected, predicate
            if (pushed := postgres_condition(where.tree, COLUMNS)) is not None:
                assert kept_by(connection, pushed) == expected, predicate


SPELLINGS = [
    *(
        "1",
        " 1 ",
        "+1",
        "-1",
        "- 1",
        "--1",
        "1.0",
        "1.",
        ".5",
        ".",
        "",
        " ",
        "1e2",
        "1E+2",
        "1e",
        "e1",
        "1e2.5",
        "abc",
        "1 2",
    ),
    *(
        "9223372036854775807",
        "9223372036854775808",
        "-9223372036854775808",
        "-9223372036854775809",
        "0" * 40 + "7",
    ),
    *(
        "2147483648",
        "\t1\n",
        "\u00a01",
        "\u0661",
        "1f",
        "1d",
        "0.1",
        "1e308",
        "1e309",
        "-1e309",
        "1e-310",
        "1e-400",
        "0e-400",
    ),
    *("1e131071", "1e131072", "0e999999", "1e-16383", "1e-16384", "1e99999999999", "0.0000001"),
    *(
        "NaN",
        "nan",
        "-NaN",
        "+nan",
        "nan(1)",
        "Infinity",
        "-Infinity",
        "+Infinity",
        "inf",
        "-inf",
        "infinit",
        "iNf",
    ),
    *(
        "t",
        "tr",
        "true",
        "TRUE",
        "truer",
        "y",
        "yes",
        "on",
        "o",
        "of",
        "off",
        "n",
        "no",
        "f",
        "FALSE",
        "0",
        "00",
        "10",
    ),
]
OF_SIXTEEN = [
    *("0x1f", "-0x1F", "0x", "0o17", "0b101", "0b2", "0x_1"),
    *("1_000", "1__0", "_1", "1_", "1_0.5_5", "1._5", "1e1_0"),
]


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("bigint", read_integer),
        ("numeric", read_numeric),
        ("double precision", read_double),
        ("boolean", read_boolean),
    ],
)
def test_literals_are_read_as_postgres_reads_them(data_dsn: str, kind: str, read: Any) -> None:
    with psycopg.connect(data_dsn, autocommit=True) as connection:
        spellings = SPELLINGS + (OF_SIXTEEN if connection.info.server_version >= 160_000 else [])
        for text in spellings:
            cast = sql.SQL("SELECT {}::{}").format(sql.Literal(text), sql.SQL(kind))
            try:
                expected = connection.execute(cast).fetchone()[0]
            except psycopg.DataError:
                expected = None
            found = read(text)
            assert str(found) == str(expected) or found == expected, (text, found, expected)
            assert type(found) is type(expected), text


numbers = st.integers(-3, 3) | st.sampled_from([0.5, -1.5, 2**63, -(2**70), 1.5])
spelt_numbers = numbers.map(repr) | (numbers.map(repr) | st.sampled_from(SPELLINGS)).map("'{}'".format)
literals = {
    **dict.fromkeys(
        ("n", "m", "f", "d"),
        numbers.map(repr) | (numbers.map(repr) | st.sampled_from(SPELLINGS)).map("'{}'".format),
    ),
    "s": st.text("ab'é\\\"", max_size=2).map(lambda text: "'" + text.replace("'", "''") + "'"),
    "b": st.sampled_from(["true", "false", "'t'", "'no'", "'o'"]),
    "x": st.binary(max_size=2).map(lambda raw: f"'\\x{raw.hex()}'"),
    "at": st.datetimes(timezones=st.just(UTC)).map(lambda at: f"'{at.isoformat()}'"),
    "day": st.dates().map(lambda day: f"'{day}'"),
    "gone": st.just("1"),
}
leaves = st.one_of(
    [
        st.tuples(st.just(name), st.sampled_from(["=", "<>", "<", "<=", ">", ">="]), value).map(" ".join)
        for name, value in literals.items()
    ]
    + [
        st.sampled_from(
            [f"{name} is null" for name in literals] + [f"{name} is not null" for name in literals]
        )
    ]
    + [st.sampled_from(["n = m", "n < m", "m <> n"])]
)
predicates = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            lambda three: "({}) {} ({})".format(*three)
        ),
        inner.map(lambda one: f"not ({one})"),
    ),
    max_leaves=5,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_postgres_leaves_out_no_predicate_would_have_kept(
    typed_table: psycopg.Connection, data: Any
) -> None:
    where = parse_where(data.draw(predicates))
    expected = {row["block_number"] for row in TYPED.to_pylist() if where.matches(row)}
    if (pushed := postgres_condition(where.tree, COLUMNS)) is not None:
        assert expected <= set(kept_by(typed_table, pushed)), where.text


@pytest.fixture
def typed_table(hot_scene: HotScene) -> Any:
    committed(hot_scene, TYPED)
    with psycopg.connect(hot_scene.dsn, autocommit=True) as connection:
        yield connection


def kept_by(connection: psycopg.Connection, pushed: sql.Composable) -> list[int]:
    table = sql.Identifier("data", f"d_{VERSION.hex}")
    query = sql.SQL("SELECT block_number FROM {} WHERE {} ORDER BY 1").format(table, pushed)
    return [row[0] for row in connection.execute(query).fetchall()]


def test_blocks_are_split_evenly_over_gaps() -> None:
    spans = [BlockRange(0, 4), BlockRange(10, 10), BlockRange(20, 23)]
    assert cut_evenly(spans, 3) == [
        [BlockRange(0, 3)],
        [BlockRange(4, 4), BlockRange(10, 10), BlockRange(20, 21)],
        [BlockRange(22, 23)],
    ]
    assert cut_evenly(spans, 100) == [[BlockRange(n, n)] for n in (0, 1, 2, 3, 4, 10, 20, 21, 22, 23)]
    assert cut_evenly([], 3) == []


def test_a_scan_is_split_by_where_its_rows_are(hot_scene: HotScene) -> None:
    numbers = [1000 + n % 100 for n in range(2000)]
    committed(hot_scene, pa.table({"block_number": numbers}))
    source = reading(hot_scene, hot_input(start=0, end=10**6)).inputs[0]
    scan = scan_of_request(source.request())
    assert scan is not None
    parts = split_scan(scan, source.data.snapshot().connection, rows_per_task=500)
    spans = [span for part in parts for span in part.spans or ()]
    assert (spans[0].start, spans[-1].end, len(parts)) == (1000, 1099, 4)
    assert sum(batch.num_rows for part in parts for batch in part.batches()) == 2000
    nothing = scan.only([BlockRange(0, 5)])
    assert split_scan(nothing, source.data.snapshot().connection) == []
