"""Exact sums of wide integers from their digit columns: as fast as sums of BIGINT.

A wide integer is a BIGNUM that the engine parses from text, for each row. Files have its digits beside it, in
pieces of 64 bits (``evm.digit_columns``). So in the statement's tree

    sum(value)  becomes  sum(low), sum(middle) and sum(rest), put together once for each group

where ``value`` is such a column of a relation in the FROM of that very SELECT, or one that a subquery or CTE there
passes on as it is, row by row; then it passes on the pieces too. The relation is read through a second view
(``digit_views``), which has them. A name in a call of ``sum`` is a column of FROM first, and if two relations had
it the engine would refuse the query, so it is known what it stands for.

Whatever isn't certain stays as it is written, which is slower and gives the same: ``sum(DISTINCT …)``, windows, a
SELECT that names all columns by ``*``, a row as a whole, a NATURAL join, a column that USING merges, one that a
subquery computes, groups or makes distinct. The rewritten statement passes the gate like any other, and must have
the columns and types of the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from tracelake.domain.errors import TracelakeError
from tracelake.query.engine.attach import AttachedView
from tracelake.query.engine.digit_views import PIECES, ZEROS, DigitsView, piece_name
from tracelake.query.engine.pushdown import StatementParams
from tracelake.query.engine.tree_edits import Place, QueryTree, Tree, call
from tracelake.tables.wide_integers import integers_with_digits

_SUM = "sum"
#: Functions that a copied condition may call; others might give another value for each call.
_REPEATABLE = frozenset(
    {"unhex", "from_hex", "lower", "upper", "substr", "substring", "length", "date_trunc"}
)
#: Parts of a SELECT besides FROM that hold expressions of its own scope.
_OWN = ("select_list", "where_clause", "group_expressions", "having", "qualify", "modifiers")
#: The edit takes about 10 ms, in which the engine parses the numbers of a file of this size.
_WORTHWHILE = 4 * 1024 * 1024


def with_digit_sums(
    connection: duckdb.DuckDBPyConnection,
    sql: str,
    params: StatementParams,
    views: Sequence[AttachedView],
    *,
    worthwhile: int = _WORTHWHILE,
) -> str:
    """The statement to run: ``sql`` itself if it has no such sum, or only of files with fewer bytes than are
    ``worthwhile``."""
    if _SUM not in sql.lower():
        return sql
    with_digits = {}
    for number, view in enumerate(views):
        integers = integers_with_digits(view.relation.columns)
        found = DigitsView(connection, view, f"tracelake_{number}_digits", integers)
        if integers and view.files and found.bytes >= worthwhile:
            with_digits[view.relation.name.lower()] = found
    if not with_digits:
        return sql
    try:
        return _rewritten(QueryTree(connection, sql, params), with_digits)
    except (duckdb.Error, TracelakeError, RecursionError, pa.ArrowException, OSError):
        # Whatever is wrong with the query itself is found, and reported in its own words, when it is run.
        return sql


@dataclass(slots=True)
class _Read:
    """One place in a FROM where a summable relation is read, and the name that its columns are qualified with."""

    relation: DigitsView
    tree: Tree
    alias: str

    def finds(self, name: str) -> str | None:
        return self.relation.integer(name)

    def pieces(self, integer: str) -> _Pieces:
        self.relation.use()
        self.tree["table_name"] = self.relation.name
        self.tree["qualified_name"] = {"path": [self.relation.name]}
        self.tree["alias"] = self.alias
        return _Pieces(self.alias, integer, integer in self.relation.with_rest)


@dataclass(slots=True)
class _Passed:
    """A subquery or CTE in a FROM. A column of it may be an integer of what it reads, row by row."""

    select: _Select
    alias: str

    def finds(self, name: str) -> str | None:
        return name if self.select.passes(name) is not None else None

    def pieces(self, name: str) -> _Pieces:
        return _Pieces(self.alias, name, self.select.pass_pieces(name))


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The pieces of an integer as columns of a FROM."""

    alias: str
    integer: str
    with_rest: bool

    def column(self, piece: str) -> Tree:
        names = [*([self.alias] if self.alias else []), piece_name(piece, self.integer)]
        return {"class": "COLUMN_REF", "type": "COLUMN_REF", "column_names": names}


