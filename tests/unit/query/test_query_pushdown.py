"""What a query needs of its relations: less is read, and the answer stays the same."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from random import Random
from typing import ClassVar

import duckdb
import pyarrow as pa
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from tests.support.query_grammar import ARROW, TABLES, Grammar, random_table
from tracelake.domain.where import Where, render
from tracelake.query.engine.gate import parse
from tracelake.query.engine.messages import RelationUse
from tracelake.query.fit_relation import Fitted, fit
from tracelake.tables.arrow import where_expression

EXAMPLES = int(os.environ.get("TRACELAKE_QUERY_FUZZ_EXAMPLES", "0"))
LOGS = pa.schema(
    [
        ("block_number", pa.int64()),
        ("address", pa.binary()),
        ("topic0", pa.binary()),
        ("label", pa.string()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("gas_price", pa.decimal128(38, 0)),
        ("ratio", pa.float64()),
        ("share", pa.float32()),
        ("ok", pa.bool_()),
        ("large", pa.uint64()),
    ]
)


@pytest.fixture(scope="module")
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'; SET threads = 1")
        yield connection


def _pushed(
    engine: duckdb.DuckDBPyConnection, sql: str, params: object = (), relation: str = "logs"
) -> str | None:
    assert isinstance(params, list | dict | tuple)
    predicate = fit(parse(engine, sql, params).relations[relation], LOGS).predicate
    return None if predicate is None else render(predicate)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("block_number BETWEEN 5 AND 9", "block_number <= 9 AND block_number >= 5"),
        ("5 < block_number AND l.block_number <= 9", "block_number <= 9 AND block_number > 5"),
        ("BLOCK_NUMBER = 5", "block_number = 5"),
        ("block_number IN (3, 1, NULL)", "block_number IN (1, 3)"),
        ("block_number NOT IN (3, 1)", "block_number NOT IN (1, 3)"),
        ("block_number NOT IN (3, NULL)", None),
        ("address = '\\xA0\\xb8'::BLOB", "address = '\\xa0b8'"),
        ("address = x'A0B8' OR topic0 = unhex('00ff')", "address = '\\xa0b8' OR topic0 = '\\x00ff'"),
        ("address = 'ab'", "address = '\\x6162'"),
        ("address IN (x'00', x'01')", "address IN ('\\x00', '\\x01')"),
        ("label = 'a''b' AND ok = true", "label = 'a''b' AND ok = TRUE"),
        ("label > 'a' OR block_number = 1 AND upper(label) = 'B'", "block_number = 1 OR label > 'a'"),
        ("label > 'a' OR upper(label) = 'B'", None),
        ("timestamp >= '2024-01-02'", "\"timestamp\" >= '2024-01-02T00:00:00+00:00'"),
        ("timestamp >= '2024-01-02 03:04:05+02:00'", "\"timestamp\" >= '2024-01-02T01:04:05+00:00'"),
        ("timestamp >= '2024-01-02 00:00:00+16:00'", "\"timestamp\" >= '2024-01-01T08:00:00+00:00'"),
        ("timestamp >= '0001-01-01 00:00:00+15:00'", None),
        ("timestamp >= TIMESTAMPTZ '2024-1-2'", None),
        ("local < TIMESTAMP '2024-01-02 03:04:05.25'", "local < '2024-01-02T03:04:05.250000'"),
        ("local < '2024-01-02 03:04:05+02:00'", None),
        ("day = DATE '2024-01-02'", "day = '2024-01-02'"),
        ("day = TIMESTAMP '2024-01-02 00:00:00'", None),
        ("gas_price >= 1000000000", "gas_price >= 1000000000"),
        ("gas_price >= 1.5", None),
        ("ratio < 0.5", "ratio < 0.5"),
        ("share < 0.5", None),
        ("large < 9223372036854775808", None),
        ("block_number < 9223372036854775808", "block_number < 9223372036854775808"),
        ("block_number = '5'", None),
        ("label = 5", None),
        ("block_number < 1e3", None),
        ("ok", None),
        ("NOT (block_number = 5)", None),
        ("label IS NOT NULL AND day IS NULL", "day IS NULL AND label IS NOT NULL"),
        ("block_number = 1 + 1", None),
        ("nothing_of_ours = 5", None),
        ("block_number = $1 AND label = $2", "block_number = 7 AND label = 'x'"),
        ("label = 'back\\slash'", None),
        ("block_number IS NOT DISTINCT FROM 5", None),
    ],
)
def test_comparisons_with_constants_go_to_the_relation(
    engine: duckdb.DuckDBPyConnection, where: str, text: str | None
) -> None:
    sql = " ".join(("SELECT name FROM logs l WHERE", where))
    assert _pushed(engine, sql, [7, "x"] if "$2" in where else []) == text


@pytest.mark.parametrize(
    ("sql", "text"),
    [
        ("SELECT 1 FROM logs JOIN other o ON o.x = logs.block_number AND logs.label = 'a'", "label = 'a'"),
        ("SELECT 1 FROM other LEFT JOIN logs ON logs.label = 'a'", "label = 'a'"),
        ("SELECT 1 FROM other LEFT JOIN logs ON true WHERE logs.label = 'a'", None),
        ("SELECT 1 FROM logs LEFT JOIN other ON logs.label = 'a'", None),
        ("SELECT 1 FROM logs LEFT JOIN other ON true WHERE logs.label = 'a'", "label = 'a'"),
        ("SELECT 1 FROM logs FULL JOIN other ON logs.label = 'a' WHERE logs.label = 'b'", None),
        ("SELECT 1 FROM other ANTI JOIN logs ON logs.label = 'a'", "label = 'a'"),
        ("SELECT 1 FROM logs ANTI JOIN other ON logs.label = 'a'", None),
        ("SELECT 1 FROM other ASOF JOIN logs ON other.x >= logs.day WHERE logs.label = 'a'", None),
        ("SELECT 1 FROM logs ASOF JOIN other ON other.x <= logs.day WHERE logs.label = 'a'", "label = 'a'"),
        ("SELECT 1 FROM logs POSITIONAL JOIN other WHERE logs.label = 'a'", None),
        ("SELECT 1 FROM logs TABLESAMPLE 10% WHERE label = 'a'", None),
        ("SELECT 1 FROM logs WHERE label = 'a' USING SAMPLE 10 ROWS", None),
        ("SELECT 1 FROM logs a(x, y) WHERE label = 'a'", None),
        ("SELECT 1 FROM logs GROUP BY label HAVING label = 'a'", None),
        ("SELECT label FROM logs QUALIFY label = 'a'", None),
        ("SELECT upper(label) AS day FROM logs WHERE day = '2024-01-01'", None),
        ("SELECT 1 FROM logs a, logs b WHERE a.label = 'x' AND b.label = 'y'", "label = 'x' OR label = 'y'"),
        ("SELECT 1 FROM logs a, logs b WHERE a.label = 'x'", None),
        ("SELECT (SELECT max(label) FROM logs) FROM logs WHERE label = 'a'", None),
        ("SELECT * FROM (SELECT * FROM logs) WHERE label = 'a'", None),
        ("WITH x AS (SELECT * FROM logs WHERE label = 'a') SELECT * FROM x a, x b", "label = 'a'"),
        ("WITH logs AS (SELECT * FROM logs WHERE label = 'a') SELECT * FROM logs", None),
        ("SELECT 1 FROM other o WHERE EXISTS (FROM logs WHERE label = 'a' AND block_number = o.x)", "label = 'a'"),
        ("SELECT label FROM logs WHERE label = 'a' UNION ALL SELECT label FROM logs WHERE day IS NULL",
         "day IS NULL OR label = 'a'"),
    ],
)  # fmt: skip
def test_only_rows_that_cannot_show_are_left_out(
    engine: duckdb.DuckDBPyConnection, sql: str, text: str | None
) -> None:
    assert _pushed(engine, sql) == text


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("SELECT Label FROM logs WHERE l = 1", {"label"}),
        ("SELECT l.label, o.day FROM logs l JOIN other o ON l.block_number = o.x", {"label", "block_number"}),
        ("SELECT day FROM logs l JOIN other o ON l.block_number = o.x", {"day", "block_number"}),
        ("SELECT count(*) FROM logs", {"block_number"}),
        ("SELECT 1 FROM logs JOIN other USING (label)", {"label"}),
        ("SELECT sum(ratio) FILTER (WHERE ok) OVER (PARTITION BY day ORDER BY local) FROM logs",
         {"ratio", "ok", "day", "local"}),
        ("SELECT label FROM logs ORDER BY day", {"label", "day"}),
        ("SELECT o.* FROM other o, logs WHERE logs.ok", {"ok"}),
        ("SELECT (SELECT max(o.x) FROM other o WHERE o.x = logs.day) FROM logs", {"day"}),
        ("SELECT list_transform([1], lambda label: label + 1) FROM logs", {"label"}),
        ("SELECT * FROM logs", None),
        ("SELECT l.* FROM logs l", None),
        ("SELECT l FROM logs l", None),
        ("SELECT COLUMNS('n.*') FROM logs", None),
        ("SELECT 1 FROM logs NATURAL JOIN other", None),
        ("SELECT #2 FROM logs", None),
        ("SELECT a FROM logs t(a)", None),
        ("SELECT label FROM logs UNION ALL SELECT label FROM (FROM logs)", None),
    ],
)  # fmt: skip
def test_only_columns_that_are_named_are_read(
    engine: duckdb.DuckDBPyConnection, sql: str, columns: set[str] | None
) -> None:
    fitted = fit(parse(engine, sql).relations["logs"], LOGS)
    assert fitted.columns == tuple(n for n in LOGS.names if columns is None or n in columns)


def test_conditions_of_any_size_leave_the_parent_little_to_do(engine: duckdb.DuckDBPyConnection) -> None:
    long = "block_number IN (" + ",".join(map(str, range(5000))) + ")"
    many = " AND ".join(f"block_number <> {n}" for n in range(5000))
    deep = "(block_number = 1 AND (label = 'a' OR " * 90 + "ok" + "))" * 90
    for condition in (long, many, deep):
        predicate = (
            parse(engine, " ".join(("SELECT 1 FROM logs WHERE", condition))).relations["logs"].predicate
        )
        assert predicate is None or len(render(predicate)) < 20_000


def test_columns_that_differ_in_case_alone_are_read_and_not_compared() -> None:
    schema = pa.schema([("a", pa.int64()), ("A", pa.int64())])
    engine = duckdb.connect()
    use = parse(engine, "SELECT a FROM t WHERE a = 1").relations["t"]
    assert fit(use, schema) == Fitted(("a", "A"), None)


def test_a_relation_without_columns_of_a_query_still_counts_its_rows() -> None:
    assert fit(RelationUse(()), LOGS).columns == ("block_number",)


@settings(max_examples=EXAMPLES or 120, derandomize=not EXAMPLES)
@given(seed=st.integers(0, 2**48))
def test_answers_are_the_same_from_less(seed: int) -> None:
    """The same examples each time, unless more are asked for; a query that the engine itself trips over is none."""
    random = Random(seed)
    grammar = Grammar(random)
    sql = grammar.query()
    tables = {name: random_table(random, name) for name in TABLES}
    engine = _Engine()
    wanted = engine.answer(sql, grammar.parameters, tables)
    assume(wanted is not None)
    uses = engine.parsed(sql, grammar.parameters)
    less = {name: _less(tables[name], fit(use, tables[name].schema)) for name, use in uses.items()}
    found = engine.answer(sql, grammar.parameters, less)
    assert found == wanted, (sql, grammar.parameters, uses)


def test_random_queries_are_mostly_valid_and_often_read_less() -> None:
    """The property above would hold of a generator that makes nothing but mistakes, too."""
    seen: Counter[str] = Counter()
    for seed in range(150):
        random = Random(seed)
        grammar = Grammar(random)
        sql = grammar.query()
        engine = _Engine()
        if engine.answer(sql, grammar.parameters, {n: random_table(random, n) for n in TABLES}) is None:
            continue
        uses = engine.parsed(sql, grammar.parameters)
        seen["valid"] += 1
        for name, use in uses.items():
            fitted = fit(use, random_table(random, name).schema)
            seen["fewer columns"] += len(fitted.columns) < len(TABLES[name])
            seen["fewer rows"] += fitted.predicate is not None
    assert seen["valid"] > 50
    assert seen["fewer columns"] > 15
    assert seen["fewer rows"] > 8


class _Engine:
    """One connection for all, until a query breaks it."""

    _kept: ClassVar[duckdb.DuckDBPyConnection | None] = None

    def __init__(self) -> None:
        if _Engine._kept is None:
            _Engine._kept = duckdb.connect()
            _Engine._kept.execute("SET TimeZone = 'UTC'; SET threads = 1")
        self._connection = _Engine._kept

    def parsed(self, sql: str, params: list[object]) -> dict[str, RelationUse]:
        return parse(self._connection, sql, params).relations

    def answer(self, sql: str, params: list[object], tables: Mapping[str, pa.Table]) -> Counter[str] | None:
        """None when the engine refuses the query; one that breaks the engine isn't an example of anything."""
        with self._connection.cursor() as cursor:
            for name, table in tables.items():
                cursor.register(name, table)
            try:
                return Counter(map(repr, cursor.execute(sql, params).fetchall()))
            except (duckdb.InternalException, duckdb.FatalException):
                _Engine._kept = None
                reject()
            except duckdb.Error:
                return None


def _less(table: pa.Table, fitted: Fitted) -> pa.Table:
    kept = table
    if fitted.predicate is not None:
        where = Where.of(fitted.predicate)
        kept = pa.Table.from_pylist([row for row in table.to_pylist() if where.matches(row)], table.schema)
        by_arrow = table.filter(where_expression(fitted.predicate, table.schema))
        assert repr(kept.to_pylist()) == repr(by_arrow.to_pylist())
    columns = [
        kept.column(name) if name in fitted.columns else pa.nulls(len(kept), kept.schema.field(name).type)
        for name in kept.schema.names
    ]
    return pa.table(columns, schema=table.schema)


def test_the_grammar_knows_an_arrow_type_for_each_column() -> None:
    assert {kind for columns in TABLES.values() for kind in columns.values()} <= set(ARROW)
