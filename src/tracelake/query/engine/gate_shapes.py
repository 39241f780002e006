"""The shapes of a query's tree that the gate knows: for each kind of node its keys, for each key what may be there.

The engine leaves out of its tree what is empty or the default (``gate.SERIALIZE``), so a key that isn't listed is
something that nobody asked for or that isn't allowed: a catalog or schema before a name, a point in time of a
table, a command inside a CTE. Either way it's refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tracelake.query.engine.gate_functions import FUNCTIONS, TABLE_FUNCTIONS
from tracelake.query.engine.gate_rules import (
    UNUSUAL,
    Rule,
    Shape,
    check_call,
    check_collation,
    check_column,
    check_relation_name,
    check_type,
    cte_name,
    each,
    plain,
    refused,
    shaped,
    shown,
    steps,
    text_of,
)


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
    """A table reference: what stands in FROM."""
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


_NAMED: Shape = {"path": plain}
_EXPRESSION: Shape = dict.fromkeys(
    ("class", "type", "alias", "query_location", "query_location_length"), plain
)
_STATEMENT: Shape = {"node": query_node, "named_param_map": each(shaped({"key": plain, "value": plain}))}
_ORDER: Shape = {"type": plain, "null_order": plain, "expression": expression}
_ORDERS: Shape = {"type": plain, "orders": each(shaped(_ORDER))}
_ARGUMENT: Shape = {"name": plain, "expression": expression}
_COLUMN: Shape = dict.fromkeys(("catalog", "schema", "table", "column"), plain)
_FUNCTION: Shape = {
    **_EXPRESSION,
    **dict.fromkeys(("function_name", "distinct", "is_operator"), plain),
    "qualified_name": shaped(_NAMED),
    "arguments": each(shaped(_ARGUMENT)),
    "filter": expression,
    "order_bys": shaped(_ORDERS),
}
_WINDOW: Shape = {
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
_STAR: Shape = {
    **_EXPRESSION,
    **dict.fromkeys(("relation_name", "exclude_list", "columns"), plain),
    "expr": expression,
    "replace_list": each(shaped({"key": plain, "value": expression})),
    "qualified_exclude_list": each(shaped(_COLUMN)),
    "rename_list": each(shaped({"key": shaped(_COLUMN), "value": plain})),
}
_CHILDREN: Shape = {**_EXPRESSION, "children": each(expression)}
_COMPARISON: Shape = {**_EXPRESSION, "left": expression, "right": expression}
_CHECK: Shape = {"when_expr": expression, "then_expr": expression}
_LITERAL: Shape = {"kind": plain, "text": plain}

_EXPRESSIONS: Mapping[tuple[str, str], Shape] = {
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

_SAMPLE: Shape = {
    **dict.fromkeys(("is_percentage", "method", "seed", "repeatable", "sample_rate"), plain),
    "sample_size": shaped({"type": shaped({"id": plain}), "is_null": plain, "value": plain}),
}
_UNNAMED: Shape = {
    **dict.fromkeys(("type", "query_location", "query_location_length"), plain),
    "sample": shaped(_SAMPLE),
}
_RELATION: Shape = {**_UNNAMED, "alias": plain, "column_name_alias": plain}
_RELATIONS: Mapping[str, Shape] = {
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
_MODIFIERS: Mapping[str, Shape] = {
    "ORDER_MODIFIER": _ORDERS,
    "LIMIT_MODIFIER": {"type": plain, "limit": expression, "offset": expression, "limit_type": plain},
    "DISTINCT_MODIFIER": {"type": plain, "distinct_on_targets": each(expression)},
}
_CTE: Shape = {
    **dict.fromkeys(("aliases", "materialized"), plain),
    **dict.fromkeys(("key_targets", "payload_aggregates"), each(expression)),
    "query_node": query_node,
}
_NODE: Shape = {
    "type": plain,
    "modifiers": each(_modifier),
    "cte_map": shaped({"map": each(shaped({"key": cte_name, "value": shaped(_CTE)}))}),
}
_NODES: Mapping[str, Shape] = {
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
