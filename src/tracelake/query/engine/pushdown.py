"""The columns and rows of each relation that a query can need, found in its tree without a schema.

Both are conservative. Columns: every name that could be a column of the relation, or all columns where ``*``,
COLUMNS, NATURAL or a whole row is used. Rows: a condition made of comparisons with constants from WHERE and JOIN …
ON, applied to a relation only where a row that fails it can't affect the answer (the preserved side of an outer
join for WHERE, the other one for ON), and only in the SELECT that reads the relation, never through a subquery or
CTE. A relation that is read in several places needs the rows of each.

A name without a qualifier may belong to any relation of its FROM, so it goes to all of them: those that have no
such column drop it (``fit_relation``), and if several have it, the engine refuses the query as ambiguous.

Literals become scalars that ``fit_relation`` reads once it knows the column's type. Numbers and truth values stand
for themselves; a decimal fraction only when a double holds it exactly enough to differ from its neighbours. Text
stands for itself unless it has a backslash, which marks values whose type the query gives: ``\\x0a0b`` is bytes,
``\\timestamp …``, ``\\timestamptz …`` and ``\\date …`` are points in time. Other literals aren't pushed down.

The trees have been accepted by the gate.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from tracelake.domain.where import Compare, IsNull, Op, Predicate, WhereValue, all_of, any_of, in_list
from tracelake.query.engine.messages import RelationUse

_OPS = {
    "COMPARE_EQUAL": Op.EQ,
    "COMPARE_NOTEQUAL": Op.NE,
    "COMPARE_LESSTHAN": Op.LT,
    "COMPARE_LESSTHANOREQUALTO": Op.LE,
    "COMPARE_GREATERTHAN": Op.GT,
    "COMPARE_GREATERTHANOREQUALTO": Op.GE,
}
#: A larger condition is left to the engine: the readers would have to evaluate it for each row.
_MAX_LISTED = 1000
_MAX_TERMS = 256
_MAX_NESTED = 16
StatementParams: TypeAlias = Sequence[Any] | Mapping[str, Any]
_INTEGER = re.compile(r"-?[0-9]{1,78}\Z")
_FRACTION = re.compile(r"-?[0-9]*\.[0-9]*\Z")
_HEX_TEXT = re.compile(r"0x([0-9a-f]*)\Z", re.IGNORECASE)
_HEX = re.compile(r"([0-9a-fA-F]{2})*\Z")
_BLOB_TEXT = re.compile(r"(?:\\x[0-9a-fA-F]{2}|[\x20-\x5b\x5d-\x7e])*\Z")
_BLOB_PART = re.compile(r"\\x([0-9a-fA-F]{2})|(.)", re.DOTALL)
_DIGITS_OF_A_DOUBLE = 15
_TYPED = {
    "timestamp": "timestamp",
    "datetime": "timestamp",
    "timestamptz": "timestamptz",
    "timestamp with time zone": "timestamptz",
    "date": "date",
}
_INNER, _LEFT, _RIGHT = "INNER", "LEFT", "RIGHT"
#: Sides of a join whose rows WHERE filters as they are.
_WHERE_SIDES = {
    _INNER: ("left", "right"),
    _LEFT: ("left",),
    _RIGHT: ("right",),
    "SEMI": ("left",),
    "ANTI": ("left",),
}
#: Sides of a join that may leave out rows that ON can't match.
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
    """Names in column references of the whole query. Scopes are ignored, which can only add names."""

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


def relation_uses(node: Mapping[str, Any], params: StatementParams = ()) -> dict[str, RelationUse]:
    """The use of each relation by its name, sorted."""
    query = _Query(params)
    query.read(node)
    return {name: query.process_key(name) for name in sorted({use.name for use in query.uses})}


class _Query:
    def __init__(self, params: StatementParams) -> None:
        self.uses: list[_Use] = []
        self._params = params
        self._names = _Names()
        self._cte_names: set[str] = set()
        self._pending: list[tuple[Mapping[str, Any], frozenset[str]]] = []

    def process_key(self, name: str) -> RelationUse:
        """A name that is also a CTE somewhere in the query gets no condition, so scopes need not be resolved."""
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
        scope = NameScope()
        every_column = False
        for relation in _relations(node["from_table"]):
            match relation["type"]:
                case "BASE_TABLE" if relation["table_name"].lower() not in ctes:
                    use = _use(relation)
                    # By identity: a relation that is read twice has
                    # two equal trees, and each is a use of its own.
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

    def _push(self, node: Mapping[str, Any], placed: Mapping[int, _Use], scope: NameScope) -> None:
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
            # The engine lets WHERE use aliases of the SELECT list, so such a name may not be a column.
            scope.hide(entry.get("alias", "") for entry in node["select_list"])
            self._push_terms(node["where_clause"], _reached(node["from_table"], placed), scope)

    def _push_terms(self, condition: Any, uses: Iterator[_Use], scope: NameScope) -> None:
        terms = conjuncts(condition)
        for use in uses:
            found = (pushed(term, use.alias, scope, self._params) for term in terms)
            use.terms += [term for term in found if term is not None]

    def _expressions(self, parts: list[Any], ctes: frozenset[str]) -> bool:
        """Collect names and subqueries. Returns whether any part stands for all columns of the FROM around it."""
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
    """The joins of a FROM and the relations that they join; subqueries aren't entered."""
    pending = [relation]
    while pending:
        part = pending.pop()
        yield part
        if part["type"] == "JOIN":
            pending += [part["right"], part["left"]]


