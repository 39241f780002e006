"""Bytes as ``'0x…'``: found in every part of a query, by the engine's own idea of what is bytes there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import duckdb
import pytest

from tracelake.domain.errors import Forbidden, Invalid
from tracelake.query.engine.gate import parse
from tracelake.query.engine.hex_literals import with_bytes
from tracelake.query.engine.tree_edits import QueryTree, call

TABLE = r"""
    CREATE VIEW t AS SELECT '\xAB\xCD'::BLOB AS h, '0xabcd' AS s, 5 AS i, ['\xAB'::BLOB] AS l
"""
CALLED = """
    SELECT count(*) FILTER (h = '0xabcd') OVER (PARTITION BY i ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) AS n
    FROM t QUALIFY row_number() OVER () = 1
"""


@pytest.fixture
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        connection.execute(TABLE)
        yield connection


def answer(engine: duckdb.DuckDBPyConnection, sql: str, params: Any = ()) -> list[Any]:
    parse(engine, sql, params)
    return engine.sql(with_bytes(engine, sql, params), params=params or None).fetchall()


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1 FROM t WHERE h = '0xabcd'",
        "SELECT 1 FROM t WHERE h = E'0xABCD' AND h = $$0Xabcd$$ AND s = '0xabcd'",
        "SELECT 1 FROM t WHERE h NOT IN ('0x', '0xab') AND h BETWEEN '0xab' AND '0xac'",
        "SELECT CASE h WHEN '0xabcd' THEN 1 END AS n FROM t",
        CALLED,
        "SELECT 1 FROM t a JOIN t b ON a.h = b.h AND '0xabcd' = b.h",
        "SELECT count(*) FROM t GROUP BY GROUPING SETS ((i)) HAVING max(h) = '0xabcd'",
        "SELECT len(list_filter(l, lambda x: x = '0xab')) FROM t",
        "WITH a AS (SELECT h AS x FROM t) SELECT 1 FROM a WHERE x = (SELECT h FROM t WHERE h = '0xabcd')",
        "SELECT 1 FROM t WHERE EXISTS (FROM t u WHERE u.h = t.h AND u.h >= '0xabcd')",
        "SELECT 1 FROM (SELECT s AS h FROM t) WHERE h = '0xabcd'",
        "SELECT 1 FROM t WHERE (h, i) = ('0xabcd', 5) AND ('0xabcd', s) = (h, '0xabcd')",
        "SELECT 1 FROM t WHERE (i, h) IN ((5, '0x'), (5, '0xabcd'))",
        "SELECT 1 FROM t a JOIN t b ON a.s = b.s AND a.h = unhex(substr(b.s, 3)) WHERE a.h = '0xabcd'",
    ],
)
def test_every_comparison_with_bytes_is_one_of_bytes(engine: duckdb.DuckDBPyConnection, sql: str) -> None:
    assert answer(engine, sql) == [(1,)]


def test_parameters_keep_their_places_and_may_be_bytes_and_text_at_once(
    engine: duckdb.DuckDBPyConnection,
) -> None:
    assert answer(engine, "SELECT $2 FROM t WHERE h = $1 AND s = $1", ["0xabcd", 7]) == [(7,)]
    assert answer(engine, "SELECT $n FROM t WHERE $H = h", {"h": "0xabcd", "n": 7}) == [(7,)]
    assert answer(engine, "SELECT 1 FROM t WHERE h IN (?, ?)", ["0x", b"\xab\xcd"]) == [(1,)]
    assert answer(engine, "SELECT h[:0] = ? FROM t", ["0x"]) == [(True,)], "no bytes at all"


def test_a_statement_without_such_a_comparison_is_run_as_it_is_written(
    engine: duckdb.DuckDBPyConnection,
) -> None:
    for sql in (
        "SELECT h FROM t",
        "SELECT '0xabcd' AS x FROM t",
        "select  s='0xabcd'  from t",
        "SELECT 0x10",
    ):
        assert with_bytes(engine, sql, ()) == sql


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT 1 FROM t JOIN (VALUES ('0xabcd')) AS w(x) ON h = x",
        "WITH w AS (SELECT $x AS x) SELECT 1 FROM t, w WHERE x = h",
        "SELECT 1 FROM t WHERE h = if(i = 5, '0xabcd', '0x')",
        "SELECT 1 FROM t WHERE h = (SELECT '0xabcd')",
        "SELECT 1 FROM t WHERE h IN ('0xab', lower('0xABCD'))",
    ],
)
def test_text_beside_bytes_that_is_no_literal_is_an_error_and_not_false(
    engine: duckdb.DuckDBPyConnection, sql: str
) -> None:
    with pytest.raises(Invalid, match="bytes are compared with text"):
        answer(engine, sql, {"x": "0xabcd"} if "$x" in sql else ())


def test_columns_of_text_and_of_bytes_are_never_equal_and_need_a_conversion(
    engine: duckdb.DuckDBPyConnection,
) -> None:
    """DuckDB's own answer where a query has no such literal; docs/query.md warns of it."""
    assert answer(engine, "SELECT h = s, h = unhex(substr(s, 3)) FROM t") == [(False, True)]


def test_errors_are_the_querys_own(engine: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(Invalid, match="odd number of digits"):
        answer(engine, "SELECT 1 FROM t WHERE h = '0xabc'")
    for mistyped in ("0xabcO", "0xab…", "0X ab", "0xabcd\n"):
        with pytest.raises(Invalid, match="isn't hexadecimal"):
            answer(engine, "SELECT 1 FROM t WHERE h = '0x…'".replace("0x…", mistyped))
        with pytest.raises(Invalid, match="isn't hexadecimal"):
            answer(engine, "SELECT 1 FROM t WHERE h = ?", [mistyped])
        assert answer(engine, "SELECT 1 FROM t WHERE s <> ?", [mistyped]) == [(1,)], "text may be anything"
    with pytest.raises(duckdb.BinderException, match='"nowhere" not found'):
        answer(engine, "SELECT nowhere FROM t WHERE h = '0xab'")


def test_an_edit_passes_the_gate_and_is_what_was_meant(engine: duckdb.DuckDBPyConnection) -> None:
    query = QueryTree(engine, "SELECT i FROM t", ())
    tree = query.fresh()
    [column] = tree["statements"][0]["node"]["select_list"]
    tree["statements"][0]["node"]["select_list"] = [call("getenv", column)]
    with pytest.raises(Forbidden, match="getenv"):
        query.statement(tree)
    # The engine drops a key that it doesn't know, and with it what was meant by it.
    other = query.fresh()
    other["statements"][0]["node"]["select_list"][0]["unknown"] = "part"
    with pytest.raises(Invalid, match="as it is written"):
        query.statement(other)
