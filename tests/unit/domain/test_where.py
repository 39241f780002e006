"""``where``: what it accepts, what it refuses, and that it decides rows as a database would."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from decimal import Decimal
from uuid import UUID

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tracelake.domain.errors import Invalid
from tracelake.domain.where import Compare, Op, Where, render
from tracelake.domain.where_parse import MAX_LENGTH, parse_where

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy; how long an example takes proves nothing."""


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("severity = 'critical'", "severity = 'critical'"),
        ("SEVERITY='critical'", "severity = 'critical'"),
        ("'critical' = severity", "severity = 'critical'"),
        ("3 < n", "n > 3"),
        ("b = 2 and a = 1", "a = 1 AND b = 2"),
        ("a = 1 and (b = 2 and a = 1)", "a = 1 AND b = 2"),
        ("a = 1 or b = 2 and c = 3", "a = 1 OR (b = 2 AND c = 3)"),
        ("not (a = 1 or b in (2, 1, 2))", "a <> 1 AND b NOT IN (1, 2)"),
        ("not (a is null and b < 2)", "a IS NOT NULL OR b >= 2"),
        ("not not a is not null", "a IS NOT NULL"),
        ("a in (1)", "a = 1"),
        ("a not in ('x')", "a <> 'x'"),
        ("a = -1.50", "a = -1.5"),
        ("a = 2.0", "a = 2"),
        ("value >= 1e21", "value >= 1000000000000000000000"),
        ("a != b", "a <> b"),
        ("b > a", "a < b"),
        ('"Mixed Case" = true', '"Mixed Case" = TRUE'),
        ('"select" = 1', '"select" = 1'),
        ("who = 'it''s'", "who = 'it''s'"),
        ({"severity": "critical"}, "severity = 'critical'"),
        ({"severity": ["b", "a"], "n": 3}, "n = 3 AND severity IN ('a', 'b')"),
        ({"gone": None, "live": True}, "gone IS NULL AND live = TRUE"),
    ],
)
def test_predicates_have_one_canonical_text(source: object, text: str) -> None:
    where = parse_where(source)
    assert where.text == text
    assert parse_where(where.text) == where


@pytest.mark.parametrize(
    "source",
    [
        "lower(a) = 'x'",
        "a::int = 1",
        "cast(a as int) = 1",
        "a = date '2020-01-01'",
        "a in (select 1)",
        "exists (select 1)",
        "a = (select 1)",
        "a = any(array[1])",
        "a = $1",
        "a = ?",
        "a = :p",
        "@a = 1",
        "t.a = 1",
        "s.t.a = 1",
        "a = 1 -- and b = 2",
        "a = 1 /* x */",
        "/* x */ a = 1",
        "a = 1; drop table t",
        "a = 1; b = 2",
        "a = 1;",
        "select 1",
        "drop table t",
        "a",
        "true",
        "1 = 1",
        "a = null",
        "a in (null)",
        "a in (b)",
        "a in ()",
        "a is true",
        "a like 'x%'",
        "a between 1 and 2",
        "a + 1 = 2",
        "a = 'x' || 'y'",
        "a = 'x' 'y'",
        "a = 1 as b",
        "a = E'\\n'",
        "a = x'10'",
        "a = $$x$$",
        "a = interval '1 day'",
        "a is distinct from 1",
        "(a, b) = (1, 2)",
        "* = 1",
        "case when a = 1 then true end",
        "current_user = 'x'",
        "a = -'x'",
        "a = 1e400",
        "a = 1e999999999",
        f"a = {'9' * 79}",
        "a = 'x",
        "a[:] = 1",
        "a[1] = 1",
        "if = 1",
        "a = ",
        "",
        "   ",
        "a = '\0'",
        "(" * 40 + "a = 1" + ")" * 40,
        "not " * 40 + "a = 1",
        "a = " + "- " * 5000 + "1",
        "a = 1" + " " * MAX_LENGTH,
        " and ".join(["a = 1"] * 1000),
        {},
        {"a": []},
        {"a": {"b": 1}},
        {"a": [None]},
        {"a": float("nan")},
        {1: 2},
        None,
        7,
    ],
)
def test_anything_but_comparisons_is_refused(source: object) -> None:
    with pytest.raises(Invalid) as refused:
        parse_where(source)
    assert refused.value.reason == "InvalidWhere"