def _rewritten(query: QueryTree, relations: Mapping[str, DigitsView]) -> str:
    tree = query.fresh()
    statement = _Statement(tree, relations)
    names = [_names(query, select.node) for select in statement.selects.values()]
    edited = [select.rewrite() for select in list(statement.selects.values())]
    if not any(edited):
        return query.sql
    for select, before in zip(statement.selects.values(), names, strict=True):
        items = select.node["select_list"]
        for place, name in before.items():
            # A column is called like its expression, which is another one now.
            if query.text(items[place]) != name:
                items[place]["alias"] = name
    bound = query.bind(query.sql)
    sql = query.statement(tree)
    again = query.bind(sql)
    same = bound.columns == again.columns and list(map(str, bound.types)) == list(map(str, again.types))
    return sql if same else query.sql


def _parts(tree: Any) -> Iterator[Tree]:
    pending = [tree]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending.extend(part)
        elif isinstance(part, dict):
            yield part
            pending.extend(part.values())


def _names(query: QueryTree, select: Tree) -> dict[int, str]:
    """The names of those columns that an edit of the SELECT, or of a subquery in it, could change."""
    return {
        place: query.text(item)
        for place, item in enumerate(select["select_list"])
        if "alias" not in item and any(map(_is_plain_sum, _parts(item)))
    }


class _Statement:
    """All SELECTs, by the identity of their trees. A CTE counts if its name is the only one of its kind, and every
    SELECT that reads it can have columns more there."""

    def __init__(self, tree: Tree, relations: Mapping[str, DigitsView]) -> None:
        parts = list(_parts(tree))
        entries = [entry for part in parts for entry in part.get("cte_map", {}).get("map", ())]
        recursive = [part["cte_name"].lower() for part in parts if "cte_name" in part]
        named = [entry["key"].lower() for entry in entries]
        self.relations = {
            name: relation for name, relation in relations.items() if name not in (*named, *recursive)
        }
        nodes = [part for part in parts if part.get("type") == "SELECT_NODE"]
        self.selects = {id(node): _Select(node, self) for node in nodes}
        self._passing: dict[str, bool] = {}
        self._ctes = {
            name: entry["value"]["query_node"]
            for name, entry in zip(named, entries, strict=True)
            if named.count(name) == 1 and name not in recursive and "aliases" not in entry["value"]
        }

    def cte(self, name: str) -> _Select | None:
        node = self._ctes.get(name)
        return None if node is None else self.selects.get(id(node))

    def can_pass(self, name: str) -> bool:
        """Whether every SELECT that reads this CTE names its columns."""
        if name not in self._passing:
            readers = [select for select in self.selects.values() if name in select.tables]
            whole = any(not select.names_columns or select.reads_whole(name) for select in readers)
            self._passing[name] = not whole
        return self._passing[name]


