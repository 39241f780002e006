"""Exact sums of wide integers from their digit columns: as fast as sums of BIGINT.

A wide integer is a BIGNUM that the engine parses from text, for each row. Files have its digits beside it, in
pieces of 64 bits (``evm.digit_columns``). So in the statement's tree

    sum(value)  becomes  sum(low), sum(middle) and sum(rest), put together once for each group

where ``value`` is such a column of a relation in the FROM of that very SELECT. The relation is then read through a
second view, which has the pieces too, under names that no query knows; rows without digits (hot ones, files of
earlier versions) have the whole number as ``rest``. A name in a call of ``sum`` is a column of FROM first, and if
two relations had it the engine would refuse the query, so it is known what it stands for.

Whatever isn't certain stays as it is written, which is slower and gives the same: ``sum(DISTINCT …)``, windows, a
SELECT that names all columns by ``*``, a row as a whole, a NATURAL join, a column that USING merges, one of a subquery or CTE. The
rewritten statement passes the gate like any other, and must have the columns and types of the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from tracelake.domain.errors import TracelakeError
from tracelake.evm.digit_columns import DIGIT_PARTS, DIGITS
from tracelake.query.engine.attach import (
    SQL,
    AttachedView,
    casts,
    columns_of,
    read_parquet,
)
from tracelake.query.engine.column_types import literal, quoted
from tracelake.query.engine.pushdown import StatementParams
from tracelake.query.engine.tree_edits import Place, QueryTree, Tree, call
from tracelake.tables.wide_integers import integers_with_digits, text_columns

_SUM = "sum"
_ZEROS = "0" * DIGITS
_PIECES = ("low", "middle", "rest")
#: Functions that a copied condition may call; others might give another value for each call.
_REPEATABLE = frozenset(
    {"unhex", "from_hex", "lower", "upper", "substr", "substring", "length", "date_trunc"}
)
#: Parts of a SELECT besides FROM that hold expressions of its own scope.
_OWN = ("select_list", "where_clause", "group_expressions", "having", "qualify", "modifiers")
#: Parquet's physical types of the digit columns.
_STORED = ("INT64", "INT64", "BYTE_ARRAY")


def with_digit_sums(
    connection: duckdb.DuckDBPyConnection, sql: str, params: StatementParams, views: Sequence[AttachedView]
) -> str:
    """The statement to run: ``sql`` itself if it has no such sum."""
    if _SUM not in sql.lower():
        return sql
    with_digits = {}
    for number, view in enumerate(views):
        if integers := integers_with_digits(view.relation.columns):
            name = f"tracelake_{number}_digits"
            with_digits[view.relation.name.lower()] = _Summable(connection, view, name, integers)
    if not with_digits:
        return sql
    try:
        return _rewritten(QueryTree(connection, sql, params), with_digits)
    except (duckdb.Error, TracelakeError):
        # Whatever is wrong with the query itself is found, and reported in its own words, when it is run.
        return sql


@dataclass(slots=True)
class _Summable:
    """A relation with digit columns. Its second view is called ``name``, and made once a sum needs it;
    ``with_rest`` are the integers that may have a ``rest`` in some row."""

    connection: duckdb.DuckDBPyConnection
    view: AttachedView
    name: str
    integers: Sequence[str]
    used: bool = False
    with_rest: set[str] = field(default_factory=set)

    def integer(self, name: str) -> str | None:
        return next((each for each in self.integers if each.lower() == name), None)

    def use(self) -> None:
        if self.used:
            return
        self.used = True
        whole, others = self._groups_of_files()
        sources = [*([read_parquet(whole)] if whole else ()), *([read_parquet(others)] if others else ())]
        sources += self.view.sources
        if others or self.view.sources:
            self.with_rest.update(self.integers)
        texts = text_columns(self.view.relation.columns)
        selects = []
        for source in sources:
            there = columns_of(self.connection, source)
            # Files whose digits can't be relied on may have some.
            with_digits = bool(whole) and source == sources[0]
            pieces = [_pieces(each, texts[each], there, with_digits=with_digits) for each in self.integers]
            columns = ", ".join([casts(self.view.columns, there), *pieces])
            selects.append(SQL.rows_of.format(columns=columns, source=source))
        if not selects:
            nothing = [_pieces(each, "", (), with_digits=False) for each in self.integers]
            columns = ", ".join([casts(self.view.columns, ()), *nothing])
            selects = [SQL.no_rows_of.format(columns=columns, source="(VALUES (1))")]
        rows = "\nUNION ALL\n".join(selects)
        self.connection.execute(SQL.replace_view.format(name=quoted(self.name), rows=rows))

    def _groups_of_files(self) -> tuple[list[str], list[str]]:
        """The files that have the digits of every number, and the others, by what they say of themselves."""
        files = self.view.files
        if not files:
            return [], []
        texts = text_columns(self.view.relation.columns)
        wanted = [
            name for each in self.integers for name in (texts[each], *(each + part for part in DIGIT_PARTS))
        ]
        statement = SQL.columns_of_files.format(
            files=", ".join(map(literal, files)), columns=", ".join(map(literal, wanted))
        )
        found: dict[str, dict[str, tuple[str, int, int]]] = {}
        for file, name, kind, nulls, values in self.connection.execute(statement).fetchall():
            found.setdefault(file, {})[name] = (kind, nulls, values)
        groups: tuple[list[str], list[str]] = ([], [])
        for file in files:
            columns = found.get(file, {})
            whole = all(_has_digits(columns, each, texts[each]) for each in self.integers)
            groups[0 if whole else 1].append(file)
            for each in self.integers if whole else ():
                _, nulls, values = columns[each + DIGIT_PARTS[-1]]
                if nulls != values:
                    self.with_rest.add(each)
        return groups


def _has_digits(columns: Mapping[str, tuple[str, int, int]], integer: str, text: str) -> bool:
    """A number without digits would be missing from a sum: rows of files of two versions can become rows of one."""
    if not {text, *(integer + part for part in DIGIT_PARTS)} <= columns.keys():
        return False
    low, middle, high = (columns[integer + part] for part in DIGIT_PARTS)
    _, nulls, _ = columns[text]
    kinds = (low[0], middle[0], high[0])
    return kinds == _STORED and nulls is not None and low[1] == middle[1] == nulls and high[1] is not None


@dataclass(frozen=True, slots=True)
class _Read:
    """One place where a summable relation is read, and the name that columns are qualified with there."""

    relation: _Summable
    tree: Tree
    alias: str


def _rewritten(query: QueryTree, relations: Mapping[str, _Summable]) -> str:
    tree = query.fresh()
    ctes = {name.lower() for name in _cte_names(tree)}
    known = {name: relation for name, relation in relations.items() if name not in ctes}
    selects = _selects(tree)
    names = [_names(query, select) for select in selects]
    edited = [_Select(select, known).rewrite() for select in selects]
    if not any(edited):
        return query.sql
    for select, before in zip(selects, names, strict=True):
        for place, name in before.items():
            # A column is called like its expression, which is another one now.
            if query.text(select["select_list"][place]) != name:
                select["select_list"][place]["alias"] = name
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


def _selects(tree: Tree) -> list[Tree]:
    """All of them, before any is changed."""
    return [part for part in _parts(tree) if part.get("type") == "SELECT_NODE"]


def _names(query: QueryTree, select: Tree) -> dict[int, str]:
    """The names of those columns that an edit of the SELECT, or of a subquery in it, could change."""
    return {
        place: query.text(item)
        for place, item in enumerate(select["select_list"])
        if "alias" not in item and any(map(_is_plain_sum, _parts(item)))
    }


def _cte_names(tree: Tree) -> Iterator[str]:
    for part in _parts(tree):
        for entry in part.get("cte_map", {}).get("map", ()):
            yield entry["key"]
        if "cte_name" in part:
            yield part["cte_name"]


@dataclass(slots=True)
class _Select:
    """One SELECT of the statement; its subqueries are others."""

    node: Tree
    relations: Mapping[str, _Summable]
    reads: list[_Read] = field(default_factory=list)
    conditions: list[Any] = field(default_factory=list)
    merged: set[str] = field(default_factory=set)

    def rewrite(self) -> bool:
        """Whether anything was rewritten; the tree is changed in place."""
        if not self._look(self.node.get("from_table", {})):
            return False
        own = [self.node.get(key) for key in _OWN] + self.conditions
        if any(part.get("class") == "STAR" for part in _own_parts(own)):
            return False
        edits = [
            (place, read, integer)
            for place in _sums(own)
            if (found := self._column(place)) is not None
            for read, integer in (found,)
        ]
        if not edits:
            return False
        for place, read, integer in edits:
            read.relation.use()
            _replace(place, read, integer)
            read.tree["table_name"] = read.relation.name
            read.tree["qualified_name"] = {"path": [read.relation.name]}
            read.tree["alias"] = read.alias
        return True

    def _look(self, relation: Tree) -> bool:
        """Collect what FROM reads. Returns whether each name belongs to one column."""
        match relation:
            case {"type": "JOIN", "left": left, "right": right}:
                if relation.get("ref_type") == "NATURAL":
                    return False
                self.merged.update(name.lower() for name in relation.get("using_columns", ()))
                self.conditions.append(relation.get("condition"))
                return self._look(left) and self._look(right)
            case {"type": "BASE_TABLE", "table_name": str(name)}:
                found = self.relations.get(name.lower())
                if found is not None:
                    if "column_name_alias" in relation:
                        return False
                    read = _Read(found, relation, relation.get("alias", name))
                    if not self._read_as_a_whole(read.alias.lower()):
                        self.reads.append(read)
            case _:
                self.conditions += [relation.get("function"), relation.get("values")]
        return True

    def _read_as_a_whole(self, alias: str) -> bool:
        """Whether a row is a value, here or in a subquery: it would have the digits too."""
        return any(
            (part.get("class") == "COLUMN_REF" and part["column_names"][-1].lower() == alias)
            or (part.get("class") == "STAR" and part.get("relation_name", "").lower() == alias)
            for part in _parts(self.node)
        )

    def _column(self, place: Place) -> tuple[_Read, str] | None:
        """The relation and the integer that this sum is of, if it is one's."""
        container, key = place
        names = [name.lower() for name in container[key]["arguments"][0]["expression"]["column_names"]]
        if len(names) > 2 or names[-1] in self.merged:
            return None
        found = [
            (read, integer)
            for read in self.reads
            if (integer := read.relation.integer(names[-1])) is not None
            and (len(names) == 1 or names[0] == read.alias.lower())
        ]
        return found[0] if len(found) == 1 else None


