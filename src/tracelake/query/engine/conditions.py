"""A condition of a query as a predicate over one relation, where it says nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tracelake.domain.where import Compare, IsNull, Op, Predicate, Scalar, all_of, any_of, in_list
from tracelake.query.engine.sql_literal import Params, is_null, literal

_OPS = {
    "COMPARE_EQUAL": Op.EQ,
    "COMPARE_NOTEQUAL": Op.NE,
    "COMPARE_LESSTHAN": Op.LT,
    "COMPARE_LESSTHANOREQUALTO": Op.LE,
    "COMPARE_GREATERTHAN": Op.GT,
    "COMPARE_GREATERTHANOREQUALTO": Op.GE,
}
#: A condition that's larger than that is left to the engine; whoever reads the rows has to decide it for each.
_MAX_LISTED = 1000
_MAX_TERMS = 256
_MAX_NESTED = 16


class Scope:
    """The names of one FROM: which qualifiers are unique, and which plain names may mean something else."""

    def __init__(self) -> None:
        self._aliases: Counter[str] = Counter()
        self._hidden: set[str] = set()

    def see(self, alias: str) -> None:
        self._aliases[alias] += 1

    def join(self, relation: Mapping[str, Any]) -> None:
        """The columns that an ASOF join matches by USING need not be equal on both sides."""
        if relation.get("ref_type") == "ASOF":
            self.hide(relation.get("using_columns", ()))

    def hide(self, names: Iterable[str]) -> None:
        self._hidden.update(name.lower() for name in names)

    def column(self, tree: Any, alias: str) -> str | None:
        """The name of a column that belongs to this alias if its relation has one of that name."""
        match tree:
            case {"class": "COLUMN_REF", "column_names": [str(name)]}:
                folded = name.lower()
                return None if folded in self._hidden or folded in self._aliases else folded
            case {"class": "COLUMN_REF", "column_names": [str(owner), str(name)]}:
                return name.lower() if owner.lower() == alias and self._aliases[alias] == 1 else None
            case _:
                return None


def conjuncts(condition: Any) -> list[Any]:
    """The first so many; each of them holds by itself."""
    found: list[Any] = []
    pending = [condition]
    while pending and len(found) < _MAX_TERMS:
        part = pending.pop()
        if part.get("type") == "CONJUNCTION_AND":
            pending.extend(part["children"])
        else:
            found.append(part)
    return found


def pushed(
    tree: Mapping[str, Any], alias: str, scope: Scope, params: Params, depth: int = 0
) -> Predicate | None:
    """What the condition says of the relation's rows; None when it says more or other than a predicate can."""
    match tree:
        case {"type": "CONJUNCTION_OR" | "CONJUNCTION_AND" as kind, "children": children}:
            if depth > _MAX_NESTED or len(children) > _MAX_TERMS:
                return None
            found = [pushed(child, alias, scope, params, depth + 1) for child in children]
            known = [term for term in found if term is not None]
            if kind == "CONJUNCTION_OR":
                return any_of(known) if len(known) == len(found) else None
            return all_of(known) if known else None
        case {"class": "COMPARISON", "type": str(kind), "left": left, "right": right} if kind in _OPS:
            return _compare(scope.column(left, alias), _OPS[kind], literal(right, params)) or _compare(
                scope.column(right, alias), _OPS[kind].flipped, literal(left, params)
            )
        case {"class": "BETWEEN", "input": column, "lower": lower, "upper": upper}:
            name = scope.column(column, alias)
            sides = (
                _compare(name, op, literal(side, params)) for op, side in ((Op.GE, lower), (Op.LE, upper))
            )
            bounds = [side for side in sides if side is not None]
            return all_of(bounds) if bounds else None
        case {"type": "OPERATOR_NOT", "children": [{"type": "COMPARE_IN", "children": [column, *values]}]}:
            return _listed(scope.column(column, alias), values, params, negated=True)
        case {"type": "COMPARE_IN", "children": [column, *values]}:
            return _listed(scope.column(column, alias), values, params, negated=False)
        case {"type": "OPERATOR_IS_NULL" | "OPERATOR_IS_NOT_NULL" as kind, "children": [column]}:
            name = scope.column(column, alias)
            return None if name is None else IsNull(name, negated=kind == "OPERATOR_IS_NOT_NULL")
        case _:
            return None


def _compare(column: str | None, op: Op, value: Scalar | None) -> Predicate | None:
    return None if column is None or value is None else Compare(column, op, value)


def _listed(column: str | None, values: list[Any], params: Params, *, negated: bool) -> Predicate | None:
    """Of one type only: for a mixed list the engine picks a type that all of them can be cast to."""
    if column is None or len(values) > _MAX_LISTED:
        return None
    nulls = [value for value in values if is_null(value)]
    found = [literal(value, params) for value in values]
    known = [value for value in found if value is not None]
    whole = len(known) + len(nulls) == len(values) and bool(known) and not (negated and nulls)
    return in_list(column, known, negated=negated) if whole and len({type(v) for v in known}) == 1 else None
