"""Bytes that a query writes as ``'0x…'``: a literal or a parameter of that form is bytes where bytes are beside it.

Bytes of a chain are written that way everywhere, but the engine casts text to bytes letter by letter, so such a
comparison would be false for every row without an error. Whether a column or another expression gives bytes is
known to the engine alone. So the engine decides: the comparison is bound once with that expression in a call that
takes bytes and nothing else. Where that binds, the text is replaced by ``unhex`` of its digits.

Text that is computed, or comes from a column, isn't known before the query runs: beside bytes it is an error in a
query that has such a text anywhere, rather than a comparison that is false for every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from tracelake.domain.errors import Invalid
from tracelake.query.engine.pushdown import StatementParams, given_parameter, hex_digits
from tracelake.query.engine.tree_edits import Place, QueryTree, Tree, call

_PREFIX = "0x"
#: Takes bytes alone, and gives text: the comparison with the literal stays valid.
_TAKES_BYTES = "decode"
#: Takes text alone, and gives text.
_TAKES_TEXT = "lower"
_CONSTANT = {"class": "CONSTANT", "type": "VALUE_CONSTANT"}


@dataclass(frozen=True, slots=True)
class _Comparison:
    """An expression that is compared with such texts."""

    operand: Place
    texts: Sequence[Place]


def with_bytes(connection: duckdb.DuckDBPyConnection, sql: str, params: StatementParams) -> str:
    """The statement to run: ``sql`` itself if it has no such text. Raises ``Invalid`` for half a byte, and for what
    isn't hexadecimal: a mistyped address would be equal to nothing without an error."""
    given = params.values() if isinstance(params, Mapping) else params
    if _PREFIX not in sql.lower() and not any(
        isinstance(value, str) and _prefixed(value) is not None for value in given
    ):
        return sql
    query = QueryTree(connection, sql, params)
    tree = query.fresh()
    total, computed = len(list(_comparisons(tree, params))), len(list(_computed(tree)))
    if not total and not computed:
        return sql
    # An error of the query itself is reported in its own words, before any other text of it is bound.
    query.bind(sql)
    for number in range(computed):
        _must_not_be_text_beside_bytes(query, number)
    chosen = _of_bytes(query, list(range(total))) if total else []
    return _replaced(query, chosen) if chosen else sql


def _must_not_be_text_beside_bytes(query: QueryTree, number: int) -> None:
    tree = query.fresh()
    for (container, key), name in zip(
        list(_computed(tree))[number], (_TAKES_BYTES, _TAKES_TEXT), strict=True
    ):
        container[key] = call(name, container[key])
    try:
        query.bind_edited(tree)
    except duckdb.Error:
        return
    message = "bytes are compared with text that isn't a literal or a parameter: make bytes of it, as in "
    raise Invalid("QueryFailed", f"{message}unhex(substr(address, 3)) for a text like '0xab'")


def _of_bytes(query: QueryTree, numbers: list[int]) -> list[int]:
    """Those of the comparisons whose operand is bytes; mostly all, so they are tried together first."""
    tree = query.fresh()
    found = list(_comparisons(tree, query.params))
    for number in numbers:
        container, key = found[number].operand
        container[key] = call(_TAKES_BYTES, container[key])
    try:
        query.bind_edited(tree)
    except duckdb.BinderException:
        if len(numbers) == 1:
            return []
        half = len(numbers) // 2
        return [number for part in (numbers[:half], numbers[half:]) for number in _of_bytes(query, part)]
    return numbers


def _replaced(query: QueryTree, numbers: list[int]) -> str:
    tree = query.fresh()
    found = list(_comparisons(tree, query.params))
    for number in numbers:
        for container, key in found[number].texts:
            digits = _digits(container[key], query.params) or ""
            if hex_digits(_PREFIX + digits) is None:
                message = f"'0x{digits[:80]}' is compared with bytes, and isn't hexadecimal"
                raise Invalid("QueryFailed", message)
            if len(digits) % 2:
                message = f"'0x{digits[:80]}' is compared with bytes, and has an odd number of digits"
                raise Invalid("QueryFailed", message)
            container[key] = _unhexed(container[key], digits)
    return query.statement(tree)


def _comparisons(tree: Any, params: StatementParams) -> Iterator[_Comparison]:
    """In the same order for equal trees."""
    for operand, others in _all_operands(tree):
        texts = [(place, key) for place, key in others if _digits(place[key], params) is not None]
        if texts and not _is_given(operand):
            yield _Comparison(operand, texts)


def _computed(tree: Any) -> Iterator[tuple[Place, Place]]:
    """Pairs of compared expressions of which none is a literal or a parameter."""
    for operand, others in _all_operands(tree):
        if not _is_given(operand):
            yield from ((operand, other) for other in others if not _is_given(other))


def _is_given(place: Place) -> bool:
    container, key = place
    return container[key].get("class") in ("CONSTANT", "PARAMETER")


def _all_operands(tree: Any) -> Iterator[tuple[Place, list[Place]]]:
    pending = [tree]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(part)
        elif isinstance(part, dict):
            for operand, others in _operands(part):
                yield from _of_rows(operand, others)
            pending.extend(part.values())


def _of_rows(operand: Place, others: list[Place]) -> Iterator[tuple[Place, list[Place]]]:
    """Rows such as ``(hash, 7)`` are compared part by part."""
    rows = [_parts_of_row(container[key]) for container, key in (operand, *others)]
    if any(row is None for row in rows):
        yield operand, others
        return
    for first, *rest in zip(*[row for row in rows if row is not None], strict=False):
        yield first, rest


def _parts_of_row(tree: Tree) -> list[Place] | None:
    match tree:
        case {"class": "FUNCTION", "function_name": "row", "arguments": list(arguments)}:
            return [(argument, "expression") for argument in arguments]
        case _:
            return None


def _operands(part: Tree) -> Iterator[tuple[Place, list[Place]]]:
    match part:
        case {"class": "COMPARISON", "left": _, "right": _}:
            yield (part, "left"), [(part, "right")]
            yield (part, "right"), [(part, "left")]
        case {"class": "BETWEEN", "input": _}:
            yield (part, "input"), [(part, "lower"), (part, "upper")]
        case {"type": "COMPARE_IN" | "COMPARE_NOT_IN", "children": [_, *_] as children}:
            yield (children, 0), [(children, place) for place in range(1, len(children))]


def _digits(tree: Any, params: StatementParams) -> str | None:
    """The text behind the prefix, if this is such a literal or parameter."""
    match tree:
        case {"class": "CONSTANT", "literal": {"kind": "STRING", "text": str(text)}}:
            return _prefixed(text)
        case {"class": "PARAMETER", "identifier": str(identifier)}:
            value = given_parameter(identifier, params)
            return _prefixed(value) if isinstance(value, str) else None
        case _:
            return None


def _prefixed(text: str) -> str | None:
    return text[len(_PREFIX) :] if text.lower().startswith(_PREFIX) else None


def _unhexed(tree: Tree, digits: str) -> Tree:
    if tree["class"] == "CONSTANT":
        # The engine leaves an empty text out of its trees.
        return call("unhex", {**tree, "literal": {"kind": "STRING"} | ({"text": digits} if digits else {})})
    # The parameter stays in the statement: the engine refuses values that no place uses.
    first = {**_CONSTANT, "literal": {"kind": "INTEGER", "text": str(len(_PREFIX) + 1)}}
    return call("unhex", call("substr", tree, first))