def _own_parts(own: list[Any]) -> Iterator[Tree]:
    """Parts in the scope of the SELECT itself."""
    return (container[key] for container, key in _own_places(own))


def _own_places(own: list[Any]) -> Iterator[Place]:
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
                elif value.get("class") != "LAMBDA":
                    pending.append(value)
            elif isinstance(value, list):
                pending.append(value)


def _sums(own: list[Any]) -> list[Place]:
    return [(container, key) for container, key in _own_places(own) if _is_plain_sum(container[key])]


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


def _replace(place: Place, read: _Read, integer: str) -> None:
    container, key = place
    own = container[key]
    low, middle, rest = (
        {**own, "arguments": [{"expression": _column_ref(read.alias, _piece(piece, integer))}]}
        for piece in _PIECES
    )
    for part in (low, middle, rest):
        part.pop("alias", None)
    # NULL without a number, since the lowest digits are.
    raised = _bignum(call("concat", _cast(middle, "VARCHAR"), _text(_ZEROS)))
    whole = _plus(raised, _bignum(_cast(low, "VARCHAR")))
    if integer in read.relation.with_rest:
        whole = {
            "class": "CASE",
            "type": "CASE_EXPR",
            "case_checks": [{"when_expr": _operator("OPERATOR_IS_NULL", low), "then_expr": rest}],
            "else_expr": _plus(whole, _operator("OPERATOR_COALESCE", rest, _bignum(_text("0")))),
        }
    container[key] = whole | ({"alias": own["alias"]} if "alias" in own else {})


def _piece(piece: str, integer: str) -> str:
    return f"tracelake_{piece}_{integer}"


def _column_ref(*names: str) -> Tree:
    return {"class": "COLUMN_REF", "type": "COLUMN_REF", "column_names": list(names)}


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


def _pieces(integer: str, text: str, there: Sequence[str], *, with_digits: bool) -> str:
    names = {name.lower() for name in there}
    low, middle, high = (quoted(integer + part) for part in DIGIT_PARTS)
    if with_digits:
        columns = [f"CAST({low} AS BIGINT)", f"CAST({middle} AS BIGINT)"]
        columns.append(f"CAST({high} || {literal(2 * _ZEROS)} AS BIGNUM)")
    else:
        number = f"CAST({quoted(text)} AS BIGNUM)" if text.lower() in names else "CAST(NULL AS BIGNUM)"
        columns = ["CAST(NULL AS BIGINT)", "CAST(NULL AS BIGINT)", number]
    named = zip(columns, _PIECES, strict=True)
    return ", ".join(f"{column} AS {quoted(_piece(piece, integer))}" for column, piece in named)
