"""Hostile queries as data: each kind of attack, the places where it can hide, and the expected outcome.

``refused``: the gate refuses it. ``unresolved``: nothing is wrong with the SQL, but no such relation exists,
and the engine must not find one by itself. ``limited``: allowed SQL that asks for too much; it may be answered,
fail or be killed, within its limits. ``@FILE@`` stands for a file that exists and holds a secret, ``@ENV@`` for
the name of an environment variable that holds another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Literal, TypeAlias

End: TypeAlias = Literal["refused", "unresolved", "limited"]


@dataclass(frozen=True, slots=True)
class Attack:
    kind: str
    sql: str
    end: End = "refused"
    params: Sequence[str] = ()

    def rendered(self, *, file: str, env: str) -> str:
        return self.sql.replace("@FILE@", file).replace("@ENV@", env)


RELATIONS: dict[str, tuple[str, ...]] = {
    "file": (
        "'@FILE@'",
        '"@FILE@"',
        "'@FILE@*'",
        '"/etc/passwd"',
        "'/proc/self/environ'",
        "'/proc/self/fd/0'",
        '"../../etc/passwd"',
        "'secret.csv'",
        '"secret.parquet"',
        "'secret.json'",
        "'other.db'",
        "'data.csv.gz'",
        "$$@FILE@$$",
        "$tag$/etc/passwd$tag$",
    ),
    "url": (
        "'http://127.0.0.1:9/x.parquet'",
        "'https://localhost/x.csv'",
        "'s3://bucket/key.parquet'",
        "'gcs://bucket/key'",
        "'hf://datasets/x'",
        '"file:///etc/passwd"',
        "'azure://container/blob.parquet'",
    ),
    "read_": (
        "read_csv('@FILE@')",
        "read_csv_auto('@FILE@', header = false)",
        "READ_TEXT('@FILE@')",
        'read_blob("@FILE@")',
        "read_parquet(['@FILE@'])",
        "read_json('@FILE@')",
        "read_json_objects('@FILE@')",
        "read_ndjson('@FILE@')",
        "read_duckdb('@FILE@')",
        "parquet_scan('@FILE@')",
        "parquet_metadata('@FILE@')",
        "parquet_kv_metadata('@FILE@')",
        "sniff_csv('@FILE@')",
        "system.main.read_text($1)",
        '"read_text"(chr(47) || $$etc/passwd$$)',
        "main.read_text('@FILE@')",
        "read_text((SELECT '@FILE@'))",
    ),
    "glob": ("glob('/etc/*')", "glob('@FILE@')", '"glob"($1)'),
    "settings": ("duckdb_settings()", "duckdb_settings", "pragma_version()", "pragma_user_agent()"),
    "secrets": (
        "duckdb_secrets()",
        "duckdb_secrets",
        "which_secret('s3://b/x', 's3')",
        "duckdb_secret_types()",
    ),
    "catalog": (
        "information_schema.tables",
        "pg_catalog.pg_class",
        "pg_class",
        "pg_tables",
        "sqlite_master",
        "SQLITE_MASTER",
        "sqlite_schema",
        "duckdb_tables()",
        "duckdb_views",
        "duckdb_functions()",
        "duckdb_databases()",
        "duckdb_extensions()",
        "duckdb_logs",
        "duckdb_temporary_files()",
        "duckdb_external_file_cache()",
        "duckdb_prepared_statements()",
        "pragma_database_list",
        "pragma_table_info('events')",
        "pragma_storage_info('events')",
        "memory.main.events",
        "main.events",
        "temp.events",
        '"memory"."main"."events"',
    ),
    "sql in text": (
        "query('SELECT 1')",
        "query($1)",
        "query_table('events')",
        "query_table(['events', '@FILE@'])",
        "json_execute_serialized_sql(json_serialize_sql('SELECT 1'))",
    ),
    "engine": (
        "arrow_scan(1, 2, 3)",
        "pandas_scan(1)",
        "python_map_function(1)",
        "seq_scan('events')",
        "checkpoint('memory')",
        "force_checkpoint()",
        "enable_logging()",
        "enable_profiling()",
        "repeat_row(1, num_rows = 10)",
        "test_all_types()",
        "register_external_resource('a', 'b')",
        "icu_calendar_names()",
        "json_each('{}')",
    ),
    "description": ("(DESCRIBE events)", "(SHOW TABLES)", "(SHOW ALL TABLES)", "(SUMMARIZE events)"),
    "homoglyph": (
        "еvents",
        "ｅｖｅｎｔｓ",
        '"events\u200b"',
        '"events "',
        '"évents"',
        '"events\u202e"',
        "ｒｅａｄ＿ｔｅｘｔ('x')",
    ),
    "parameter": ("$1", "?", "identifier($1)", "table($1)"),
    "time travel": ("events AT (VERSION => 1)", "events AT (TIMESTAMP => now())"),
}

SCALARS: dict[str, tuple[str, ...]] = {
    "getenv": (
        "getenv('@ENV@')",
        "GETENV('@ENV@')",
        '"getenv"($1)',
        "system.main.getenv('@ENV@')",
        "'@ENV@'.getenv()",
    ),
    "setting": (
        "current_setting('secret_directory')",
        "current_setting('home_directory')",
        "main.current_setting('temp_directory')",
        "setseed(0.5)",
    ),
    "session": (
        "current_database()",
        "current_schema()",
        "current_schemas(true)",
        "current_query()",
        "current_connection_id()",
        "current_transaction_id()",
        "txid_current()",
        "version()",
        "in_search_path('memory', 'main')",
        "pg_my_temp_schema()",
        "pg_typeof(1)",
        "pg_get_viewdef(1)",
        "inet_server_addr()",
        "has_table_privilege('events', 'SELECT')",
        "obj_description(1)",
    ),
    "variable": ("getvariable('x')", "nextval('s')", "currval('s')", "setval('s', 1)"),
    "effect": (
        "write_log('x')",
        "error('x')",
        "assert_true(false)",
        "sleep_ms(60000)",
        "pg_sleep(60)",
        "stats(1)",
        "parse_duckdb_log_message('x', 'y')",
    ),
    "sql in text": (
        "json_serialize_sql('SELECT 1')",
        "json_serialize_plan('SELECT * FROM ''@FILE@''')",
        "json_deserialize_sql('{}')",
        "invoke(1)",
    ),
    "types": (
        "make_type('INTEGER')",
        "cast_to_type(1, 'x')",
        "CAST('a' AS ENUM('a'))",
        "1::other_type",
        "1::memory.main.other",
        "try_cast('x' AS geometry)",
        "'events'::oid",
        "'a' COLLATE zz_unknown",
    ),
    "internal": (
        "__internal_barrier(1)",
        "to_aggregate_state(1)",
        "vector_type(1)",
        "icu_sort_key('a', 'b')",
    ),
    "file": ("read_text('@FILE@')", "read_blob('@FILE@')", "glob('@FILE@')", "st_geomfromwkb('\\x00')"),
    "homoglyph": ("gеtenv('@ENV@')", "ｇetenv('@ENV@')", "\"getenv\u200b\"('@ENV@')"),
}

STATEMENTS: dict[str, tuple[str, ...]] = {
    "ATTACH": (
        "ATTACH '@FILE@' AS x",
        "ATTACH IF NOT EXISTS ':memory:' AS y (READ_ONLY)",
        "DETACH memory",
        "USE memory",
    ),
    "COPY": (
        "COPY (SELECT 1) TO '@FILE@'",
        "COPY events TO '/dev/stdout'",
        "COPY events FROM '@FILE@'",
        "COPY (SELECT * FROM '@FILE@') TO '/tmp/x' (FORMAT parquet)",
        "COPY FROM DATABASE memory TO y",
    ),
    "EXPORT": ("EXPORT DATABASE '/tmp/x'", "IMPORT DATABASE '/tmp/x'"),
    "INSTALL": ("INSTALL httpfs", "FORCE INSTALL httpfs FROM 'http://127.0.0.1:9'", "UPDATE EXTENSIONS"),
    "LOAD": ("LOAD httpfs", "LOAD '@FILE@'"),
    "PRAGMA": (
        "PRAGMA database_list",
        "PRAGMA table_info('events')",
        "PRAGMA enable_profiling",
        "PRAGMA version",
    ),
    "SET": (
        "SET enable_external_access = true",
        "SET GLOBAL memory_limit = '64GB'",
        "RESET lock_configuration",
        "SET VARIABLE x = (SELECT 1)",
        "SET lock_configuration = false",
        "RESET ALL",
    ),
    "macro": (
        "CREATE MACRO f(x) AS getenv(x)",
        "CREATE OR REPLACE TEMP MACRO g() AS TABLE SELECT * FROM '@FILE@'",
        "CREATE FUNCTION h() AS 1",
        "DROP MACRO f",
    ),
    "CHECKPOINT": ("CHECKPOINT", "FORCE CHECKPOINT memory", "VACUUM", "ANALYZE"),
    "secret": (
        "CREATE SECRET s (TYPE s3, KEY_ID 'a', SECRET 'b')",
        "DROP SECRET s",
        "CREATE PERSISTENT SECRET (TYPE s3)",
    ),
    "CALL": ("CALL duckdb_settings()", "CALL pragma_version()", "CALL enable_logging()", "CALL checkpoint()"),
    "PREPARE": ("PREPARE v AS SELECT * FROM '@FILE@'", "EXECUTE v", "DEALLOCATE v"),
    "write": (
        "INSERT INTO events VALUES (1)",
        "UPDATE events SET id = 1",
        "DELETE FROM events",
        "TRUNCATE events",
        "CREATE TABLE x AS SELECT * FROM '@FILE@'",
        "CREATE VIEW v AS FROM '@FILE@'",
        "DROP VIEW events",
        "ALTER TABLE events ADD COLUMN x INT",
        "CREATE TYPE t AS ENUM (SELECT 'a')",
        "CREATE SEQUENCE s",
        "CREATE SCHEMA s",
        "CREATE INDEX i ON events (id)",
        "MERGE INTO events USING events e ON true WHEN MATCHED THEN DELETE",
        "COMMENT ON VIEW events IS 'x'",
    ),
    "transaction": ("BEGIN", "COMMIT", "ROLLBACK"),
    "EXPLAIN": (
        "EXPLAIN SELECT 1",
        "EXPLAIN ANALYZE SELECT * FROM events",
        "EXPLAIN (FORMAT json) FROM events",
    ),
    "SHOW": (
        "SHOW TABLES",
        "SHOW ALL TABLES",
        "DESCRIBE events",
        "SUMMARIZE events",
        "SHOW DATABASES",
        "DESCRIBE",
    ),
    "PIVOT": ("PIVOT events ON id USING count(*)", "SELECT * FROM (PIVOT events ON id USING count(*))"),
    "write in a CTE": (
        "WITH x AS (INSERT INTO events VALUES (1) RETURNING *) SELECT * FROM x",
        "WITH x AS (DELETE FROM events RETURNING *) SELECT * FROM x",
        "WITH x AS (UPDATE events SET id = 2 RETURNING *) SELECT * FROM x",
    ),
}

NOTHING = ("", ";", "   ", "-- only a comment", "/* */", "SELEC 1", "SELECT", "SELECT * FROM", "\u00a0")

AROUND_RELATIONS = (
    "SELECT * FROM {}",
    "FROM {}",
    "SELECT * FROM {} AS events",
    "WITH x AS (SELECT * FROM {}) SELECT * FROM x",
    "WITH events AS (SELECT * FROM {}) SELECT * FROM events",
    "WITH x AS MATERIALIZED (WITH y AS (FROM {}) FROM y) FROM x",
    "WITH RECURSIVE x AS (SELECT 1 AS a UNION ALL SELECT 2 FROM x, {}) SELECT * FROM x",
    "WITH RECURSIVE x AS (SELECT * FROM {} UNION SELECT * FROM x) SELECT * FROM x",
    "SELECT * FROM (SELECT * FROM (SELECT * FROM {}))",
    "SELECT (SELECT count(*) FROM {})",
    "SELECT 1 WHERE EXISTS (FROM {})",
    "SELECT id FROM events WHERE id IN (SELECT 1 FROM {})",
    "SELECT 1 UNION ALL SELECT 2 FROM {}",
    "SELECT 1 EXCEPT (SELECT 2 FROM {} LIMIT 1)",
    "SELECT 1 UNION ALL BY NAME SELECT 2 AS b FROM {}",
    "SELECT * FROM events, LATERAL (SELECT * FROM {} LIMIT 1) l",
    "SELECT * FROM events JOIN {} ON true",
    "SELECT * FROM events LEFT JOIN (SELECT 1 FROM {}) ON (SELECT true FROM {})",
    "SELECT * FROM events ASOF JOIN {} USING (id)",
    "SELECT * FROM events NATURAL JOIN {}",
    "SELECT * FROM events POSITIONAL JOIN {}",
    "SELECT * FROM events SEMI JOIN {} ON true",
    "SELECT id FROM events ORDER BY (SELECT 1 FROM {})",
    "SELECT id FROM events LIMIT (SELECT 1 FROM {})",
    "SELECT id FROM events LIMIT 1 OFFSET (SELECT 1 FROM {})",
    "SELECT id FROM events GROUP BY id, (SELECT 1 FROM {})",
    "SELECT id FROM events GROUP BY id HAVING (SELECT true FROM {})",
    "SELECT id FROM events QUALIFY (SELECT true FROM {})",
    "SELECT DISTINCT ON ((SELECT 1 FROM {})) id FROM events",
    "SELECT sum(id) FILTER (WHERE EXISTS (FROM {})) FROM events",
    "SELECT sum(id) OVER (PARTITION BY (SELECT 1 FROM {})) FROM events",
    "SELECT sum(id) OVER (ORDER BY id ROWS BETWEEN (SELECT 1 FROM {}) PRECEDING AND CURRENT ROW) FROM events",
    "SELECT lag(id, 1, (SELECT 1 FROM {})) OVER (ORDER BY id) FROM events",
    "SELECT string_agg('a', ',' ORDER BY (SELECT 1 FROM {})) FROM events",
    "SELECT CASE WHEN false THEN (SELECT 1 FROM {}) ELSE 2 END",
    "SELECT CASE (SELECT 1 FROM {}) WHEN 1 THEN 2 END",
    "SELECT [x + (SELECT 1 FROM {}) FOR x IN [1, 2]]",
    "SELECT list_transform([1], lambda x: (SELECT 1 FROM {}))",
    "SELECT {'a': (SELECT 1 FROM {})}",
    "SELECT coalesce(1, (SELECT 1 FROM {}))",
    "SELECT TRY((SELECT 1 FROM {}))",
    "SELECT CAST((SELECT 1 FROM {}) AS VARCHAR)",
    "SELECT id BETWEEN 1 AND (SELECT 1 FROM {}) FROM events",
    "SELECT * REPLACE ((SELECT 1 FROM {}) AS id) FROM events",
    "SELECT * FROM (VALUES ((SELECT 1 FROM {})))",
    "VALUES ((SELECT 1 FROM {}))",
    "SELECT * FROM unnest((SELECT [1] FROM {}))",
    "SELECT * FROM range((SELECT 1 FROM {}))",
    "SELECT ARRAY(SELECT 1 FROM {})",
    "SELECT /* FROM events */ * FROM /* events -- */ {} -- FROM events",
    "SELECT\n\t*\n--\nFROM\n\n{}",
    "SELECT * FROM\u00a0{}",
    "SELECT 'FROM events' AS x, * FROM {} WHERE 'FROM events' <> ''",
    "SELECT * FROM {} TABLESAMPLE 10%",
    "(SELECT * FROM {})",
    "((SELECT 1) UNION (SELECT 2 FROM {}))",
    "SELECT COLUMNS(*) FROM {}",
)

AROUND_SCALARS = (
    "SELECT {}",
    "SELECT id, {} AS id FROM events",
    "SELECT id FROM events WHERE {} IS NULL",
    "SELECT id FROM events ORDER BY {}",
    "SELECT id FROM events GROUP BY id, {}",
    "SELECT count(*) FROM events HAVING {} IS NULL",
    "SELECT id FROM events QUALIFY {} IS NULL",
    "SELECT id FROM events LIMIT length({}::VARCHAR)",
    "SELECT id FROM events LIMIT 1 OFFSET {}",
    "WITH x AS (SELECT {} AS a) SELECT a FROM x",
    "WITH RECURSIVE x AS (SELECT 1 AS a UNION ALL SELECT a FROM x WHERE {} IS NULL) SELECT * FROM x",
    "SELECT * FROM (SELECT {} AS a)",
    "SELECT 1 UNION SELECT {}",
    "SELECT * FROM events JOIN events e ON {} IS NULL",
    "SELECT * FROM events, LATERAL (SELECT {}) l",
    "SELECT * FROM (VALUES ({}))",
    "SELECT * FROM unnest([{}])",
    "SELECT CASE WHEN 1 = 2 THEN {} END",
    "SELECT coalesce(NULL, {})",
    "SELECT upper({})",
    "SELECT [{}]",
    "SELECT {'a': {}}",
    "SELECT MAP {'a': {}}",
    "SELECT list_transform([1], lambda x: {})",
    "SELECT list_filter([1], x -> {} IS NULL)",
    "SELECT count({}) FILTER (WHERE {} IS NULL) FROM events",
    "SELECT sum(1) OVER (PARTITION BY {}) FROM events",
    "SELECT first(id ORDER BY {}) FROM events",
    "SELECT * REPLACE ({} AS id) FROM events",
    "SELECT /* */ {} -- ",
    "SELECT NOT ({} IS NULL)",
    "SELECT {} IN (1)",
    "SELECT 1 IN (SELECT {})",
    "SELECT 1 BETWEEN 0 AND {}",
    "SELECT TRY({})",
    "SELECT TRY_CAST({} AS VARCHAR)",
    "SELECT ({}) COLLATE nocase",
    "SELECT ([1, 2])[{}]",
    "SELECT struct_pack(a := {})",
)

AROUND_STATEMENTS = (
    "{}",
    "{};",
    "SELECT 1; {}",
    "{}; SELECT 1",
    "/* SELECT 1 */ {} -- SELECT 1",
    "SELECT id FROM events;\n\n{};\nSELECT 2;",
    "EXPLAIN {}",
)

UNRESOLVED = (
    "SELECT * FROM secrets",
    "SELECT * FROM connection",
    "SELECT * FROM sql",
    "SELECT * FROM duckdb",
    "SELECT * FROM self",
    "SELECT * FROM os",
    "SELECT * FROM tables",
    "SELECT * FROM memory",
    "SELECT * FROM main",
    "SELECT * FROM input_7",
    "WITH a AS (SELECT * FROM b), b AS (SELECT 1) SELECT * FROM a",
    "WITH elsewhere AS (SELECT * FROM elsewhere) SELECT * FROM elsewhere",
    "SELECT (SELECT 1 FROM nowhere)",
)


def _text(*parts: str) -> str:
    return "".join(parts)


def _doublings(count: int) -> str:
    """Each CTE reads the one before it twice."""
    twice = "{} AS (SELECT * FROM {} UNION ALL SELECT * FROM {})"
    names = [f"a{n}" for n in range(count)]
    later = [twice.format(name, before, before) for before, name in pairwise(names)]
    return " ".join(("WITH a0 AS (SELECT 1 AS x),", ", ".join(later), "SELECT count(*) FROM", names[-1]))


LIMITED: dict[str, tuple[str, ...]] = {
    "recursive bomb": (
        "WITH RECURSIVE x AS (SELECT 1 AS a UNION ALL SELECT a + 1 FROM x) SELECT count(*) FROM x",
        "WITH RECURSIVE x AS (SELECT 1 AS a UNION ALL SELECT x.a + y.a FROM x, range(3) y(a)) SELECT sum(a) FROM x",
        "WITH RECURSIVE x AS (SELECT 'a' AS a UNION ALL SELECT a || a FROM x) SELECT max(length(a)) FROM x",
    ),
    "cross join": (
        "SELECT count(*) FROM range(1000000) a, range(1000000) b, range(1000000) c WHERE a.range + b.range > 1",
        "SELECT * FROM range(100000) a, range(100000) b ORDER BY hash(a.range, b.range)",
        "SELECT count(DISTINCT (a.range, b.range)) FROM range(100000) a, range(100000) b",
    ),
    "huge repeat": (
        "SELECT repeat('a', 3000000000)",
        "SELECT length(repeat(repeat('ab', 1000000), 100000))",
        "SELECT sum(length(repeat('x', 1000000) || range)) FROM range(1000000)",
        "SELECT lpad('', 2000000000, 'x')",
        "SELECT printf('%2000000000d', 1)",
        "SELECT format('{:>2000000000}', 1)",
        "SELECT list_sum(range(10000000000))",
        "SELECT len(list_resize([1], 100000000000))",
        "SELECT array_agg(repeat('y', 100000)) FROM range(10000000)",
        "SELECT 10000000!",
        "SELECT string_agg(range::VARCHAR, '') FROM range(1000000000)",
    ),
    "regex bomb": (
        "SELECT regexp_matches(repeat('a', 100000), '(a+)+$x')",
        "SELECT regexp_matches(repeat('a', 50), '((((a{1,100}){1,100}){1,100}){1,100})b')",
        "SELECT count(regexp_extract(repeat(range::VARCHAR, 1000), '(.*)(.*)(.*)(.*)[^0-9]')) FROM range(10000000)",
        "SELECT regexp_replace(repeat('ab', 10000000), '(a|b)*', repeat('x', 1000), 'g')",
        "SELECT repeat('a', 100000) LIKE repeat('%a', 10000) || 'b'",
    ),
    "giant literal": (
        _text("SELECT '", "x" * 200_000, "'"),
        _text("SELECT ", "9" * 200_000),
        _text("SELECT 1 IN (", ",".join(map(str, range(12_000))), ")"),
        _text("VALUES ", ",".join(f"({n})" for n in range(8_000))),
        _text("SELECT ", ",".join(["1"] * 10_000)),
        _text("SELECT 1 AS ", '"', "c" * 200_000, '"'),
    ),
    "deep nesting": (
        _text("SELECT ", "(" * 50_000, "1", ")" * 50_000),
        _text("SELECT ", "NOT " * 50_000, "true"),
        _text("SELECT ", "[" * 900, "]" * 900),
        _text("SELECT 1", " + 1" * 30_000),
        _text("SELECT ", "- " * 900, "1"),
        _text("SELECT ", "(SELECT " * 400, "1", ")" * 400),
        _text("SELECT * FROM ", "(SELECT * FROM " * 900, "events", ")" * 900),
        _text("SELECT 1", " UNION ALL SELECT 1" * 2_000),
        _text("SELECT ", "CASE WHEN true THEN " * 2_000, "1", " END" * 2_000),
        _text("SELECT * FROM events", " JOIN events USING (id)" * 200),
        _text("SELECT ", " AND ".join(["true"] * 8_000)),
        _text("SELECT ", "upper(" * 2_000, "'x'", ")" * 2_000),
        _text("SELECT 1::", "STRUCT(a " * 800, "INT", ")" * 800),
        _doublings(40),
    ),
    "values without bytes": (
        "SELECT list_resize([NULL], 20000000)",
        "SELECT list_resize([true], 20000000)",
        "SELECT list_resize([NULL], 20000) FROM range(100000)",
        _text("SELECT ", ",".join(["NULL"] * 5_000), " FROM range(8192)"),
        _text("SELECT ", ",".join(["NULL"] * 1_900), " FROM range(1000000)"),
        _text("SELECT list_transform(range(100000), lambda x: {'", "n" * 100_000, "': NULL})"),
        "SELECT list_resize([NULL], 100000)::INTEGER[100000] FROM range(1000)",
    ),
    "slow functions": (
        "SELECT sum(levenshtein(repeat('a', 5000), repeat('b', 5000) || range)) FROM range(100000)",
        "SELECT max(sha256(repeat(range::VARCHAR, 100000))) FROM range(10000000)",
        "SELECT list_reduce(range(100000000), lambda a, b: a + b)",
    ),
}


_HOSTILE = ((RELATIONS, AROUND_RELATIONS), (SCALARS, AROUND_SCALARS), (STATEMENTS, AROUND_STATEMENTS))


def refused_at_the_root(of_each_kind: int | None = None) -> Iterator[Attack]:
    """Hostile pieces in their plainest form, all or the first few of each kind."""
    for pieces, places in _HOSTILE:
        chosen = {kind: listed[:of_each_kind] for kind, listed in pieces.items()}
        yield from _placed(chosen, places[0])
    yield from (Attack("nothing", sql) for sql in NOTHING)


def refused_in_disguise(every: int = 1, first: int = 0) -> Iterator[Attack]:
    """Hostile pieces in the places where they can hide; with ``every``, one of that many."""
    whole = (attack for pieces, places in _HOSTILE for place in places for attack in _placed(pieces, place))
    return islice(whole, first, None, every)


def _placed(pieces: dict[str, tuple[str, ...]], place: str) -> Iterator[Attack]:
    for kind, listed in pieces.items():
        for piece in listed:
            yield Attack(kind, place.replace("{}", piece), params=("@FILE@",) if "$1" in piece else ())


def others() -> Iterator[Attack]:
    yield from (Attack("unknown relation", sql, "unresolved") for sql in UNRESOLVED)
    for kind, queries in LIMITED.items():
        yield from (Attack(kind, sql, "limited") for sql in queries)
