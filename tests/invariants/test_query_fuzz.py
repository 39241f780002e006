"""Random queries with hostile pieces in them: what the gate accepts touches attached relations and nothing else.

Judged by the engine alone. Its connection here is an open one: files can be read, settings are there, canaries lie
about. An accepted query is planned without optimizers, so that nothing is folded away, and its plan may scan
attached tables only and call functions of the list only, those that change from call to call only if the query
calls them by name; then it is run, and no canary may be in plan or answer. Names in the queries are often those of
something else: a CTE, alias, column or lambda variable that is called like a function allows no call of it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import duckdb
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.query_grammar import TABLES, Grammar, random_table
from tracelake.domain.errors import TracelakeError
from tracelake.query.engine.gate import SERIALIZE, parse
from tracelake.query.engine.gate_functions import BARE, FUNCTIONS, TABLE_FUNCTIONS

EXAMPLES = int(os.environ.get("TRACELAKE_QUERY_FUZZ_EXAMPLES", "0"))
SECRET = "canary-4711"
VARIABLE = "CANARY_SETTING"
#: Leaves of a plan that make rows out of nothing or of other parts of the same plan.
HARMLESS = re.compile(
    r"(DUMMY_SCAN|EMPTY_RESULT|COLUMN_DATA_SCAN|EXPRESSION_SCAN|DELIM_SCAN|(RECURSIVE_)?CTE_SCAN|CTE_REF|CTE"
    r"|UNNEST|RANGE|GENERATE_SERIES|INOUT_FUNCTION|REC_CTE_SCAN)\s*\Z"
)
#: Functions of the engine that look outside, as its own list marks them and as their names say.
OUTSIDE = re.compile(
    r"\b(getenv|current_setting|current_database|current_schemas?|current_query|getvariable|read_\w+|glob|nextval|"
    r"currval|setval|setseed|version|write_log|error|sleep_ms|pg_\w+|duckdb_\w+|pragma_\w+|query|query_table|"
    r"json_(?:de)?serialize_\w+|json_execute_serialized_sql|in_search_path|txid_current|stats|__\w+)\("
)


#: Words of a plan before a parenthesis that are no functions.
LANGUAGE = frozenset(
    (
        *(
            "cast",
            "try_cast",
            "coalesce",
            "case",
            "try",
            "exists",
            "subquery",
            "not",
            "and",
            "or",
            "in",
            "between",
        ),
        *(
            "decimal",
            "struct",
            "map",
            "union",
            "tuple",
            "row",
            "list",
            "array",
            "enum",
            "filter",
            "over",
            "interval",
        ),
    )
)
#: What a macro of the engine's own calls besides.
WITHIN_MACROS = {"error": "json_group_object"}
_TEXT = re.compile(r"'(?:[^']|'')*'")
_CALL = re.compile(r'(?<![\w"])"?([A-Za-z_][A-Za-z0-9_]*)"?\(')


class Judge:
    """An engine with everything in reach, that says what a query would touch."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "secret.csv"
        self.file.write_text(f"id,kind\n1,{SECRET}\n")
        self.counts: Counter[str] = Counter()
        self._connect()

    def _connect(self) -> None:
        self._engine = duckdb.connect(config={"secret_directory": str(self.file.parent)})
        random = Random(1)
        for name in TABLES:
            self._engine.register("rows", random_table(random, name))
            self._engine.execute(f"CREATE TABLE {name} AS FROM rows")
            self._engine.unregister("rows")
        unsteady = "SELECT function_name FROM duckdb_functions() WHERE stability <> 'CONSISTENT'"
        self._unsteady = {row[0] for row in self._engine.execute(unsteady).fetchall()}
        for name in ("secrets", "other", "input_7"):
            self._engine.execute(f"CREATE TABLE {name} AS SELECT 1 AS id, '{SECRET}' AS kind")

    def examine(self, sql: str, params: list[object]) -> None:
        """Raises AssertionError when something accepted isn't harmless."""
        try:
            relations = set(parse(self._engine, sql, params).relations)
        except TracelakeError:
            self.counts["refused"] += 1
            return
        self.counts["accepted"] += 1
        assert relations <= set(TABLES), sql
        try:
            self._judge(sql, params, relations)
        except (duckdb.InternalException, duckdb.FatalException):
            self.counts["broken"] += 1
            self._connect()
        except duckdb.Error:
            self.counts["not planned"] += 1

    def _judge(self, sql: str, params: list[object], relations: set[str]) -> None:
        with self._engine.cursor() as cursor:
            cursor.execute(f"SET VARIABLE x = '{SECRET}'; SET TimeZone = 'UTC'; PRAGMA disable_optimizer")
            plan = orjson.loads(cursor.execute(f"EXPLAIN (FORMAT json) {sql}", params).fetchall()[0][1])
            assert SECRET not in repr(plan), sql
            touched = set()
            called = _called_by_name(orjson.loads(cursor.execute(SERIALIZE, [sql]).fetchall()[0][0]))
            for node in _nodes(plan):
                assert not OUTSIDE.search(repr(node.get("extra_info"))), (sql, node)
                self._judge_calls(set(_calls(node.get("extra_info"))), called, sql)
                if not node.get("children"):
                    touched |= _touched(node, sql)
            assert touched <= relations, (sql, touched)
            self.counts["planned"] += 1
            answer = repr(cursor.execute(sql, params).fetchmany(1000))
            assert SECRET not in answer, sql

    def _judge_calls(self, calls: set[str], called: set[str], sql: str) -> None:
        own = {name for name, macro in WITHIN_MACROS.items() if macro in called}
        assert calls <= FUNCTIONS | TABLE_FUNCTIONS | LANGUAGE | own, (sql, calls)
        assert calls & self._unsteady <= called, (sql, calls)


