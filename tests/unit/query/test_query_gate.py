"""The gate: what it lets through, what it refuses and in which words, and that it knows every part of a tree."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import duckdb
import orjson
import pytest

from tests.support.query_attacks import Attack, others, refused_at_the_root, refused_in_disguise
from tracelake.contracts.query_api import from_wire, to_wire
from tracelake.domain.errors import Forbidden, Invalid, TracelakeError
from tracelake.query.engine.gate import SERIALIZE, examine, parse
from tracelake.query.engine.gate_functions import BARE, FUNCTIONS, TABLE_FUNCTIONS, TYPES, VOLATILE
from tracelake.query.engine.messages import ParsedQuery, RelationUse

ACCEPTED = [
    ("SELECT 1", set()),
    ("SELECT a FROM events", {"events"}),
    ("FROM Events", {"events"}),
    ("TABLE events", {"events"}),
    ('SELECT "A" FROM "EVENTS" AS e', {"events"}),
    ("SELECT * FROM events e JOIN blocks b USING (number) LEFT JOIN events f ON e.a = f.a", {"events", "blocks"}),
    ("SELECT * FROM a, b NATURAL JOIN c ASOF JOIN d ON a.x >= d.x POSITIONAL JOIN e", {"a", "b", "c", "d", "e"}),
    ("SELECT * FROM a SEMI JOIN b ON a.x = b.x ANTI JOIN c USING (x)", {"a", "b", "c"}),
    ("WITH x AS (SELECT * FROM events), y(n) AS MATERIALIZED (FROM x) SELECT * FROM y", {"events"}),
    ("WITH events AS (SELECT * FROM events) SELECT * FROM events", {"events"}),
    ("WITH RECURSIVE x AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM x WHERE n < 9) FROM x", set()),
    ("WITH RECURSIVE t AS (SELECT a FROM t UNION SELECT a FROM t) SELECT * FROM t", {"t"}),
    ("WITH a AS (SELECT * FROM b), b AS (SELECT 1) SELECT * FROM a", {"b"}),
    ("SELECT (SELECT max(a) FROM x), EXISTS (FROM y), 1 IN (SELECT a FROM z)", {"x", "y", "z"}),
    ("SELECT a FROM x UNION ALL SELECT b FROM y EXCEPT SELECT c FROM z ORDER BY 1 LIMIT 5", {"x", "y", "z"}),
    ("SELECT * FROM events, LATERAL (SELECT events.a + 1) l, unnest([1, 2]) u, range(3) r", {"events"}),
    ("VALUES (1, 'a'), (2, 'b')", set()),
    ("SELECT a, row_number() OVER (PARTITION BY b ORDER BY c DESC NULLS LAST) FROM t QUALIFY 1 = 1", {"t"}),
    ("SELECT sum(a) OVER w FROM t WINDOW w AS (ORDER BY b ROWS BETWEEN 1 PRECEDING AND CURRENT ROW)", {"t"}),
    ("SELECT count(*) FILTER (WHERE a > 1), string_agg(b, ',' ORDER BY a) FROM t GROUP BY ALL", {"t"}),
    ("SELECT a, grouping(a) FROM t GROUP BY ROLLUP (a), CUBE (b) HAVING count(*) > 1", {"t"}),
    ("SELECT DISTINCT ON (a) * EXCLUDE (b) REPLACE (c + 1 AS c) FROM t ORDER BY ALL", {"t"}),
    ("SELECT COLUMNS('a.*'), COLUMNS(c -> c LIKE 'b%') FROM t", {"t"}),
    ("SELECT list_transform([1], lambda x: x + 1), [y FOR y IN [1, 2] IF y > 1], {'a': 1}.a, MAP {'k': 2}", set()),
    ("SELECT data->'$.a', data->>'$.b', json_extract(data, '$.c') FROM t", {"t"}),
    ("SELECT CAST(a AS DECIMAL(38, 0)), TRY_CAST(b AS STRUCT(x INT, y VARCHAR[])), c::TIMESTAMPTZ FROM t", {"t"}),
    ("SELECT hex(hash), unhex('00'), x'00ff', '\\xAB'::BLOB FROM t", {"t"}),
    ("SELECT date_trunc('hour', b), b AT TIME ZONE 'UTC', now() - INTERVAL 1 DAY FROM t", {"t"}),
    ("SELECT a LIKE 'x%' AND b ~ 'y' AND c SIMILAR TO 'z' AND d NOT ILIKE 'w' FROM t", {"t"}),
    ("SELECT CASE WHEN a THEN 1 END, coalesce(a, b), nullif(a, 1), a IS DISTINCT FROM b, TRY(a) FROM t", {"t"}),
    ("SELECT * FROM t TABLESAMPLE 10% (bernoulli)", {"t"}),
    ("SELECT a COLLATE nocase FROM t ORDER BY a COLLATE noaccent.nocase", {"t"}),
    ("SELECT user, \"current_setting\" FROM t", {"t"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as connection:
        yield connection


@pytest.mark.parametrize(("sql", "relations"), ACCEPTED)
def test_what_analysts_write_is_let_through(
    engine: duckdb.DuckDBPyConnection, sql: str, relations: set[str]
) -> None:
    assert set(parse(engine, sql).relations) == relations


@pytest.mark.parametrize(
    ("sql", "words"),
    [
        ("SELECT * FROM read_csv('x')", "table function 'read_csv'"),
        ("SELECT * FROM '/etc/passwd'", "files and URLs"),
        ("SELECT getenv('HOME')", "function 'getenv'"),
        ("SELECT * FROM main.events", "a catalog or schema"),
        ("SELECT main.lower('x')", "function 'main.lower'"),
        ("SELECT * FROM sqlite_master", "engine's own table"),
        ("WITH pg_class AS (SELECT 1) SELECT * FROM pg_class", "engine's own table"),
        ("WITH pg_x AS (SELECT 1) SELECT 1", "a CTE of the name"),
        ("DESCRIBE events", "SHOW, DESCRIBE or SUMMARIZE"),
        ("SELECT 1::ENUM('a')", "type 'ENUM'"),
        ("SELECT 1; SELECT 2", "2 statements"),
        ("", "0 statements"),
        ("SET threads = 1", "other statements and commands"),
        ("SELECT * FROM events AT (VERSION => 1)", "AT (VERSION or TIMESTAMP)"),
        ("SELECT * FROM t PIVOT (sum(x) FOR y IN (1, 2))", "PIVOT"),
        ("WITH x AS (DELETE FROM t RETURNING *) FROM x", "a statement of the kind"),
        ("SELECT 'a' COLLATE de", "collation 'de'"),
        ("SELECT * FROM еvents", "\\u0435vents"),
    ],
)
def test_a_refusal_names_what_is_not_allowed(engine: duckdb.DuckDBPyConnection, sql: str, words: str) -> None:
    with pytest.raises(Forbidden) as caught:
        parse(engine, sql)
    assert caught.value.reason == "QueryRefused"
    assert words.lower() in caught.value.message.lower()


@pytest.mark.parametrize("sql", ["SELEC 1", "SELECT * FROM", "SELECT $1, ?, $name", "SELECT 'a\0b'"])
def test_bad_syntax_is_told_from_a_refusal(engine: duckdb.DuckDBPyConnection, sql: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse(engine, sql)
    assert caught.value.reason == "SqlSyntax"


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT " + "(" * 5000 + "1" + ")" * 5000,
        "SELECT 1" + " + 1" * 900,
        "SELECT " + "[" * 400 + "]" * 400,
        "SELECT * FROM " + "(SELECT * FROM " * 300 + "t" + ")" * 300,
        "SELECT * FROM t" + " JOIN t USING (a)" * 900,
        "SELECT " + "(a AND (b OR " * 400 + "c" + "))" * 400,
    ],
)
def test_deep_nesting_is_refused_by_name(engine: duckdb.DuckDBPyConnection, sql: str) -> None:
    with pytest.raises(Invalid) as caught:
        parse(engine, sql)
    assert caught.value.reason == "QueryTooDeep"


def test_long_and_flat_is_not_deep(engine: duckdb.DuckDBPyConnection) -> None:
    conditions = " OR ".join(f"a = {n}" for n in range(3000))
    sql = " ".join(("SELECT a FROM t WHERE", conditions))
    assert parse(engine, sql).relations == {"t": RelationUse(("a",), None)}


def test_parameters_are_listed_in_their_order(engine: duckdb.DuckDBPyConnection) -> None:
    assert parse(engine, "SELECT ?, (SELECT max(a) FROM t WHERE a < ?), ?").parameters == ("1", "2", "3")
    assert parse(engine, "SELECT $1, $2, $1").parameters == ("1", "2")
    assert set(parse(engine, "SELECT $low, $high").parameters) == {"low", "high"}
    assert parse(engine, "SELECT 1").parameters == ()


def test_parameters_are_found_as_the_engine_finds_them(engine: duckdb.DuckDBPyConnection) -> None:
    """It makes no difference between upper and lower case; two names that differ by nothing else are refused."""
    use = parse(engine, "SELECT a FROM t WHERE a = $Low", {"low": 5}).relations["t"]
    assert use == parse(engine, "SELECT a FROM t WHERE a = 5").relations["t"]
    with pytest.raises(Invalid, match="upper and lower case"):
        from_wire({"low": 5, "LOW": 6})


@pytest.mark.parametrize("levels", [40, 500, 900])
def test_lists_within_lists_have_an_end(levels: int) -> None:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    for read in (from_wire, to_wire):
        with pytest.raises(Invalid, match="nested more than 32 levels deep"):
            read([value])
    assert from_wire([[[1]]]) == [[[1]]]


def test_what_was_found_survives_the_way_from_the_slot(engine: duckdb.DuckDBPyConnection) -> None:
    found = parse(
        engine, "SELECT a FROM t, u WHERE t.b IN (1, 2) AND t.c > 'x' OR t.a IS NULL AND t.b = $1", [True]
    )
    assert found.relations["t"].predicate is not None
    assert ParsedQuery.from_json(found.to_json()) == found


@pytest.mark.parametrize(
    "context",
    [
        "WITH {f} AS (SELECT 1 AS x) SELECT {call}",
        "WITH RECURSIVE {f} AS (SELECT {call} AS x UNION ALL SELECT x FROM {f}) SELECT * FROM {f}",
        "SELECT {call} FROM events AS {f}",
        "SELECT {call} FROM (SELECT 1 AS {f}) AS t",
        "SELECT {call} FROM {f}",
        "SELECT {call} FROM events AS t({f})",
        "SELECT 1 AS {f}, {call}",
        "SELECT list_transform([1], lambda {f}: {call})",
        "SELECT list_transform(['a'], {f})[1], {call}",
        "SELECT struct_pack({f} := {call})",
        "SELECT ${f}, {call}",
        "SELECT count(*) OVER {f}, {call} FROM events WINDOW {f} AS (ORDER BY id)",
        "SELECT ('a').{f}()",
        "SELECT ['a'].list_transform(lambda x: x.{f}())",
        "SELECT * FROM events e, LATERAL (SELECT {call} AS {f}) AS {f}",
        "SELECT CAST(1 AS STRUCT({f} INT)).{f}, {call}",
    ],
)
@pytest.mark.parametrize("function", ["getenv", "current_setting", "read_text", "nextval", "current_schema"])
def test_no_name_of_something_else_makes_a_function_allowed(
    engine: duckdb.DuckDBPyConnection, context: str, function: str
) -> None:
    with pytest.raises(Forbidden, match="function"):
        parse(engine, context.format(f=function, call=f"{function}('a')"))


def test_no_bare_name_is_a_function_that_is_not_allowed(engine: duckdb.DuckDBPyConnection) -> None:
    """The engine takes some names for calls where no column has them."""
    names = _column(engine, "SELECT function_name FROM duckdb_functions()")
    names |= _column(engine, "SELECT keyword_name FROM duckdb_keywords()")
    found = set()
    for name in names | set(BARE) | {"system_user", "current_path"}:
        try:
            kind = engine.sql(f'SELECT "{name}"').types
        except duckdb.Error:
            continue
        assert kind
        found.add(name)
        try:
            parse(engine, f"SELECT {name}")
            assert name == "user" or BARE[name] in FUNCTIONS, name
        except Forbidden:
            assert parse(engine, f"FROM t SELECT t.{name}").relations.keys() == {"t"}, name
    assert found == {*BARE, "user"}


def test_every_hostile_piece_is_refused(engine: duckdb.DuckDBPyConnection) -> None:
    assert [attack for attack in refused_at_the_root() if not _refused(engine, attack)] == []


def test_hostile_pieces_are_refused_wherever_they_hide(engine: duckdb.DuckDBPyConnection) -> None:
    assert [attack for attack in refused_in_disguise(every=4) if not _refused(engine, attack)] == []


def test_queries_that_only_ask_for_too_much_pass_or_are_too_deep(engine: duckdb.DuckDBPyConnection) -> None:
    """So that the limits of the slots, which the corpus is about, are what stops them."""
    assert {_reason(engine, attack) for attack in others()} == {None, "QueryTooDeep"}


def _reason(engine: duckdb.DuckDBPyConnection, attack: Attack) -> str | None:
    try:
        parse(engine, attack.rendered(file="/nowhere/secret.csv", env="A_SECRET"), attack.params)
    except TracelakeError as error:
        return error.reason
    return None


def _refused(engine: duckdb.DuckDBPyConnection, attack: Attack) -> bool:
    return _reason(engine, attack) in ("QueryRefused", "SqlSyntax")


def _tree(engine: duckdb.DuckDBPyConnection, sql: str) -> Any:
    row = engine.execute(SERIALIZE, [sql]).fetchone()
    assert row is not None
    return orjson.loads(row[0])


def _objects(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _objects(item)


@pytest.mark.parametrize("sql", [sql for sql, _ in ACCEPTED])
def test_nothing_unknown_in_a_tree_is_passed_over(engine: duckdb.DuckDBPyConnection, sql: str) -> None:
    """A key that nobody knows, at any place; a kind that nobody knows, of any node; a node where text belongs."""
    tree = _tree(engine, sql)
    for index, original in enumerate(_objects(tree["statements"][0])):
        changes: list[dict[str, Any]] = [{"another_key": None}]
        if "class" in original:
            changes += [{"class": "NEWS"}, {"type": "NEWS"}, {"alias": {"class": "FUNCTION"}}]
        elif original.get("type") in (
            "SELECT_NODE",
            "SET_OPERATION_NODE",
            "BASE_TABLE",
            "JOIN",
            "LIMIT_MODIFIER",
        ):
            changes += [{"type": "NEWS"}, {"type": {"type": "SELECT_NODE"}}]
        for change in changes:
            changed = copy.deepcopy(tree)
            next(node for at, node in enumerate(_objects(changed["statements"][0])) if at == index).update(
                change
            )
            with pytest.raises(Forbidden):
                examine(changed)


def test_a_tree_with_its_defaults_spelled_out_is_refused(engine: duckdb.DuckDBPyConnection) -> None:
    """The shapes rely on defaults being left out; a tree made otherwise isn't half understood."""
    row = engine.execute("SELECT json_serialize_sql('SELECT a FROM t')").fetchone()
    assert row is not None
    with pytest.raises(Forbidden):
        examine(orjson.loads(row[0]))


