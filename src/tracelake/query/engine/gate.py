"""The gate decides, on the engine's own tree of a query, whether its SQL is run at all.

DuckDB parses the text and gives its tree as JSON, so gate and engine can't read a text in two ways; comments,
quotes and look-alike letters are gone by then. The tree is checked against allow-lists: for each kind of node its
keys and what each may hold (the shapes below), and the functions and types of ``gate_functions``. That leaves one
SELECT over plainly named relations, with expressions that compute. Unknown parts are refused, never skipped. The
engine leaves defaults and empty values out of its tree (``SERIALIZE``), so an unlisted key always means something:
a catalog or schema before a name, a point in time of a table, a command inside a CTE.

The gate doesn't know which names are datasets; the service resolves them, and the engine can find nothing else. It
is the first of several walls: the process that runs an accepted query holds no file, network or secret.

A rule checks one value and returns the steps that follow from it; ``_walk`` runs them and counts the depth.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import duckdb
import orjson

from tracelake.domain.errors import Forbidden, Invalid
from tracelake.query.engine.gate_functions import BARE, COLLATIONS, FUNCTIONS, TABLE_FUNCTIONS, TYPES
from tracelake.query.engine.messages import ParsedQuery
from tracelake.query.engine.pushdown import StatementParams, relation_uses

#: Leaves out empty and default values; the shapes below rely on it.
SERIALIZE = "SELECT json_serialize_sql(?, skip_null := true, skip_empty := true, skip_default := true)"
#: Maximum depth of the walk, about four steps for each level of nested SQL.
MAX_DEPTH = 800
Rule: TypeAlias = Callable[[Any], Iterable[tuple["Rule", Any]]]
NodeShape: TypeAlias = Mapping[str, Rule]
# ``\Z`` because ``$`` also matches before a newline at the end.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_RESERVED = re.compile(r"(duckdb|pg|sqlite|pragma)_|information_schema\Z", re.IGNORECASE)
_SCALARS = (str, int, float, bool, type(None))
UNUSUAL = {
    "SHOW_REF": "SHOW, DESCRIBE or SUMMARIZE",
    "PIVOT": "PIVOT or UNPIVOT",
    "at_clause": "AT (VERSION or TIMESTAMP)",
    "schema_name": "a schema before a name",
    "catalog_name": "a catalog before a name",
    "export_state": "EXPORT_STATE",
}


def parse(connection: duckdb.DuckDBPyConnection, sql: str, params: StatementParams = ()) -> ParsedQuery:
    """The relations that the SQL reads. Raises Invalid (``SqlSyntax``, ``QueryTooDeep``) or Forbidden
    (``QueryRefused``). Values of parameters only help to read less; a query may be parsed without them and run with
    them."""
    if "\0" in sql:
        raise Invalid("SqlSyntax", "the SQL contains a NUL character")
    rows = connection.execute(SERIALIZE, [sql]).fetchall()
    try:
        tree = orjson.loads(rows[0][0])
    except orjson.JSONDecodeError:
        # orjson's own limit on nesting.
        raise _too_deep() from None
    return examine(tree, params)


def examine(tree: Mapping[str, Any], params: StatementParams = ()) -> ParsedQuery:
    """The same for the engine's tree, as ``SERIALIZE`` gives it."""
    # Only an explicit success counts: a tree of another form is an error too.
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
    # Not recursive: the caller chooses the depth, which could exhaust Python's stack.
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
    # ``llocation`` lacks its first letter, which may be a capital.
    if "expression depth" in message or "llocation failure" in message:
        return _too_deep()
    position = tree.get("position")
    return Invalid("SqlSyntax", message if position is None else f"{message} (at character {position})")


def _too_deep() -> Invalid:
    return Invalid("QueryTooDeep", "the query is too large or nested too deeply")


def refused(what: str) -> Forbidden:
    return Forbidden("QueryRefused", f"{what} isn't allowed in a query")


def plain(value: Any) -> Iterable[tuple[Rule, Any]]:
    """Text, numbers and lists of them, which can't hold a part of a query."""
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


