"""What a query needs of each relation: columns that it may name, and a condition that every row it can use fulfils.

Conservative in both. Columns: every name that could be a column of the relation, all of them where ``*``, COLUMNS,
NATURAL or a whole row is used. Conditions: comparisons with constants from WHERE and JOIN … ON, taken to a relation
only where an unfulfilled row can't show in the answer — the preserved side of an outer join for WHERE, the other
one for ON — and only in the SELECT that reads it, never through a subquery or CTE. A relation that is read in
several places needs the rows of each.

A name without a qualifier may belong to any relation of its FROM. It goes to all of them: those that have no such
column drop it (``fit_relation``), and if several have it, the engine refuses the query as ambiguous.

Takes trees that the gate has accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tracelake.domain.where import Predicate, all_of, any_of
from tracelake.query.engine.conditions import Scope, conjuncts, pushed
from tracelake.query.engine.parsed_query import RelationUse
from tracelake.query.engine.sql_literal import Params

_INNER, _LEFT, _RIGHT = "INNER", "LEFT", "RIGHT"
#: Which sides of a join keep a row only together with what WHERE says of it.
_WHERE_SIDES = {
    _INNER: ("left", "right"),
    _LEFT: ("left",),
    _RIGHT: ("right",),
    "SEMI": ("left",),
    "ANTI": ("left",),
}
#: Which sides lose nothing when rows are left out that ON can't match.
_ON_SIDES = {
    _INNER: ("left", "right"),
    _LEFT: ("right",),
    _RIGHT: ("left",),
    "SEMI": ("left", "right"),
    "ANTI": ("right",),
}


@dataclass(slots=True, eq=False)
class _Use:
    """One place in the query where a relation is read."""

    name: str
    alias: str
    renamed: bool
    all_columns: bool
    terms: list[Predicate] = field(default_factory=list)


@dataclass(slots=True)
class _Names:
    """Names in column references of the whole query: scopes are left out, which can only name too much."""

    single: set[str] = field(default_factory=set)
    qualified: dict[str, set[str]] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)

    def add(self, parts: list[str]) -> None:
        folded = [part.lower() for part in parts]
        self.single.add(folded[0])
        self.rows.add(folded[-1])
        for qualifier, name in pairwise(folded):
            self.qualified.setdefault(qualifier, set()).add(name)

    def of(self, use: _Use) -> set[str] | None:
        called = {use.name, use.alias}
        if use.all_columns or called & self.rows:
            return None
        return self.single.union(*(self.qualified.get(name, ()) for name in called))


def relation_uses(node: Mapping[str, Any], params: Params = ()) -> dict[str, RelationUse]:
    """By name, in the order of the names."""
    query = _Query(params)
    query.read(node)
    return {name: query.use_of(name) for name in sorted({use.name for use in query.uses})}


class _Query:
    def __init__(self, params: Params) -> None:
        self.uses: list[_Use] = []
        self._params = params
        self._names = _Names()
        self._cte_names: set[str] = set()
        self._pending: list[tuple[Mapping[str, Any], frozenset[str]]] = []

    def use_of(self, name: str) -> RelationUse:
        """A name that is a CTE elsewhere in the query gets no condition: nothing depends on telling them apart."""
        places = [use for use in self.uses if use.name == name]
        if name in self._cte_names:
            return RelationUse()
        found = [self._names.of(use) for use in places]
        known = [columns for columns in found if columns is not None]
        columns = tuple(sorted(set().union(*known))) if len(known) == len(found) else None
        needed = all(use.terms for use in places)
        return RelationUse(columns, any_of(all_of(use.terms) for use in places) if needed else None)

    def read(self, node: Mapping[str, Any]) -> None:
        self._pending.append((node, frozenset()))
        while self._pending:
            self._node(*self._pending.pop())

    def _node(self, node: Mapping[str, Any], outer: frozenset[str]) -> None:
        ctes = outer
        for entry in node.get("cte_map", {}).get("map", ()):
            self._pending.append((entry["value"]["query_node"], ctes))
            self._expressions(
                [entry["value"].get("key_targets"), entry["value"].get("payload_aggregates")], ctes
            )
            ctes |= {entry["key"].lower()}
        self._cte_names |= ctes
        match node["type"]:
            case "SELECT_NODE":
                self._select(node, ctes)
            case "SET_OPERATION_NODE":
                self._pending.extend((child, ctes) for child in node["children"])
                self._expressions([node.get("modifiers")], ctes)
            case "RECURSIVE_CTE_NODE":
                own = node["cte_name"].lower()
                self._cte_names.add(own)
                self._pending += [(node["left"], ctes), (node["right"], ctes | {own})]
                self._expressions([node.get("modifiers"), node.get("key_targets")], ctes)

    def _select(self, node: Mapping[str, Any], ctes: frozenset[str]) -> None:
        placed: dict[int, _Use] = {}
        expressions: list[Any] = [
            node.get(key)
            for key in ("select_list", "where_clause", "group_expressions", "having", "qualify", "modifiers")
        ]
        scope = Scope()
        every_column = False
        for relation in _relations(node["from_table"]):
            match relation["type"]:
                case "BASE_TABLE" if relation["table_name"].lower() not in ctes:
                    use = _use(relation)
                    placed[id(relation)] = use
                    scope.see(use.alias)
                case "SUBQUERY":
                    self._pending.append((relation["subquery"]["node"], ctes))
                    scope.see(relation.get("alias", "").lower())
                case "JOIN":
                    expressions.append(relation.get("condition"))
                    self._names.single.update(name.lower() for name in relation.get("using_columns", ()))
                    every_column |= relation.get("ref_type") == "NATURAL"
                    scope.join(relation)
                case _:
                    expressions += [relation.get("function"), relation.get("values")]
                    scope.see((relation.get("alias") or relation.get("table_name", "")).lower())
        every_column |= self._expressions(expressions, ctes)
        for use in placed.values():
            use.all_columns |= every_column
        self.uses += placed.values()
        self._push(node, placed, scope)

    def _push(self, node: Mapping[str, Any], placed: Mapping[int, _Use], scope: Scope) -> None:
        if "sample" in node:
            return
        for relation in _relations(node["from_table"]):
            if (
                relation["type"] == "JOIN"
                and "condition" in relation
                and relation.get("ref_type") == "REGULAR"
            ):
                for side in _ON_SIDES.get(relation["join_type"], ()):
                    self._push_terms(relation["condition"], _reached(relation[side], placed), scope)
        if "where_clause" in node:
            scope.hide(entry.get("alias", "") for entry in node["select_list"])
            self._push_terms(node["where_clause"], _reached(node["from_table"], placed), scope)

    def _push_terms(self, condition: Any, uses: Iterator[_Use], scope: Scope) -> None:
        terms = conjuncts(condition)
        for use in uses:
            found = (pushed(term, use.alias, scope, self._params) for term in terms)
            use.terms += [term for term in found if term is not None]

    def _expressions(self, parts: list[Any], ctes: frozenset[str]) -> bool:
        """Note names and subqueries; whether anything stands for all columns of the FROM around it."""
        every_column = False
        pending = parts
        while pending:
            part = pending.pop()
            if isinstance(part, list):
                pending.extend(part)
            elif isinstance(part, dict):
                match part.get("class"):
                    case "COLUMN_REF":
                        self._names.add(part["column_names"])
                        continue
                    case "CONSTANT":
                        continue
                    case "SUBQUERY":
                        self._pending.append((part["subquery"]["node"], ctes))
                        pending.append(part.get("child"))
                        continue
                    case "STAR":
                        every_column |= self._star(part)
                    case "POSITIONAL_REFERENCE":
                        every_column = True
                pending.extend(part.values())
        return every_column

    def _star(self, part: Mapping[str, Any]) -> bool:
        owner = part.get("relation_name", "").lower()
        if not owner:
            return True
        self._names.single.add(owner)
        self._names.rows.add(owner)
        return False


def _use(relation: Mapping[str, Any]) -> _Use:
    name = relation["table_name"].lower()
    renamed = "column_name_alias" in relation
    return _Use(name, (relation.get("alias") or name).lower(), renamed, all_columns=renamed)


def _relations(relation: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A FROM's parts: the joins and what they join, without a look into subqueries."""
    pending = [relation]
    while pending:
        part = pending.pop()
        yield part
        if part["type"] == "JOIN":
            pending += [part["right"], part["left"]]


def _reached(relation: Mapping[str, Any], placed: Mapping[int, _Use]) -> Iterator[_Use]:
    """Uses below that a condition above may filter; a sample is taken of all rows or it's another sample."""
    pending = [relation]
    while pending:
        part = pending.pop()
        if "sample" in part:
            continue
        if part["type"] == "JOIN":
            positional = part.get("ref_type") == "POSITIONAL"
            sides = () if positional else _WHERE_SIDES.get(part["join_type"], ())
            pending += [part[side] for side in sides if side == "left" or part.get("ref_type") != "ASOF"]
        elif id(part) in placed and not placed[id(part)].renamed:
            yield placed[id(part)]