@pytest.mark.parametrize(
    "text", ["payload->>'x' = 'y'", "payload #> '{x}' = 'y'", "payload['x'] = 'y'", "p.x = 1"]
)
def test_a_look_into_a_value_is_refused_with_the_way_out(text: str) -> None:
    with pytest.raises(Invalid, match="a column of its own"):
        parse_where(text)


def test_sql_quotes_identifiers_and_escapes_literals() -> None:
    where = parse_where({'a"b': "x' OR 1=1 --", "user": 1})
    assert render(where.tree, quote_all=True) == """"a""b" = 'x'' OR 1=1 --' AND "user" = 1"""


@pytest.mark.parametrize(
    "column", ["if", "while", "select", "not", "user", "date", "interval", "case", "é", 'q"']
)
def test_a_column_with_a_name_that_means_something_is_quoted_where_it_must_be(column: str) -> None:
    for where in (parse_where({column: 1}), parse_where({column: None, "a": [1, 2]})):
        assert parse_where(where.text) == where


def test_a_long_chain_does_not_exhaust_the_stack() -> None:
    text = " OR ".join(f"n = {i}" for i in range(400))
    assert parse_where(text).matches({"n": 399})


@pytest.mark.parametrize(
    ("text", "row", "kept"),
    [
        ("a = 1", {}, False),
        ("a <> 1", {"a": None}, False),
        ("a is null", {}, True),
        ("a not in (1, 2)", {"a": None}, False),
        ("a = 1 or b is null", {"a": None}, True),
        ("a = 'x'", {"a": 1}, False),
        ("a <> 'x'", {"a": 1}, False),
        ("a = true", {"a": 1}, False),
        ("a = 0.1", {"a": Decimal("0.1")}, True),
        ("a > 1e70", {"a": Decimal(10) ** 77}, True),
        ("a > 1000", {"a": float("nan")}, True),
        ("a >= '2026-01-01T00:00:00Z'", {"a": datetime(2026, 1, 2, tzinfo=UTC)}, True),
        ("a = 'soon'", {"a": datetime(2026, 1, 2, tzinfo=UTC)}, False),
        ("a = '1'", {"a": 1}, True),
        ("a <> '1'", {"a": 2}, True),
        ("a <> 'abc'", {"a": 2}, False),
        ("a = '1.0'", {"a": 1}, False),
        ("a = '1.0'", {"a": Decimal(1)}, True),
        ("a = '1e0'", {"a": 1.0}, True),
        ("a = 'NaN'", {"a": float("nan")}, True),
        ("a < 'Infinity'", {"a": Decimal(10) ** 77}, True),
        ("a = 'yes'", {"a": True}, True),
        ("a = '1'", {"a": True}, True),
        ("a in ('2', 'x')", {"a": 2}, True),
        ("a not in ('2', 'x')", {"a": 3}, False),
        ("a = 1", {"a": "1"}, False),
        ("a = b", {"a": "1", "b": 1}, False),
        ("a = b", {"a": "2026-01-02", "b": datetime(2026, 1, 2, tzinfo=UTC)}, False),
        ("a = '\\x0aff'", {"a": b"\x0a\xff"}, True),
        ("a = '00000000-0000-0000-0000-00000000000A'", {"a": UUID(int=10)}, True),
        ("a < b", {"a": 1, "b": 2}, True),
        ("a < b", {"a": 1, "b": None}, False),
    ],
)
def test_rows_are_kept_as_sql_would(text: str, row: dict[str, object], kept: bool) -> None:
    assert parse_where(text).matches(row) is kept