def test_every_allowed_function_and_type_exists_in_the_engine(engine: duckdb.DuckDBPyConnection) -> None:
    functions = _column(engine, "SELECT DISTINCT function_name FROM duckdb_functions()")
    assert functions >= FUNCTIONS | TABLE_FUNCTIONS
    types = _column(engine, "SELECT lower(type_name) FROM duckdb_types()")
    assert types | {"double precision"} >= TYPES


def test_no_allowed_function_has_side_effects_or_looks_at_the_session(
    engine: duckdb.DuckDBPyConnection,
) -> None:
    unsteady = _column(
        engine,
        "SELECT function_name FROM duckdb_functions() WHERE has_side_effects OR stability <> 'CONSISTENT'",
    )
    assert FUNCTIONS & unsteady <= VOLATILE
    dangerous = _column(
        engine,
        """
        SELECT function_name FROM duckdb_functions()
        WHERE function_type IN ('pragma', 'table', 'table_macro')
           OR regexp_matches(
               function_name,
               '^(__|pg_|duckdb_|pragma_|read_|parquet_|has_|inet_|current_(sch|set|dat[^e]|cat|rol|use|que|con|tra))'
           )
           OR regexp_matches(function_name, 'secret|env|setting|variable|sleep|log_|serialize|nextval|version|oid')
        """,
    )
    also_scalar_or_aggregate = {"histogram", "repeat", *TABLE_FUNCTIONS}
    assert FUNCTIONS & dangerous <= also_scalar_or_aggregate | {"uuid_extract_version"}
    assert not FUNCTIONS & {"getenv", "error", "assert_true", "write_log", "stats", "query", "glob", "invoke"}


def test_the_engine_s_own_tables_are_out_of_reach_by_name(engine: duckdb.DuckDBPyConnection) -> None:
    views = _column(
        engine,
        "SELECT view_name FROM duckdb_views() WHERE schema_name IN ('main', 'pg_catalog') AND internal",
    )
    assert len(views) > 10
    for view in views:
        with pytest.raises(Forbidden):
            parse(engine, " ".join(("FROM", view)))


def _column(engine: duckdb.DuckDBPyConnection, sql: str) -> set[str]:
    return {row[0] for row in engine.execute(sql).fetchall()}
