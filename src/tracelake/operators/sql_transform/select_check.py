"""One SELECT over known relations, and nothing else: what SQL from a DAG must be before Spark sees it.

The text is parsed, and every node of the tree must be of a kind that is listed here; relations are the inputs,
``scope_blocks`` and the query's own CTEs, named plainly. Functions are checked twice, in the tree and as words in
the text, so that none is missed because the parser knows it by another name. What runs is the text as it was
written, without its comments: a parser that wrote it anew would now and then write something else.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

import sqlglot
from sqlglot import TokenType, exp
from sqlglot.errors import SqlglotError

from tracelake.domain.errors import Invalid
from tracelake.operators.sql_transform.functions import ALLOWED, LANGUAGE
from tracelake.operators.sql_transform.plain_text import plain_text

MAX_LENGTH = 64 * 1024
DIALECT = "spark"

_QUERIES = (exp.Select, exp.Union, exp.Intersect, exp.Except)
_STRUCTURE: tuple[type[exp.Expr], ...] = (
    *_QUERIES,
    *(
        exp.With,
        exp.CTE,
        exp.From,
        exp.Join,
        exp.Where,
        exp.Group,
        exp.Having,
        exp.Qualify,
        exp.Order,
        exp.Ordered,
    ),
    *(exp.Limit, exp.Offset, exp.Distinct, exp.Subquery, exp.Table, exp.TableAlias, exp.Values, exp.Tuple),
    *(exp.Cube, exp.Rollup, exp.GroupingSets, exp.Window, exp.WindowSpec, exp.Filter, exp.WithinGroup),
    *(
        exp.IgnoreNulls,
        exp.RespectNulls,
        exp.Alias,
        exp.Aliases,
        exp.Column,
        exp.Identifier,
        exp.Star,
        exp.Literal,
    ),
    *(exp.Null, exp.Boolean, exp.HexString, exp.Interval, exp.IntervalSpan, exp.Var, exp.DataType),
    *(exp.DataTypeParam, exp.ColumnDef, exp.Bracket, exp.Lambda, exp.AtTimeZone, exp.In, exp.Between),
    *(exp.Binary, exp.Unary, exp.SubqueryPredicate, exp.Func),
)
_REFUSED_WITHIN: tuple[type[exp.Expr], ...] = (
    exp.Unnest,
    exp.JoinHint,
    exp.Kwarg,
    exp.Collate,
)
_TABLE_ARGUMENTS = frozenset({"this", "alias", "joins"})
_WITHOUT_PARENTHESES = (
    *(exp.CurrentUser, exp.SessionUser, exp.CurrentCatalog, exp.CurrentSchema, exp.CurrentDatabase),
    *(exp.CurrentDate, exp.CurrentTime, exp.CurrentTimestamp, exp.Localtimestamp, exp.CurrentTimezone),
)
_WORD = re.compile(r"\w+")
_QUOTES = "'\"`"


def check_select(text: object, relations: Iterable[str]) -> str:
    """The query to run, or ``Invalid`` with what is wrong with it."""
    if not isinstance(text, str) or not text.strip():
        raise _refused("is missing: write one SELECT")
    if len(text) > MAX_LENGTH:
        raise _refused(f"is longer than {MAX_LENGTH} characters")
    query, quoted = plain_text(text.strip().removesuffix(";"))
    known = {name.lower() for name in relations}
    try:
        tree = _parse(query)
        for node in tree.walk():
            _check_node(node, known)
        _check_words(query, quoted, {alias.name.lower() for alias in tree.find_all(exp.TableAlias)})
    except SqlglotError as error:
        raise _refused(f"can't be read: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise _refused("is nested too deeply") from None
    return query.strip()


def _parse(text: str) -> exp.Expr:
    # It warns about what it doesn't know, which is refused here anyway.
    logging.getLogger("sqlglot").setLevel(logging.ERROR)
    trees = [tree for tree in sqlglot.parse(text, read=DIALECT) if tree is not None]
    if len(trees) != 1:
        raise _refused(f"must be exactly one statement, not {len(trees)}")
    if not isinstance(trees[0], _QUERIES):
        raise _refused(f"must be a SELECT, not {_kind(trees[0])}")
    return trees[0]


def _check_node(node: exp.Expr, known: set[str]) -> None:
    if not isinstance(node, _STRUCTURE) or isinstance(node, _REFUSED_WITHIN):
        raise _refused(f"must not contain {_kind(node)}: {node.sql(dialect=DIALECT)[:80]}")
    if isinstance(node, exp.Select) and not node.expressions:
        raise _refused("selects no column")
    if isinstance(node, exp.Table):
        _check_table(node, known)
    if isinstance(node, exp.Func):
        _check_function(node)


def _check_table(table: exp.Table, known: set[str]) -> None:
    shown = table.sql(dialect=DIALECT)[:80]
    if not isinstance(table.this, exp.Identifier):
        raise _refused(f"must not read from a table function: {shown}")
    if table.args.get("db") or table.args.get("catalog"):
        raise _refused(f"must name its inputs plainly, without a catalog, format or path: {shown}")
    more = [name for name, value in table.args.items() if value and name not in _TABLE_ARGUMENTS]
    if more:
        raise _refused(f"must read its inputs as they are, not with {', '.join(more)}: {shown}")
    name = table.name.lower()
    if name not in known and name not in _common_names(table):
        raise _refused(f"reads from {table.name!r}, which is not an input; it has {', '.join(sorted(known))}")


def _common_names(table: exp.Table) -> Iterator[str]:
    """Names of the WITH clauses that a table can see: those of the queries around it."""
    around = table.parent
    while around is not None:
        clause = around.args.get("with_")
        for common in clause.expressions if isinstance(clause, exp.With) else ():
            yield common.alias.lower()
        around = around.parent


def _check_function(function: exp.Func) -> None:
    """Those that are no calls, or calls of something else than they look like."""
    if isinstance(function, exp.Anonymous) and function.name.lower() not in ALLOWED:
        raise _refused(f"must not call {function.name.lower()}()")
    if isinstance(function, _WITHOUT_PARENTHESES):
        raise _refused(f"must not use {function.sql(dialect=DIALECT)}")
    qualified = function.parent
    if isinstance(qualified, exp.Dot) and qualified.expression is function:
        raise _refused(f"must call functions by their plain names: {qualified.sql(dialect=DIALECT)[:80]}")


def _check_words(query: str, quoted: list[tuple[int, int]], aliases: set[str]) -> None:
    """Every word before a parenthesis is a function that is allowed, an alias, or part of the language."""
    tokens = sqlglot.tokenize(query, read=DIALECT)
    begins = {start for start, _ in quoted}
    within = {place for start, end in quoted for place in range(start + 1, end)}
    for token in tokens:
        if token.start in within or (query[token.start] in _QUOTES and token.start not in begins):
            raise _refused(f"can't be read in one way only at {query[token.start : token.start + 20]!r}")
    for token, following in pairwise(tokens):
        word = token.text.lower()
        if following.token_type is not TokenType.L_PAREN or not _WORD.fullmatch(word):
            continue
        if word not in ALLOWED and word not in LANGUAGE and word not in aliases:
            raise _refused(f"must not call {word}()")


def _kind(node: exp.Expr) -> str:
    if isinstance(node, exp.Command):
        return str(node.this).upper()
    return node.key.upper()


def _refused(what: str) -> Invalid:
    return Invalid("InvalidSql", f"sql {what}")
