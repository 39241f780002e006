"""A SELECT from a DAG, read as a tree of ``pieces``; any part that isn't read here isn't allowed.

Relations are the inputs, ``scope_blocks`` and the query's own CTEs, each named by one plain name. There are no
paths, catalogs, table functions, hints, samples, scripts, lateral views, pivots, pipes or parameters, and no other
statement. The tree is written as a new text (``pieces.render``), and Spark gets that text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tracelake.domain.spark_select.expressions import RESERVED, Expressions
from tracelake.domain.spark_select.pieces import Limit, Piece, joined
from tracelake.domain.spark_select.tokens import refused

MAX_LENGTH = 64 * 1024


def read_select(text: object, relations: Iterable[str] | None) -> Piece:
    """The query as a tree. Raises ``Invalid``. ``relations`` is None while they aren't known yet."""
    if not isinstance(text, str) or not text.strip():
        raise refused("is missing: write one SELECT")
    if len(text) > MAX_LENGTH:
        raise refused(f"is longer than {MAX_LENGTH} characters")
    known = None if relations is None else {name.lower() for name in relations}
    try:
        return _Queries(text.strip().removesuffix(";"), known).statement()
    except RecursionError:
        raise refused("is nested too deeply") from None


class _Queries(Expressions):
    def __init__(self, text: str, relations: set[str] | None) -> None:
        super().__init__(text)
        self._relations = relations
        # Names of the CTEs in scope.
        self._common: list[str] = []

    def statement(self) -> Piece:
        if not (self.sees("SELECT") or self.sees("WITH") or self.sees("VALUES") or self.sees_sign("(")):
            begins = self.token.value.upper() if self.token.kind == "word" else repr(self.token.value[:20])
            raise refused(f"must be a SELECT, not {begins}")
        query = self.query()
        if self.token.kind != "end":
            raise self.unexpected("expected the end of the SELECT")
        return query

    def query(self) -> Piece:
        with self.deeper():
            seen = len(self._common)
            # A subquery counts as a column: text that contains one isn't taken for a constant.
            self._columns += 1
            parts: list[Piece] = []
            if self.take("WITH"):
                parts = ["WITH", *self._common_tables()]
            parts.append(self._sets())
            for word in ("ORDER", "CLUSTER", "DISTRIBUTE", "SORT"):
                if word in ("ORDER", "SORT") and self.sees(word):
                    parts.append(self.order_by())
                elif self.take(word, "BY"):
                    parts += [word, "BY", self.expressions()]
            parts.append(Limit(tuple(self._limits())))
            # CTEs end with their query; outside, their names mean something else or nothing.
            del self._common[seen:]
            return tuple(parts)

    def _common_tables(self) -> Iterator[Piece]:
        recursive = self.take("RECURSIVE")
        if recursive:
            yield "RECURSIVE"
        yield joined(self.several(lambda: self._common_table(recursive)))

    def _common_table(self, recursive: bool) -> Piece:
        name = self.name()
        columns = (self.names(),) if self.sees_sign("(") else ()
        self.need("AS")
        # Only a recursive CTE sees itself; in the others the name keeps its earlier meaning.
        if recursive:
            self._common.append(name.value.lower())
        query = self.in_parentheses(self.query)
        if not recursive:
            self._common.append(name.value.lower())
        return (name, *columns, "AS", query)

    def _limits(self) -> Iterator[Piece]:
        if self.take("LIMIT"):
            yield from ("LIMIT", "ALL" if self.take("ALL") else self.expression())
        if self.take("OFFSET"):
            yield from ("OFFSET", self.expression())

    def _sets(self) -> Piece:
        """INTERSECT has the highest precedence; the others are read from left to right."""
        parts: list[Piece] = [self._intersections()]
        while any(self.sees(word) for word in ("UNION", "EXCEPT", "MINUS")):
            parts += [*self._set_operator(), self._intersections()]
        return tuple(parts)

    def _intersections(self) -> Piece:
        parts: list[Piece] = [self._core()]
        while self.sees("INTERSECT"):
            parts += [*self._set_operator(), self._core()]
        return ("(", *parts, ")") if len(parts) > 1 else parts[0]

    def _set_operator(self) -> Iterator[Piece]:
        yield self.next().value.upper()
        for word in ("ALL", "DISTINCT"):
            if self.take(word):
                yield word
                return

    def _core(self) -> Piece:
        if self.sees_sign("("):
            return self.in_parentheses(self.query)
        if self.take("VALUES"):
            return ("VALUES", self._rows())
        self.need("SELECT")
        return ("SELECT", *self._select())

    def _select(self) -> Iterator[Piece]:
        for word in ("DISTINCT", "ALL"):
            if self.sees(word):
                yield self.next().value.upper()
                break
        if self.token.kind == "end" or self.sees("FROM"):
            raise refused("selects no column")
        yield joined(self.several(self.named_expression))
        if self.take("FROM"):
            yield from ("FROM", joined(self.several(self._relation)))
        if self.sees("WHERE"):
            yield self.where()
        if self.take("GROUP", "BY"):
            yield from ("GROUP", "BY", *self._grouping())
        if self.take("HAVING"):
            yield from ("HAVING", self.expression())
        if self.take("QUALIFY"):
            yield from ("QUALIFY", self.expression())
        if self.take("WINDOW"):
            yield from ("WINDOW", joined(self.several(self._named_window)))

    def _named_window(self) -> Piece:
        name = self.name("a window")
        self.need("AS")
        return (name, "AS", self.window())

    def _grouping(self) -> Iterator[Piece]:
        if self.take("ALL"):
            yield "ALL"
            return
        yield joined(self.several(self._group))
        for word in ("CUBE", "ROLLUP"):
            if self.take("WITH", word):
                yield from ("WITH", word)
                return
        if self.sees("GROUPING", "SETS"):
            yield self._group()

    def _group(self) -> Piece:
        for word in ("CUBE", "ROLLUP"):
            if self.sees(word) and self.sees_sign("(", 1):
                self.next()
                return (word, self.in_parentheses(lambda: joined(self.several(self._grouping_set))))
        if self.take("GROUPING", "SETS"):
            return ("GROUPING", "SETS", self.in_parentheses(lambda: joined(self.several(self._group))))
        return self._grouping_set()

    def _grouping_set(self) -> Piece:
        if self.sees_sign("(") and self.sees_sign(")", 1):
            self.next()
            self.next()
            return ("(", ")")
        return self.expression()

    def _relation(self) -> Piece:
        parts: list[Piece] = [self._table()]
        while (join := self._join()) is not None:
            parts += [join, self._table()]
            if "NATURAL" in join:
                continue
            if self.take("ON"):
                parts += ["ON", self.expression()]
            elif self.take("USING"):
                parts += ["USING", self.names()]
        return tuple(parts)

    def _join(self) -> tuple[str, ...] | None:
        natural = ("NATURAL",) if self.take("NATURAL") else ()
        for side in ("INNER", "CROSS", "LEFT", "RIGHT", "FULL", "SEMI", "ANTI"):
            if self.take(side):
                kind: tuple[str, ...] = (side,)
                for more in ("OUTER",) if side in ("RIGHT", "FULL") else ("OUTER", "SEMI", "ANTI"):
                    if side in ("LEFT", "RIGHT", "FULL") and self.take(more):
                        kind = (side, more)
                        break
                self.need("JOIN")
                return (*natural, *kind, "JOIN")
        if self.take("JOIN"):
            return (*natural, "JOIN")
        if natural:
            raise self.unexpected("expected a join after NATURAL")
        return None

    def _table(self) -> Piece:
        if self.sees("VALUES"):
            self.next()
            return ("VALUES", self._rows(), *self._table_alias())
        if self.sees_sign("("):
            with self.deeper():
                inner = self.query if self.sees_query() else self._relation
                return (self.in_parentheses(inner), *self._table_alias())
        return self._named_table()

    def _rows(self) -> Piece:
        inside, self._is_row = self._is_row, True
        rows = self.expressions()
        self._is_row = inside
        return rows

    def _named_table(self) -> Piece:
        name = self.name("an input", RESERVED)
        if self.sees_sign("("):
            raise refused(f"must not read from a table function: {name.value[:60]}()")
        if self.sees_sign("."):
            raise refused(
                f"must name its inputs plainly, without a catalog, format or path: {name.value[:60]}.…"
            )
        known = name.value.lower()
        if self._relations is not None and known not in self._relations and known not in self._common:
            has = ", ".join(sorted(self._relations))
            raise refused(f"reads from {name.value[:60]!r}, which is not an input; it has {has}")
        return (name, *self._table_alias())

    def _table_alias(self) -> Iterator[Piece]:
        alias = self.alias()
        if alias is not None:
            yield from ("AS", alias)
            if self.sees_sign("("):
                yield self.names()