class _Select:
    """One SELECT of the statement; its subqueries are others."""

    def __init__(self, node: Tree, statement: _Statement) -> None:
        self.node = node
        self._statement = statement
        self._sources: list[Tree] = []
        self._merged: set[str] = set()
        self._passed: dict[str, bool] = {}
        self._known: dict[str, tuple[_Read | _Passed, str] | None] = {}
        self._reads: list[_Read | _Passed] | None = None
        self._own = [node.get(key) for key in _OWN]
        natural = self._look(node.get("from_table", {}))
        #: Whether a column more in its FROM changes nothing.
        self.names_columns = not natural and not any(
            part.get("class") in ("STAR", "POSITIONAL_REFERENCE")
            for part in _own_parts(self._own, lambdas=True)
        )
        self.tables = {source["table_name"].lower() for source in self._sources if "table_name" in source}

    def _look(self, relation: Tree) -> bool:
        """Collect what FROM reads. Returns whether a join is by all columns of equal names."""
        match relation:
            case {"type": "JOIN", "left": left, "right": right}:
                self._merged.update(name.lower() for name in relation.get("using_columns", ()))
                self._own.append(relation.get("condition"))
                return any([relation.get("ref_type") == "NATURAL", self._look(left), self._look(right)])
            case {"type": "BASE_TABLE" | "SUBQUERY"}:
                self._sources.append(relation)
            case _:
                self._own += [relation.get("function"), relation.get("values")]
        return False

    @property
    def reads(self) -> list[_Read | _Passed]:
        """What it reads, as far as that may have integers with digits."""
        if self._reads is None:
            found = map(self._read, self._sources) if self.names_columns else ()
            self._reads = [read for read in found if read is not None]
        return self._reads

    def _read(self, source: Tree) -> _Read | _Passed | None:
        table = str(source.get("table_name", ""))
        name, alias = table.lower(), str(source.get("alias", table))
        if "column_name_alias" in source or (alias and self._is_value(alias.lower())):
            return None
        if source["type"] == "SUBQUERY":
            select = self._statement.selects.get(id(source["subquery"]["node"]))
            return None if select is None else _Passed(select, alias)
        if (relation := self._statement.relations.get(name)) is not None:
            return _Read(relation, source, alias)
        select = self._statement.cte(name)
        return _Passed(select, alias) if select is not None and self._statement.can_pass(name) else None

    def reads_whole(self, name: str) -> bool:
        """Whether a row of this table is a value: it would have the digits too."""
        aliases = [
            each.get("alias", name).lower()
            for each in self._sources
            if each.get("table_name", "").lower() == name
        ]
        return any(map(self._is_value, aliases))

    def _is_value(self, alias: str) -> bool:
        """Here or in a subquery."""
        return any(
            (part.get("class") == "COLUMN_REF" and part["column_names"][-1].lower() == alias)
            or (part.get("class") == "STAR" and part.get("relation_name", "").lower() == alias)
            for part in _parts(self.node)
        )

    def rewrite(self) -> bool:
        """Whether anything was rewritten; the tree is changed in place."""
        edits = []
        for container, key in _sums(self._own):
            found = self._column(container[key]["arguments"][0]["expression"])
            if found is not None:
                edits.append((container, key, *found))
        for container, key, read, integer in edits:
            container[key] = _put_together(container[key], read.pieces(integer))
        return bool(edits)

    def _column(self, reference: Tree) -> tuple[_Read | _Passed, str] | None:
        """What a column of FROM is an integer of, and which."""
        names = [name.lower() for name in reference["column_names"]]
        if len(names) > 2 or names[-1] in self._merged:
            return None
        found = [
            (read, integer)
            for read in self.reads
            if (len(names) == 1 or names[0] == read.alias.lower())
            and (integer := read.finds(names[-1])) is not None
        ]
        return found[0] if len(found) == 1 else None

    def passes(self, name: str) -> tuple[_Read | _Passed, str] | None:
        """What its column of this name is an integer of, if it is that for each row by itself."""
        # Remembered: a chain of CTEs that each read the one before twice would be followed in every way.
        if name not in self._known:
            self._known[name] = self._find_passed(name)
        return self._known[name]

    def _find_passed(self, name: str) -> tuple[_Read | _Passed, str] | None:
        node = self.node
        grouped = any(key in node for key in ("group_expressions", "group_sets", "having"))
        distinct = any(each["type"] == "DISTINCT_MODIFIER" for each in node.get("modifiers", ()))
        if grouped or distinct or node.get("aggregate_handling") != "STANDARD_HANDLING":
            return None
        items = [item for item in node["select_list"] if _output_name(item) == name]
        plain = len(items) == 1 and items[0].get("class") == "COLUMN_REF"
        return self._column(items[0]) if plain else None

    def pass_pieces(self, name: str) -> bool:
        """Give the column's pieces as columns too. Returns whether there may be a rest."""
        if name not in self._passed:
            found = self.passes(name)
            assert found is not None
            read, integer = found
            pieces = read.pieces(integer)
            added = [pieces.column(piece) | {"alias": piece_name(piece, name)} for piece in PIECES]
            self.node["select_list"] += added
            self._passed[name] = pieces.with_rest
        return self._passed[name]