def _reached(relation: Mapping[str, Any], placed: Mapping[int, _Use]) -> Iterator[_Use]:
    """Uses below a FROM's part that its condition may filter. Sampled relations are left out: a sample of fewer
    rows would be another sample."""
    pending = [relation]
    while pending:
        part = pending.pop()
        if "sample" in part:
            continue
        if part["type"] == "JOIN":
            # Rows that are matched by position would shift if one was left out.
            positional = part.get("ref_type") == "POSITIONAL"
            sides = () if positional else _WHERE_SIDES.get(part["join_type"], ())
            # ASOF takes the nearest row of the right side: without that row it would take another.
            pending += [part[side] for side in sides if side == "left" or part.get("ref_type") != "ASOF"]
        elif id(part) in placed and not placed[id(part)].renamed:
            yield placed[id(part)]


class NameScope:
    """The names of one FROM: which qualifiers are unique, and which unqualified names may be something else."""

    def __init__(self) -> None:
        self._aliases: Counter[str] = Counter()
        self._hidden: set[str] = set()

    def see(self, alias: str) -> None:
        self._aliases[alias] += 1

    def join(self, relation: Mapping[str, Any]) -> None:
        """Hides the columns that an ASOF join matches by USING: they need not be equal on both sides."""
        if relation.get("ref_type") == "ASOF":
            self.hide(relation.get("using_columns", ()))

    def hide(self, names: Iterable[str]) -> None:
        self._hidden.update(name.lower() for name in names)

    def column(self, tree: Any, alias: str) -> str | None:
        """The column's name if it belongs to this alias, provided that the relation has such a column; or None."""
        match tree:
            case {"class": "COLUMN_REF", "column_names": [str(name)]}:
                folded = name.lower()
                return None if folded in self._hidden or folded in self._aliases else folded
            case {"class": "COLUMN_REF", "column_names": [str(owner), str(name)]}:
                return name.lower() if owner.lower() == alias and self._aliases[alias] == 1 else None
            case _:
                return None


def conjuncts(condition: Any) -> list[Any]:
    """The terms of an AND, at most ``_MAX_TERMS``: each of them holds by itself, so leaving some out is safe."""
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
    tree: Mapping[str, Any], alias: str, scope: NameScope, params: StatementParams, depth: int = 0
) -> Predicate | None:
    """The condition as a predicate over the relation's rows; None when a predicate can't express it."""
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


def _compare(column: str | None, op: Op, value: WhereValue | None) -> Predicate | None:
    return None if column is None or value is None else Compare(column, op, value)


def _listed(
    column: str | None, values: list[Any], params: StatementParams, *, negated: bool
) -> Predicate | None:
    """A list of values of one type. For a mixed list the engine would pick a type that all can be cast to."""
    if column is None or len(values) > _MAX_LISTED:
        return None
    nulls = [value for value in values if is_null(value)]
    found = [literal(value, params) for value in values]
    known = [value for value in found if value is not None]
    # A NULL in IN matches no row, but in NOT IN it decides about every row.
    whole = len(known) + len(nulls) == len(values) and bool(known) and not (negated and nulls)
    return in_list(column, known, negated=negated) if whole and len({type(v) for v in known}) == 1 else None