def shaped(shape: NodeShape) -> Rule:
    return lambda value: steps(value, shape)


def steps(value: Any, shape: NodeShape) -> list[tuple[Rule, Any]]:
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


def cte_name(value: Any) -> Iterable[tuple[Rule, Any]]:
    """Refuses the names of the engine's own tables, so that a mistake about scopes can't reveal those."""
    if not isinstance(value, str) or _RESERVED.match(value):
        raise refused(f"a CTE of the name {shown(value)}")
    return ()


def check_relation_name(value: Mapping[str, Any]) -> None:
    path = _path(value)
    if len(path) != 1:
        raise refused(f"a relation with a catalog or schema, {shown('.'.join(path))},")
    # The tree has the name twice. If they differed, gate and engine could read two different relations.
    if path != [value.get("table_name")] or not _NAME.match(path[0]):
        raise refused(
            f"the relation {shown(path[0])}, which is no plain name (files and URLs can't be read),"
        )
    if _RESERVED.match(path[0]):
        raise refused(f"the engine's own table {shown(path[0])}")


def check_call(value: Any, allowed: frozenset[str], what: str) -> None:
    name = text_of(value, "function_name")
    # The tree has the name twice here too, and a path may hold a schema.
    if _path(value) != [name]:
        raise refused(f"{what} {shown('.'.join(_path(value)))}")
    if name.lower() not in allowed:
        raise refused(f"{what} {shown(name)}")


def check_column(value: Mapping[str, Any]) -> None:
    """An unqualified column name may be a call of a function (``current_date``); a qualified one never is."""
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
    """The text for a message: short, and without characters that look like others or move the cursor."""
    return ascii(text if len(str(text)) <= 80 else str(text)[:80] + "…")


def expression(value: Any) -> Iterable[tuple[Rule, Any]]:
    kind = (text_of(value, "class"), text_of(value, "type"))
    shape = _EXPRESSIONS.get(kind)
    if shape is None:
        raise refused(f"an expression of the kind {shown(kind[0])}/{shown(kind[1])}")
    match kind[0]:
        case "FUNCTION" | "WINDOW":
            check_call(value, FUNCTIONS, "the function")
        case "COLUMN_REF":
            check_column(value)
        case "TYPE":
            check_type(value)
        case "COLLATE":
            check_collation(text_of(value, "collation"))
    return steps(value, shape)


def relation(value: Any) -> Iterable[tuple[Rule, Any]]:
    """A table reference in FROM."""
    kind = text_of(value, "type")
    shape = _RELATIONS.get(kind)
    if shape is None:
        raise refused(UNUSUAL.get(kind, f"a relation of the kind {shown(kind)}"))
    if kind == "BASE_TABLE":
        check_relation_name(value)
    return steps(value, shape)


def _table_function(value: Any) -> Iterable[tuple[Rule, Any]]:
    if text_of(value, "class") != "FUNCTION" or text_of(value, "type") != "FUNCTION":
        raise refused("a relation that is an expression")
    check_call(value, TABLE_FUNCTIONS, "the table function")
    return steps(value, _FUNCTION)


def query_node(value: Any) -> Iterable[tuple[Rule, Any]]:
    kind = text_of(value, "type")
    shape = _NODES.get(kind)
    if shape is None:
        raise refused(f"a statement of the kind {shown(kind)}")
    return steps(value, shape)


def _modifier(value: Any) -> Iterable[tuple[Rule, Any]]:
    kind = text_of(value, "type")
    shape = _MODIFIERS.get(kind)
    if shape is None:
        raise refused(f"a modifier of the kind {shown(kind)}")
    return steps(value, shape)