def _calls(part: Any) -> Iterator[str]:
    """Functions in a node of a plan, which has its expressions as text."""
    match part:
        case str():
            yield from (name.lower() for name in _CALL.findall(_TEXT.sub("''", part)))
        case dict():
            for each in part.values():
                yield from _calls(each)
        case list():
            for each in part:
                yield from _calls(each)


def _called_by_name(tree: Any) -> set[str]:
    """Functions that the query itself calls, those without parentheses included."""
    match tree:
        case {"class": "FUNCTION" | "WINDOW", "function_name": str(name)}:
            return {name.lower()}.union(*map(_called_by_name, tree.values()))
        case {"class": "COLUMN_REF", "column_names": [str(name)]} if name.lower() in BARE:
            return {BARE[name.lower()]}
        case dict():
            return set().union(*map(_called_by_name, tree.values()))
        case list():
            return set().union(*map(_called_by_name, tree))
        case _:
            return set()


def _nodes(plan: Any) -> Iterator[dict[str, Any]]:
    for node in plan if isinstance(plan, list) else [plan]:
        yield node
        yield from _nodes(node.get("children", []))


def _touched(leaf: dict[str, Any], sql: str) -> set[str]:
    if leaf["name"].strip() in ("SEQ_SCAN", "TABLE_SCAN"):
        return {str(leaf["extra_info"]["Table"]).split(".")[-1].lower()}
    assert HARMLESS.match(leaf["name"].strip()), (sql, leaf)
    return set()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    os.environ[VARIABLE] = SECRET
    yield Judge(tmp_path_factory.mktemp("canary"))
    del os.environ[VARIABLE]


def _query(random: Random, judge: Judge, danger: float) -> tuple[str, list[object]]:
    grammar = Grammar(random, danger)
    sql = grammar.query().replace("@FILE@", str(judge.file)).replace("@ENV@", VARIABLE)
    return sql, grammar.parameters


@settings(max_examples=EXAMPLES or 400, derandomize=not EXAMPLES)
@given(seed=st.integers(0, 2**48), danger=st.sampled_from([0.0, 0.02, 0.1]))
def test_what_is_accepted_touches_attached_relations_only(judge: Judge, seed: int, danger: float) -> None:
    judge.examine(*_query(Random(seed), judge, danger))


def test_the_fuzzer_makes_both_kinds_and_the_judge_sees_them(judge: Judge) -> None:
    judge.counts.clear()
    for seed in range(200):
        judge.examine(*_query(Random(seed), judge, 0.05))
    assert judge.counts["refused"] > 30
    assert judge.counts["planned"] > 30


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT * FROM '@FILE@'",
        "SELECT * FROM read_text('@FILE@')",
        "SELECT id FROM events WHERE kind IN (SELECT kind FROM secrets)",
        "SELECT * FROM duckdb_settings()",
        "SELECT getvariable('x')",
        "SELECT current_setting('threads') FROM events",
        "WITH x AS (SELECT * FROM other) SELECT * FROM events, x",
        "SELECT current_schema FROM events",
        "WITH current_schema AS (SELECT 1) SELECT current_schema() FROM events",
    ],
)
def test_the_judge_condemns_what_the_gate_would_have_refused(judge: Judge, sql: str) -> None:
    """Without its help: the queries go to the judge alone."""
    with pytest.raises(AssertionError):
        judge._judge(sql.replace("@FILE@", str(judge.file)), [], set(TABLES))