def literal(tree: Any, params: StatementParams) -> WhereValue | None:
    """The value of a constant expression; None when it isn't one, is NULL, or has no exact scalar."""
    match tree:
        case {"class": "CONSTANT", "literal": {"kind": kind, **rest}}:
            return _constant(str(kind), str(rest.get("text", "")))
        case {"class": "PARAMETER", "identifier": str(identifier)}:
            return _given(given_parameter(identifier, params))
        case {"class": "CAST", "child": child, "type_expr": {"type_name": str(name)} as type_}:
            if "children" in type_ or tree.get("try_cast"):
                return None
            return _cast(name.lower(), _string(child))
        case {
            "class": "FUNCTION",
            "function_name": "unhex" | "from_hex",
            "arguments": [{"expression": child}],
        }:
            text = _string(child)
            return None if text is None else _bytes(text)
        case _:
            return None


def is_null(tree: Any) -> bool:
    match tree:
        case {"class": "CONSTANT", "literal": {"kind": "NULL_LITERAL"}}:
            return True
        case _:
            return False


def _constant(kind: str, text: str) -> WhereValue | None:
    match kind:
        case "INTEGER":
            return int(text) if _INTEGER.match(text) else None
        case "NUMERIC":
            digits = text.strip("-").replace(".", "")
            exact = _FRACTION.match(text) and digits and len(digits) <= _DIGITS_OF_A_DOUBLE
            return float(text) if exact else None
        case "BOOLEAN":
            return text.lower() == "true"
        case "STRING":
            return _text(text)
        case "HEX":
            return _bytes(text)
        case _:
            return None


def _cast(name: str, text: str | None) -> WhereValue | None:
    if text is None:
        return None
    if name in ("blob", "bytea", "binary", "varbinary"):
        return blob(text)
    kind = _TYPED.get(name)
    return None if kind is None else f"\\{kind} {text}"


def compared_bytes(text: str) -> str | None:
    """Text beside bytes: ``0x…`` is their digits, any other text is cast by the engine."""
    digits = hex_digits(text)
    return blob(text) if digits is None else _bytes(digits)


def blob(text: str) -> str | None:
    """Text as the engine casts it to bytes: ASCII, and ``\\xNN`` for one byte."""
    if not _BLOB_TEXT.match(text):
        return None
    octets = bytes(int(pair, 16) if pair else ord(char) for pair, char in _BLOB_PART.findall(text))
    return "\\x" + octets.hex()


def hex_digits(text: str) -> str | None:
    """The digits of a text that is ``0x`` and hexadecimal digits, which is bytes where it is compared with bytes
    (``hex_literals``)."""
    found = _HEX_TEXT.match(text)
    return None if found is None else found[1]


def _bytes(digits: str) -> str | None:
    return "\\x" + digits.lower() if _HEX.match(digits) else None


def _text(text: str) -> str | None:
    return None if "\\" in text or "\0" in text else text


def _string(tree: Any) -> str | None:
    match tree:
        case {"class": "CONSTANT", "literal": {"kind": "STRING", **rest}}:
            return str(rest.get("text", ""))
        case _:
            return None


def given_parameter(identifier: str, params: StatementParams) -> Any:
    """The value of a parameter; None if there is none."""
    if isinstance(params, Mapping):
        # The engine ignores case in parameter names (``query_api.from_wire``).
        return {name.lower(): value for name, value in params.items()}.get(identifier.lower())
    index = int(identifier) if identifier.isascii() and identifier.isdigit() else 0
    return params[index - 1] if 1 <= index <= len(params) else None


def _given(value: Any) -> WhereValue | None:
    match value:
        case bytes():
            return _bytes(value.hex())
        case str():
            return _text(value)
        # Before ``int``, since a ``bool`` is one.
        case bool():
            return value
        case int():
            return value if abs(value) < 2**256 else None
        case float():
            return value if math.isfinite(value) else None
        case _:
            return None
