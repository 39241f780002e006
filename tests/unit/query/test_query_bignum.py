"""BIGNUM beside the engine's other numbers: what the engine does wrong, and that an edited statement is right."""

from __future__ import annotations

from collections.abc import Iterator

import duckdb
import pyarrow as pa
import pytest

from tracelake.domain.errors import Invalid
from tracelake.query.engine.bignum import may_be_used, with_exact_casts
from tracelake.query.engine.gate import parse
from tracelake.query.engine.lockdown import without_rewriter
from tracelake.query.engine.messages import RelationUse
from tracelake.tables.wide_integers import WIDE_INTEGER, text_columns, visible_columns

WIDE = 2**200 + 5
TABLE = """
    CREATE VIEW t AS SELECT 'WIDE'::BIGNUM AS v, '-5'::BIGNUM AS s, 5::BIGINT AS i, 7::DECIMAL(38,0) AS d,
                            2.5::DOUBLE AS f, 'x' AS g, ['9'::BIGNUM] AS l, TIMESTAMP '2024-01-01' AS seen
"""
COMPARED = "SELECT i {0} {1}, i {0} -{1} FROM t"
GROUPED = "SELECT {} FROM t GROUP BY ALL"
PARTS = [("v_binary", pa.binary()), ("v_string", pa.string()), ("v_f64", pa.float64())]


@pytest.fixture
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute(TABLE.replace("WIDE", str(WIDE)))
        yield connection


def test_the_engine_still_has_the_faults_that_this_is_about(engine: duckdb.DuckDBPyConnection) -> None:
    """If this fails, the engine has been mended: see which parts of ``bignum`` can go."""
    assert engine.sql("SELECT v::BIGINT, s::UBIGINT FROM t").fetchall() == [(5, 2**64 - 5)]
    assert engine.sql(COMPARED.format("<", WIDE)).fetchall() == [(False, False)]
    with pytest.raises(duckdb.OutOfRangeException):
        engine.sql("SELECT s::HUGEINT FROM t").fetchall()


@pytest.mark.parametrize("order", ["<", ">", "=", "<>"])
def test_without_the_rewriter_a_narrower_column_compares_with_the_whole_number(
    engine: duckdb.DuckDBPyConnection, order: str
) -> None:
    without_rewriter(engine)
    found = engine.sql(COMPARED.format(order, WIDE)).fetchall()
    assert found == [{"<": (True, False), ">": (False, True), "=": (False, False), "<>": (True, True)}[order]]


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("s::HUGEINT", -5),
        ("s::DECIMAL(38,0)::VARCHAR", "-5"),
        ("s::FLOAT", -5.0),
        ("TRY_CAST(v AS BIGINT)", None),
        ("d::BIGNUM::VARCHAR", "7"),
        ("d::BIGNUM::BIGINT", 7),
        ("sum(s)::INT", -5),
        ("sum(s::INT)::INT", -5),
        ("l[1]::INT", 9),
        ("list_transform(l, lambda x: x::INT)", [9]),
        ("(SELECT max(s)::BIGINT FROM t)", -5),
        ("f::INT", 2),
        ("i::TINYINT + epoch(seen)::INT", 1_704_067_205),
        ("i::BIGNUM::VARCHAR", "5"),
    ],
)
def test_a_cast_is_exact(engine: duckdb.DuckDBPyConnection, expression: str, value: object) -> None:
    query = GROUPED.format(expression)
    parse(engine, query)
    assert engine.sql(with_exact_casts(engine, query, ())).fetchall() == [(value,)]


@pytest.mark.parametrize(
    "expression", ["v::BIGINT", "v::HUGEINT", "v::UTINYINT", "s::UBIGINT", "(v + 1)::INT"]
)
def test_a_cast_of_what_does_not_fit_is_an_error(engine: duckdb.DuckDBPyConnection, expression: str) -> None:
    statement = with_exact_casts(engine, GROUPED.format(expression), ())
    with pytest.raises(duckdb.ConversionException):
        engine.sql(statement).fetchall()


def test_a_cast_that_is_grouped_by_stays_one_expression(engine: duckdb.DuckDBPyConnection) -> None:
    query = "SELECT s::INT AS n, count(*) FROM t GROUP BY s::INT HAVING s::INT < 0 ORDER BY s::INT"
    assert engine.sql(with_exact_casts(engine, query, ())).fetchall() == [(-5, 1)]


def test_an_error_of_the_query_is_reported_in_its_own_words(engine: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(duckdb.BinderException, match='"nowhere" not found'):
        with_exact_casts(engine, "SELECT s::INT, nowhere FROM t", ())
    with pytest.raises((duckdb.BinderException, Invalid)):
        with_exact_casts(engine, "SELECT g.nowhere::INT FROM t", ())


def test_a_query_is_only_touched_if_it_may_have_one() -> None:
    tables = {"t": pa.schema([("block_number", pa.int64()), *PARTS])}

    def used(sql: str, *columns: str, params: object = ()) -> bool:
        assert isinstance(params, list | tuple | dict)
        return may_be_used(sql, params, tables, {"t": RelationUse(columns)})

    assert not used(
        "SELECT block_number FROM t WHERE v_string = '5'", "block_number", "v_string", params=[2**64]
    )
    assert used("SELECT V FROM t", "v")
    assert used("SELECT block_number::BigNum FROM t", "block_number")
    assert used(COMPARED.format("<", WIDE), "i")
    assert used("SELECT block_number < ? FROM t", "block_number", params=[WIDE])
    assert used("SELECT list_contains($a, 5)", params={"a": [1, [WIDE]]})
    assert may_be_used("FROM t", (), tables, {"t": RelationUse(None)})


def test_an_integer_in_three_columns_is_one_before_them() -> None:
    stored = pa.schema([("a", pa.int64()), *PARTS])
    assert visible_columns(stored).names == ["a", "v", "v_binary", "v_string", "v_f64"]
    assert visible_columns(stored).field("v").type == WIDE_INTEGER
    assert text_columns(stored) == {"v": "v_string"}
    for other in ([*PARTS, ("V", pa.string())], PARTS[:2], [PARTS[0], ("v_string", pa.int64()), PARTS[2]]):
        schema = pa.schema(other)
        assert visible_columns(schema) == schema, (
            "a column of that name, a part that is missing or another type"
        )
