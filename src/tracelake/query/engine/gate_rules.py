"""Rules by which the gate goes through a tree, and what may be named in one.

A rule checks one value and gives the steps that follow from it; whoever runs them keeps count of the depth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from tracelake.domain.errors import Forbidden
from tracelake.query.engine.gate_functions import BARE, COLLATIONS, FUNCTIONS, TYPES

Rule: TypeAlias = Callable[[Any], Iterable[tuple["Rule", Any]]]
Shape: TypeAlias = Mapping[str, Rule]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RESERVED = re.compile(r"(duckdb|pg|sqlite|pragma)_|information_schema\Z", re.IGNORECASE)
_SCALARS = (str, int, float, bool, type(None))


def refused(what: str) -> Forbidden:
    return Forbidden("QueryRefused", f"{what} isn't allowed in a query")


def plain(value: Any) -> Iterable[tuple[Rule, Any]]:
    """Text, numbers, lists of them: nothing that could hold a part of a query."""
    if isinstance(value, list):
        return [(plain, item) for item in value]
    if not isinstance(value, _SCALARS):
        raise refused("an unknown part of the tree")
    return ()


def each(rule: Rule) -> Rule:
    def check(value: Any) -> Iterable[tuple[Rule, Any]]:
        if not isinstance(value, list):
            raise refused("an unknown part of the tree")
        return [(rule, item) for item in value]

    return check


def shaped(shape: Shape) -> Rule:
    return lambda value: steps(value, shape)


def steps(value: Any, shape: Shape) -> list[tuple[Rule, Any]]:
    if not isinstance(value, dict):
        raise refused("an unknown part of the tree")
    steps = []
    for key, item in value.items():
        rule = shape.get(key)
        if rule is None:
            raise refused(UNUSUAL.get(key, f"an unknown part of the tree, {shown(key)},"))
        if rule is not plain or isinstance(item, dict | list):
            steps.append((rule, item))
        elif not isinstance(item, _SCALARS):
            raise refused("an unknown part of the tree")
    return steps


UNUSUAL = {
    "SHOW_REF": "SHOW, DESCRIBE or SUMMARIZE",
    "PIVOT": "PIVOT or UNPIVOT",
    "at_clause": "AT (VERSION or TIMESTAMP)",
    "schema_name": "a schema before a name",
    "catalog_name": "a catalog before a name",
    "export_state": "EXPORT_STATE",
}


def cte_name(value: Any) -> Iterable[tuple[Rule, Any]]:
    """Not one of the engine's own tables, so that a mistake about scopes could not reveal those."""
    if not isinstance(value, str) or _RESERVED.match(value):
        raise refused(f"a CTE of the name {shown(value)}")
    return ()


def check_relation_name(value: Mapping[str, Any]) -> None:
    path = _path(value)
    if len(path) != 1:
        raise refused(f"a relation with a catalog or schema, {shown('.'.join(path))},")
    if path != [value.get("table_name")] or not _NAME.match(path[0]):
        raise refused(
            f"the relation {shown(path[0])}, which is no plain name (files and URLs can't be read),"
        )
    if _RESERVED.match(path[0]):
        raise refused(f"the engine's own table {shown(path[0])}")


def check_call(value: Any, allowed: frozenset[str], what: str) -> None:
    name = text_of(value, "function_name")
    if _path(value) != [name]:
        raise refused(f"{what} {shown('.'.join(_path(value)))}")
    if name.lower() not in allowed:
        raise refused(f"{what} {shown(name)}")


def check_column(value: Mapping[str, Any]) -> None:
    """A column's name alone may be a call of a function; with its table before it, it never is."""
    names = value.get("column_names")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    called = BARE.get(name.lower()) if isinstance(name, str) else None
    if called is not None and called not in FUNCTIONS:
        raise refused(f"the function {shown(name)} (a column of that name needs its table before it)")


def check_type(value: Mapping[str, Any]) -> None:
    name = text_of(value, "type_name")
    if _path(value) != [name] or name.lower() not in TYPES:
        raise refused(f"the type {shown('.'.join(_path(value)))}")


def check_collation(name: str) -> None:
    if not COLLATIONS.issuperset(name.lower().split(".")):
        raise refused(f"the collation {shown(name)}")


def _path(value: Any) -> list[str]:
    name = value.get("qualified_name") if isinstance(value, dict) else None
    path = name.get("path") if isinstance(name, dict) else None
    if not isinstance(path, list) or not path or not all(isinstance(part, str) for part in path):
        raise refused("something without a name")
    return path


def text_of(value: Any, key: str) -> str:
    text = value.get(key) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise refused("an unknown part of the tree")
    return text


def shown(text: object) -> str:
    """For a message: short, and without characters that look like others or move the cursor."""
    return ascii(text if len(str(text)) <= 80 else str(text)[:80] + "…")