_numbers = st.integers(-3, 3) | st.sampled_from([0.5, -1.5, 2.25])
_strings = st.text("ab'é\"-", max_size=3)
_rows = st.fixed_dictionaries(
    {
        "n": st.none() | _numbers,
        "m": st.none() | _numbers,
        "s": st.none() | _strings,
        "b": st.none() | st.booleans(),
    }
)


def _quoted(value: object) -> str:
    return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)


_ops = st.sampled_from(["=", "<>", "!=", "<", "<=", ">", ">="])
_leaves = st.one_of(
    st.tuples(st.sampled_from("nm"), _ops, _numbers.map(_quoted)).map(" ".join),
    st.tuples(_numbers.map(_quoted), _ops, st.sampled_from("nm")).map(" ".join),
    st.tuples(st.just("s"), _ops, _strings.map(_quoted)).map(" ".join),
    st.tuples(st.just("b"), st.sampled_from(["=", "<>"]), st.sampled_from(["TRUE", "false"])).map(" ".join),
    st.tuples(st.sampled_from(["n", "m"]), _ops, st.sampled_from(["n", "m"])).map(" ".join),
    st.tuples(st.sampled_from("nmsb"), st.sampled_from(["IS NULL", "is not null"])).map(" ".join),
    st.tuples(
        st.sampled_from(["n IN ", "m not in "]),
        st.lists(_numbers.map(_quoted), min_size=1, max_size=4).map(lambda found: f"({', '.join(found)})"),
    ).map("".join),
    st.tuples(
        st.sampled_from(["s IN ", "s NOT IN "]),
        st.lists(_strings.map(_quoted), min_size=1, max_size=3).map(lambda found: f"({', '.join(found)})"),
    ).map("".join),
)
_texts = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        inner.map(lambda text: f"NOT ({text})"),
        inner.map(lambda text: f"({text})"),
        st.tuples(inner, st.sampled_from(["AND", "OR", "and"]), inner).map(" ".join),
    ),
    max_leaves=6,
)


def _database_keeps(predicate: str, row: dict[str, object]) -> bool:
    query = "WITH r(n, m, s, b) AS (VALUES (?, ?, ?, ?)) SELECT count(*) FROM r WHERE {}".replace(
        "{}", predicate
    )
    connection = sqlite3.connect(":memory:")
    try:
        return bool(connection.execute(query, [row[name] for name in "nmsb"]).fetchone()[0])
    finally:
        connection.close()


@unhurried
@given(_texts)
def test_text_and_tree_and_json_round_trip(text: str) -> None:
    where = parse_where(text)
    assert parse_where(where.text) == where
    assert parse_where(render(where.tree, quote_all=True)) == where
    assert msgspec.json.decode(msgspec.json.encode(where), type=Where) == where


@unhurried
@given(_texts, _rows)
def test_a_row_is_kept_exactly_when_a_database_keeps_it(text: str, row: dict[str, object]) -> None:
    where = parse_where(text)
    assert (
        where.matches(row)
        == _database_keeps(text, row)
        == _database_keeps(render(where.tree, quote_all=True), row)
    )


@unhurried
@given(st.text(max_size=60) | st.text("anot ()'=<>1,.;-/*$:@\"[]{}", max_size=60))
def test_arbitrary_text_is_parsed_or_refused(text: str) -> None:
    try:
        where = parse_where(text)
    except Invalid:
        return
    assert parse_where(where.text) == where


@unhurried
@given(st.text(min_size=1, max_size=10).filter(lambda name: "\0" not in name), st.text(max_size=10))
def test_any_column_and_literal_survive_rendering(column: str, value: str) -> None:
    if "\0" in value:
        return
    where = Where.of(Compare(column, Op.EQ, value))
    assert parse_where(where.text) == where
