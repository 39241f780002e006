"""What keeps BIGNUM exact in this engine: its casts to other numbers are wrong, silently, for some values.

BIGNUM is the engine's only type for a uint256. Of its casts in version 2.0, one of more than 128 bits to an integer
keeps the lowest ones, a negative number becomes an unsigned one, one to HUGEINT always fails, and to DECIMAL and
FLOAT there is none. The optimizer makes such a cast by itself: for ``n < 2^200`` it compares ``n`` with ``2^200``
as a BIGINT, which is 0. So for a query in which there may be a BIGNUM

- the optimizer's rule is off (``lockdown.without_rewriter``); filters still reach the files;
- a cast of a BIGNUM to a number, and of a DECIMAL to BIGNUM, goes through text, which is exact or an error.

``tests/unit/query/test_query_bignum.py`` says when a version of the engine needs this no longer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import duckdb
import pyarrow as pa

from tracelake.domain.errors import Invalid
from tracelake.query.engine.gate_functions import NUMBER_TYPES
from tracelake.query.engine.messages import RelationUse
from tracelake.query.engine.pushdown import StatementParams
from tracelake.query.engine.tree_edits import QueryTree, Tree, call, is_wide, same_text
from tracelake.tables.wide_integers import WIDE_INTEGER, visible_columns

_TYPES = frozenset({"bignum", "varint"})
#: The type by name, or a number of more digits than HUGEINT has. Other texts match too, which does no harm.
_WRITTEN = re.compile(r"bignum|varint|[0-9_]{39}", re.IGNORECASE)
#: Takes no number, so the engine's error names the type that it was given.
_TAKES_NO_NUMBER = "decode"
_GIVEN = re.compile(r"decode\(\W?(\w+)(\[?)")
_TEXT = {
    "class": "TYPE",
    "type": "TYPE",
    "type_name": "VARCHAR",
    "qualified_name": {"path": ["VARCHAR"]},
}


def may_be_used(
    sql: str, params: StatementParams, columns: Mapping[str, pa.Schema], uses: Mapping[str, RelationUse]
) -> bool:
    """Whether there may be a BIGNUM in the query: a column that it uses, a type, a literal or a parameter."""
    if _WRITTEN.search(sql) or _any_wide(params):
        return True
    for name, schema in columns.items():
        used = uses.get(name.lower(), RelationUse()).columns
        for field in visible_columns(schema):
            if field.type == WIDE_INTEGER and (used is None or field.name.lower() in used):
                return True
    return False


def _any_wide(value: Any) -> bool:
    match value:
        case Mapping():
            return any(map(_any_wide, value.values()))
        case list() | tuple():
            return any(map(_any_wide, value))
        case int():
            return is_wide(value)
        case _:
            return False


def with_exact_casts(connection: duckdb.DuckDBPyConnection, sql: str, params: StatementParams) -> str:
    """The statement to run: ``sql`` itself if it has no such cast."""
    query = QueryTree(connection, sql, params)
    # Equal casts are one: the engine wants an expression of GROUP BY to be the same wherever it is written.
    groups = list(dict.fromkeys(text for text, _ in _casts(query.fresh())))
    if not groups:
        return sql
    # An error of the query itself is reported in its own words, before any other text of it is bound.
    query.bind(sql)
    chosen = [cast for cast in groups if _is_inexact(query, cast)]
    if not chosen:
        return sql
    tree = query.fresh()
    for text, cast in _casts(tree):
        if text in chosen:
            within = {key: value for key, value in cast.items() if key != "alias"}
            cast["child"] = {**within, "type_expr": dict(_TEXT)}
    return query.statement(tree)


def _casts(tree: Any) -> list[tuple[bytes, Tree]]:
    """Each with its text, all of them before any is changed: a cast may contain others."""
    found, pending = [], [tree]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(part)
        elif isinstance(part, dict):
            if _is_numeric_cast(part):
                found.append((same_text([part["child"], part["type_expr"]]), part))
            pending.extend(part.values())
    return found


def _is_numeric_cast(part: Tree) -> bool:
    match part:
        case {"class": "CAST", "child": {"class": kind}, "type_expr": {"type_name": str(name)}}:
            return kind not in ("CONSTANT", "PARAMETER") and name.lower() in NUMBER_TYPES | _TYPES
        case _:
            return False


def _is_inexact(query: QueryTree, wanted: bytes) -> bool:
    tree = query.fresh()
    target = ""
    for text, cast in _casts(tree):
        if text == wanted:
            target = cast["type_expr"]["type_name"].lower()
            cast["child"] = call(_TAKES_NO_NUMBER, cast["child"])
    try:
        query.bind_edited(tree)
    except duckdb.BinderException as error:
        given = _GIVEN.search(str(error))
        if given is None:
            raise Invalid(
                "QueryFailed", "the type of a value that is cast isn't known: cast it in a subquery"
            ) from None
        return not given[2] and given[1] == ("DECIMAL" if target in _TYPES else "BIGNUM")
    return False