# Shapes name the rules above, and the rules look shapes up when they run.
_NAMED: NodeShape = {"path": plain}
_EXPRESSION: NodeShape = dict.fromkeys(
    ("class", "type", "alias", "query_location", "query_location_length"), plain
)
_STATEMENT: NodeShape = {"node": query_node, "named_param_map": each(shaped({"key": plain, "value": plain}))}
_ORDER: NodeShape = {"type": plain, "null_order": plain, "expression": expression}
_ORDERS: NodeShape = {"type": plain, "orders": each(shaped(_ORDER))}
_ARGUMENT: NodeShape = {"name": plain, "expression": expression}
_COLUMN: NodeShape = dict.fromkeys(("catalog", "schema", "table", "column"), plain)
_FUNCTION: NodeShape = {
    **_EXPRESSION,
    **dict.fromkeys(("function_name", "distinct", "is_operator"), plain),
    "qualified_name": shaped(_NAMED),
    "arguments": each(shaped(_ARGUMENT)),
    "filter": expression,
    "order_bys": shaped(_ORDERS),
}
_WINDOW: NodeShape = {
    **_EXPRESSION,
    **dict.fromkeys(("function_name", "start", "end", "exclude_clause", "distinct"), plain),
    **dict.fromkeys(("ignore_nulls", "has_ignore_nulls"), plain),
    **dict.fromkeys(("start_expr", "end_expr", "offset_expr", "default_expr", "filter_expr"), expression),
    "qualified_name": shaped(_NAMED),
    "arguments": each(shaped(_ARGUMENT)),
    "partitions": each(expression),
    "orders": each(shaped(_ORDER)),
    "arg_orders": each(shaped(_ORDER)),
}
_STAR: NodeShape = {
    **_EXPRESSION,
    **dict.fromkeys(("relation_name", "exclude_list", "columns"), plain),
    "expr": expression,
    "replace_list": each(shaped({"key": plain, "value": expression})),
    "qualified_exclude_list": each(shaped(_COLUMN)),
    "rename_list": each(shaped({"key": shaped(_COLUMN), "value": plain})),
}
_CHILDREN: NodeShape = {**_EXPRESSION, "children": each(expression)}
_COMPARISON: NodeShape = {**_EXPRESSION, "left": expression, "right": expression}
_CHECK: NodeShape = {"when_expr": expression, "then_expr": expression}
_LITERAL: NodeShape = {"kind": plain, "text": plain}
_EXPRESSIONS: Mapping[tuple[str, str], NodeShape] = {
    ("COLUMN_REF", "COLUMN_REF"): {**_EXPRESSION, "column_names": plain},
    ("CONSTANT", "VALUE_CONSTANT"): {**_EXPRESSION, "literal": shaped(_LITERAL)},
    ("PARAMETER", "VALUE_PARAMETER"): {**_EXPRESSION, "identifier": plain},
    ("POSITIONAL_REFERENCE", "POSITIONAL_REFERENCE"): {**_EXPRESSION, "index": plain},
    ("STAR", "STAR"): _STAR,
    ("FUNCTION", "FUNCTION"): _FUNCTION,
    ("LAMBDA", "LAMBDA"): {**_EXPRESSION, "lhs": expression, "expr": expression, "syntax_type": plain},
    ("CASE", "CASE_EXPR"): {**_EXPRESSION, "case_checks": each(shaped(_CHECK)), "else_expr": expression},
    ("CAST", "OPERATOR_CAST"): {
        **_EXPRESSION,
        "child": expression,
        "try_cast": plain,
        "type_expr": expression,
    },
    ("TYPE", "TYPE"): {
        **_EXPRESSION,
        "type_name": plain,
        "qualified_name": shaped(_NAMED),
        "children": each(expression),
    },
    ("COLLATE", "COLLATE"): {**_EXPRESSION, "child": expression, "collation": plain},
    ("BETWEEN", "COMPARE_BETWEEN"): {
        **_EXPRESSION,
        "input": expression,
        "lower": expression,
        "upper": expression,
    },
    ("SUBQUERY", "SUBQUERY"): {
        **_EXPRESSION,
        **dict.fromkeys(("subquery_type", "comparison_type"), plain),
        "subquery": shaped(_STATEMENT),
        "child": expression,
    },
    **{("CONJUNCTION", f"CONJUNCTION_{word}"): _CHILDREN for word in ("AND", "OR")},
    **{
        ("COMPARISON", f"COMPARE_{word}"): _COMPARISON
        for word in (
            *("EQUAL", "NOTEQUAL", "LESSTHAN", "LESSTHANOREQUALTO", "GREATERTHAN", "GREATERTHANOREQUALTO"),
            *("DISTINCT_FROM", "NOT_DISTINCT_FROM"),
        )
    },
    **{
        ("OPERATOR", word): _CHILDREN
        for word in (
            *("COMPARE_IN", "COMPARE_NOT_IN", "OPERATOR_NOT", "OPERATOR_IS_NULL", "OPERATOR_IS_NOT_NULL"),
            *("OPERATOR_COALESCE", "OPERATOR_TRY", "OPERATOR_UNPACK", "GROUPING_FUNCTION"),
            *("ARRAY_EXTRACT", "ARRAY_SLICE", "STRUCT_EXTRACT"),
        )
    },
    **{
        ("WINDOW", f"WINDOW_{word}"): _WINDOW
        for word in (
            *("AGGREGATE", "ROW_NUMBER", "RANK", "RANK_DENSE", "NTILE", "PERCENT_RANK", "CUME_DIST", "FILL"),
            *("FIRST_VALUE", "LAST_VALUE", "LEAD", "LAG", "NTH_VALUE"),
        )
    },
}
_SAMPLE: NodeShape = {
    **dict.fromkeys(("is_percentage", "method", "seed", "repeatable", "sample_rate"), plain),
    "sample_size": shaped({"type": shaped({"id": plain}), "is_null": plain, "value": plain}),
}
_UNNAMED: NodeShape = {
    **dict.fromkeys(("type", "query_location", "query_location_length"), plain),
    "sample": shaped(_SAMPLE),
}
_RELATION: NodeShape = {**_UNNAMED, "alias": plain, "column_name_alias": plain}
_RELATIONS: Mapping[str, NodeShape] = {
    "EMPTY": _UNNAMED,
    "BASE_TABLE": {**_RELATION, "table_name": plain, "qualified_name": shaped(_NAMED)},
    "SUBQUERY": {**_RELATION, "subquery": shaped(_STATEMENT)},
    "TABLE_FUNCTION": {**_RELATION, "function": _table_function, "with_ordinality": plain},
    "EXPRESSION_LIST": {**_RELATION, "expected_names": plain, "values": each(each(expression))},
    "JOIN": {
        **_UNNAMED,
        **dict.fromkeys(("join_type", "ref_type", "using_columns", "is_implicit"), plain),
        "left": relation,
        "right": relation,
        "condition": expression,
    },
}
_MODIFIERS: Mapping[str, NodeShape] = {
    "ORDER_MODIFIER": _ORDERS,
    "LIMIT_MODIFIER": {"type": plain, "limit": expression, "offset": expression, "limit_type": plain},
    "DISTINCT_MODIFIER": {"type": plain, "distinct_on_targets": each(expression)},
}
_CTE: NodeShape = {
    **dict.fromkeys(("aliases", "materialized"), plain),
    **dict.fromkeys(("key_targets", "payload_aggregates"), each(expression)),
    "query_node": query_node,
}
_NODE: NodeShape = {
    "type": plain,
    "modifiers": each(_modifier),
    "cte_map": shaped({"map": each(shaped({"key": cte_name, "value": shaped(_CTE)}))}),
}
_NODES: Mapping[str, NodeShape] = {
    "SELECT_NODE": {
        **_NODE,
        **dict.fromkeys(("select_list", "group_expressions"), each(expression)),
        **dict.fromkeys(("where_clause", "having", "qualify"), expression),
        **dict.fromkeys(("group_sets", "aggregate_handling"), plain),
        "from_table": relation,
        "sample": shaped(_SAMPLE),
    },
    "SET_OPERATION_NODE": {
        **_NODE,
        **dict.fromkeys(("setop_type", "setop_all"), plain),
        "children": each(query_node),
    },
    "RECURSIVE_CTE_NODE": {
        **_NODE,
        **dict.fromkeys(("cte_name", "union_all", "aliases"), plain),
        **dict.fromkeys(("key_targets", "payload_aggregates"), each(expression)),
        "left": query_node,
        "right": query_node,
    },
}

statement: Rule = shaped(_STATEMENT)
