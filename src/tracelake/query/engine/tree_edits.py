"""Edits of an accepted query: its tree is changed, and the engine writes it as SQL again.

``QueryTree`` is the statement with its parameters. An edit takes a fresh tree, changes it in place and passes it
on: to ``bound``, which only asks the engine whether it understands the statement, or to ``statement``, the SQL to
run. That SQL is parsed again: it must give the very tree that was meant, and pass the gate like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import duckdb
import msgspec
import orjson

from tracelake.domain.errors import Invalid
from tracelake.query.engine.gate import SERIALIZE, examine
from tracelake.query.engine.pushdown import StatementParams

Tree: TypeAlias = dict[str, Any]
#: Where a part of a tree is: a container of parts, and its key there.
Place: TypeAlias = tuple[Any, Any]
_BIGNUM = duckdb.sqltype("BIGNUM")
_DESERIALIZE = "SELECT json_deserialize_sql(?::JSON)"
_POSITIONS = frozenset({"query_location", "query_location_length"})


def bindable(value: Any) -> Any:
    """Parameters as the engine binds them. Its driver has no integers beyond 128 bits, so these are given with
    their type."""
    match value:
        case Mapping():
            return {name: bindable(each) for name, each in value.items()}
        case list() | tuple():
            return [bindable(each) for each in value]
        case int() if is_wide(value):
            return duckdb.Value(str(value), _BIGNUM)
        case _:
            return value


def is_wide(value: int) -> bool:
    """Whether it is beyond the engine's integers of 128 bits."""
    return not -(2**127) <= value < 2**128


class QueryTree:
    """``sql`` has been accepted by the gate, and its relations are attached."""

    def __init__(self, connection: duckdb.DuckDBPyConnection, sql: str, params: StatementParams) -> None:
        self.sql = sql
        self.params = params
        self._connection = connection
        self._bound = bindable(params) or None
        [[self._serialized]] = connection.execute(SERIALIZE, [sql]).fetchall()

    def fresh(self) -> Tree:
        tree: Tree = orjson.loads(self._serialized)
        return tree

    def bind(self, sql: str) -> duckdb.DuckDBPyRelation:
        """Raises the engine's error if it doesn't understand the statement; no row is read yet."""
        return self._connection.sql(sql, params=self._bound)

    def bind_edited(self, tree: Tree) -> None:
        self.bind(self._written(tree))

    def statement(self, tree: Tree) -> str:
        sql = self._written(tree)
        [[again]] = self._connection.execute(SERIALIZE, [sql]).fetchall()
        parsed = orjson.loads(again)
        examine(parsed, self.params)
        if _without_positions(parsed) != _without_positions(tree):
            raise Invalid(
                "QueryFailed", "the query can't be run as it is written: cast its values explicitly"
            )
        return sql

    def text(self, expression: Tree) -> str:
        """The expression as the engine writes it, which is its column's name without an alias."""
        [[serialized]] = self._connection.execute(SERIALIZE, ["SELECT 1"]).fetchall()
        tree = orjson.loads(serialized)
        tree["statements"][0]["node"]["select_list"] = [expression]
        return self._written(tree).removeprefix("SELECT ")

    def _written(self, tree: Tree) -> str:
        [[sql]] = self._connection.execute(_DESERIALIZE, [msgspec.json.encode(tree).decode()]).fetchall()
        return str(sql)


def call(name: str, *arguments: Tree) -> Tree:
    """A call as the engine writes it in a tree."""
    return {
        "class": "FUNCTION",
        "type": "FUNCTION",
        "function_name": name,
        "order_bys": {"type": "ORDER_MODIFIER"},
        "arguments": [{"expression": argument} for argument in arguments],
        "qualified_name": {"path": [name]},
    }


def same_text(tree: Any) -> bytes:
    """Equal for parts that differ only in their positions."""
    return msgspec.json.encode(_without_positions(tree), order="sorted")


def _without_positions(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _without_positions(value) for key, value in tree.items() if key not in _POSITIONS}
    return [_without_positions(value) for value in tree] if isinstance(tree, list) else tree
