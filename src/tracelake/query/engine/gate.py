"""The gate: which SQL is run at all, decided on the engine's own tree of it.

DuckDB parses the text and gives its tree as JSON, so gate and engine can't read a text in two ways; comments,
quotes and look-alike letters are gone by then. The tree is walked by an allow-list of shapes (``gate_shapes``),
functions and types (``gate_functions``): one SELECT over plainly named relations, with expressions that compute.
What isn't known is refused, never skipped. Which of the names are datasets, the gate doesn't know; the service
resolves them, and nothing else is there for the engine to find.

The gate is the first of several walls: the process that runs an accepted query holds no file, network or secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import duckdb
import orjson

from tracelake.domain.errors import Forbidden, Invalid
from tracelake.query.engine.gate_rules import Rule
from tracelake.query.engine.gate_shapes import statement
from tracelake.query.engine.parsed_query import ParsedQuery
from tracelake.query.engine.pushdown import relation_uses
from tracelake.query.engine.sql_literal import Params

#: Leaves out what is empty or the default; ``gate_shapes`` relies on it.
SERIALIZE = "SELECT json_serialize_sql(?, skip_null := true, skip_empty := true, skip_default := true)"
#: Steps of the walk below each other, about four for each level of nested SQL.
MAX_DEPTH = 800


def parse(connection: duckdb.DuckDBPyConnection, sql: str, params: Params = ()) -> ParsedQuery:
    """What the SQL reads. Raises Invalid (``SqlSyntax``, ``QueryTooDeep``) or Forbidden (``QueryRefused``).

    The values of parameters serve to read less; a query may be parsed without them and run with them."""
    if "\0" in sql:
        raise Invalid("SqlSyntax", "the SQL contains a NUL character")
    rows = connection.execute(SERIALIZE, [sql]).fetchall()
    try:
        tree = orjson.loads(rows[0][0])
    except orjson.JSONDecodeError:
        raise _too_deep() from None
    return examine(tree, params)


def examine(tree: Mapping[str, Any], params: Params = ()) -> ParsedQuery:
    """The same for the engine's tree, as ``SERIALIZE`` gives it."""
    if tree.get("error") is not False:
        raise _engine_error(tree)
    statements = tree.get("statements", [])
    if not isinstance(statements, list) or len(statements) != 1:
        raise Forbidden("QueryRefused", f"a query is one SELECT; this is {len(statements)} statements")
    _walk(statements[0])
    named = statements[0].get("named_param_map", [])
    parameters = tuple(entry["key"] for entry in sorted(named, key=lambda entry: int(entry["value"])))
    return ParsedQuery(relation_uses(statements[0]["node"], params), parameters)


def _walk(tree: Any) -> None:
    pending: list[tuple[Rule, Any, int]] = [(statement, tree, 0)]
    while pending:
        rule, value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _too_deep()
        pending.extend((*step, depth + 1) for step in rule(value))


def _engine_error(tree: Mapping[str, Any]) -> Forbidden | Invalid:
    message = str(tree.get("error_message", "the SQL can't be parsed"))
    if message.startswith("Only SELECT"):
        return Forbidden(
            "QueryRefused", "a query is one SELECT; other statements and commands aren't allowed"
        )
    if "expression depth" in message or "llocation failure" in message:
        return _too_deep()
    position = tree.get("position")
    return Invalid("SqlSyntax", message if position is None else f"{message} (at character {position})")


def _too_deep() -> Invalid:
    return Invalid("QueryTooDeep", "the query is too large or nested too deeply")