def _output_name(item: Tree) -> str | None:
    name = item.get("alias") or (item["column_names"][-1] if item.get("class") == "COLUMN_REF" else None)
    return None if name is None else str(name).lower()


def _own_parts(own: list[Any], *, lambdas: bool) -> Iterator[Tree]:
    """Parts in the scope of the SELECT itself."""
    return (container[key] for container, key in _own_places(own, lambdas=lambdas))


def _own_places(own: list[Any], *, lambdas: bool) -> Iterator[Place]:
    pending: list[Any] = [own]
    while pending:
        part = pending.pop()
        entries = enumerate(part) if isinstance(part, list) else part.items()
        for key, value in entries:
            if isinstance(value, dict):
                yield part, key
                # Names of a subquery, and of a lambda's own variables, have a scope of their own.
                if value.get("class") == "SUBQUERY":
                    pending.append([value.get("child")])
                elif lambdas or value.get("class") != "LAMBDA":
                    pending.append(value)
            elif isinstance(value, list):
                pending.append(value)


def _sums(own: list[Any]) -> list[Place]:
    return [
        (container, key)
        for container, key in _own_places(own, lambdas=False)
        if _is_plain_sum(container[key])
    ]


def _is_plain_sum(part: Tree) -> bool:
    match part:
        case {
            "class": "FUNCTION",
            "function_name": str(name),
            "arguments": [{"expression": {"class": "COLUMN_REF"}} as argument],
        }:
            ordered = part.get("order_bys", {}).get("orders")
            plain = not part.get("distinct") and not ordered and "name" not in argument
            return name.lower() == _SUM and plain and _is_repeatable(part.get("filter"))
        case _:
            return False


def _is_repeatable(condition: Any) -> bool:
    """Whether a FILTER surely gives the same for each of the sums that it is copied to."""
    return not any(
        part.get("class") == "SUBQUERY"
        or (
            part.get("class") == "FUNCTION"
            and not part.get("is_operator")
            and part["function_name"].lower() not in _REPEATABLE
        )
        for part in _parts(condition)
    )


def _put_together(own: Tree, pieces: _Pieces) -> Tree:
    """What a sum of the integer becomes, with the sum's own name."""
    low, middle, rest = ({**own, "arguments": [{"expression": pieces.column(piece)}]} for piece in PIECES)
    for part in (low, middle, rest):
        part.pop("alias", None)
    # NULL without a number, since the lowest digits are.
    raised = _bignum(call("concat", _cast(middle, "VARCHAR"), _text(ZEROS)))
    whole = _plus(raised, _bignum(_cast(low, "VARCHAR")))
    if pieces.with_rest:
        whole = {
            "class": "CASE",
            "type": "CASE_EXPR",
            "case_checks": [{"when_expr": _operator("OPERATOR_IS_NULL", low), "then_expr": rest}],
            "else_expr": _plus(whole, _operator("OPERATOR_COALESCE", rest, _bignum(_text("0")))),
        }
    return whole | ({"alias": own["alias"]} if "alias" in own else {})


def _operator(kind: str, *children: Tree) -> Tree:
    return {"class": "OPERATOR", "type": kind, "children": list(children)}


def _plus(left: Tree, right: Tree) -> Tree:
    return {**call("+", left, right), "is_operator": True}


def _bignum(child: Tree) -> Tree:
    return _cast(child, "BIGNUM")


def _cast(child: Tree, name: str) -> Tree:
    kind = {"class": "TYPE", "type": "TYPE", "type_name": name, "qualified_name": {"path": [name]}}
    return {"class": "CAST", "type": "OPERATOR_CAST", "child": child, "type_expr": kind}


def _text(text: str) -> Tree:
    return {"class": "CONSTANT", "type": "VALUE_CONSTANT", "literal": {"kind": "STRING", "text": text}}
