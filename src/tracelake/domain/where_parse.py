"""Parses ``where`` from a DAG file into the allow-listed tree of ``where``.

sqlglot reads the text; the tree is then rebuilt node by node, and a node without a counterpart (a function, a cast,
a subquery, a parameter, a qualified name) is refused, as is an unknown argument of an allowed node. Limits on
length, tokens and nesting come before the parser, which recurses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from sqlglot import TokenType, exp
from sqlglot.dialects.postgres import Postgres
from sqlglot.tokenizer_core import Token

from tracelake.domain.errors import Invalid
from tracelake.domain.where import (
    Compare,
    IsNull,
    Op,
    Predicate,
    Where,
    WhereValue,
    all_of,
    any_of,
    compare_columns,
    in_list,
)

MAX_LENGTH = 16_384
MAX_TOKENS = 2_000
MAX_NESTING = 16
#: Enough for any uint256.
MAX_DIGITS = 78

_OPS: dict[type[exp.Expr], Op] = {
    exp.EQ: Op.EQ,
    exp.NEQ: Op.NE,
    exp.LT: Op.LT,
    exp.LTE: Op.LE,
    exp.GT: Op.GT,
    exp.GTE: Op.GE,
}
_NESTING_WORDS = {TokenType.NOT, TokenType.DASH, TokenType.PLUS}
_VERBATIM = {TokenType.STRING, TokenType.IDENTIFIER, TokenType.NUMBER}
_INTO_VALUES = {"->", "->>", "#>", "#>>", "@>", "<@", "?", "[", "."}
_WHOLE_COLUMNS = ": it compares whole columns, so give what is inside of a value a column of its own"
_WORD_OR_SIGN = re.compile(r"(\w+|[-+(),=<>]|==|<>|!=|<=|>=)\Z")


def parse_where(source: object) -> Where:
    """From a string (a SQL predicate) or a map of columns to a value or a list of values, which must all hold."""
    if isinstance(source, str):
        return Where.of(_from_text(source))
    if isinstance(source, Mapping):
        return Where.of(_from_map(source))
    raise _refused("must be a predicate like \"severity = 'critical'\" or a map of columns to values")


def _refused(message: str) -> Invalid:
    return Invalid("InvalidWhere", message)


def _from_map(source: Mapping[Any, Any]) -> Predicate:
    if not source:
        raise _refused("an empty map selects nothing in particular; leave `where` out")
    terms: list[Predicate] = []
    for column, value in source.items():
        if not isinstance(column, str) or not column:
            raise _refused("columns must be named by strings")
        _check_characters(column)
        if value is None:
            terms.append(IsNull(column))
        elif isinstance(value, list | tuple):
            if not value:
                raise _refused(f"{column}: an empty list matches no row")
            terms.append(in_list(column, [_plain_scalar(column, item) for item in value]))
        else:
            terms.append(Compare(column, Op.EQ, _plain_scalar(column, value)))
    return all_of(terms)


def _plain_scalar(column: str, value: object) -> WhereValue:
    if isinstance(value, str):
        _check_characters(value)
        return value
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return _number(repr(value))
    raise _refused(f"{column}: compare with a string, a number or a boolean")


def _from_text(text: str) -> Predicate:
    if len(text) > MAX_LENGTH:
        raise _refused(f"longer than {MAX_LENGTH} characters")
    _check_characters(text)
    dialect = Postgres()
    try:
        tokens = dialect.tokenize(text)
        # Before the parser, which recurses and would exhaust the stack on hostile nesting.
        _check_tokens(tokens)
        trees = dialect.parser().parse(tokens, text)
    except Invalid:
        raise
    except RecursionError:
        raise _refused("is nested too deeply") from None
    except Exception:
        # The parser raises an AttributeError or a TypeError for some invalid texts instead of its own error.
        raise _refused("is not a SQL predicate") from None
    if len(trees) != 1 or trees[0] is None:
        raise _refused("must be exactly one predicate")
    return _predicate(trees[0], negate=False)


def _check_characters(text: str) -> None:
    """No engine stores a text with these characters, and some refuse a query that contains them."""
    if "\0" in text:
        raise _refused("contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _refused("contains half of a surrogate pair") from None


def _check_tokens(tokens: list[Token]) -> None:
    if not tokens:
        raise _refused("is empty")
    if len(tokens) > MAX_TOKENS:
        raise _refused(f"has more than {MAX_TOKENS} words")
    stack, run = [0], 0
    for token in tokens:
        if token.comments:
            raise _refused("must not contain comments")
        if token.token_type not in _VERBATIM and not _WORD_OR_SIGN.match(token.text):
            way_out = _WHOLE_COLUMNS if token.text in _INTO_VALUES else ""
            raise _refused(f"must not contain {token.text[:20]!r}{way_out}")
        if token.token_type in (TokenType.L_PAREN, TokenType.CASE):
            stack.append(run + 1)
            run = 0
        elif token.token_type in (TokenType.R_PAREN, TokenType.END):
            if len(stack) > 1:
                stack.pop()
            run = 0
        elif token.token_type in _NESTING_WORDS:
            run += 1
        else:
            run = 0
        if sum(stack) + run > MAX_NESTING:
            raise _refused(f"is nested more than {MAX_NESTING} levels deep")


def _predicate(node: exp.Expr, *, negate: bool) -> Predicate:
    match node:
        case exp.Paren():
            _only(node, "this")
            return _predicate(node.this, negate=negate)
        case exp.Not():
            _only(node, "this")
            return _predicate(node.this, negate=not negate)
        case exp.And() | exp.Or():
            terms = [_predicate(term, negate=negate) for term in _operands(node)]
            return all_of(terms) if isinstance(node, exp.And) is not negate else any_of(terms)
        case exp.Is():
            _only(node, "this", "expression", "negate")
            if not isinstance(node.expression, exp.Null):
                raise _refused("IS only goes with NULL; compare with = TRUE or = FALSE")
            return IsNull(_column(node.this), bool(node.args.get("negate")) is not negate)
        case exp.In():
            _only(node, "this", "expressions")
            if not node.expressions:
                raise _refused("IN needs a list of literals")
            values = [_scalar(item) for item in node.expressions]
            return in_list(_column(node.this), values, negated=negate)
        case exp.Column():
            raise _refused(f"{_column(node)} alone is no condition; write {_column(node)} = TRUE")
        case _ if type(node) in _OPS:
            return _comparison(node, _OPS[type(node)], negate=negate)
        case _:
            raise _refused(f"{node.key.upper()} is not allowed; use comparisons, IN, IS NULL, AND, OR, NOT")


def _operands(node: exp.Expr) -> Iterator[exp.Expr]:
    """The terms of a chain of ANDs or ORs, without recursing down its long left side."""
    kind, pending = type(node), [node]
    while pending:
        top = pending.pop()
        if type(top) is kind:
            _only(top, "this", "expression")
            pending += [top.expression, top.this]
        else:
            yield top


def _comparison(node: exp.Expr, op: Op, *, negate: bool) -> Predicate:
    _only(node, "this", "expression")
    op = op.negated if negate else op
    left, right = _bare(node.this), _bare(node.expression)
    if isinstance(left, exp.Column) and isinstance(right, exp.Column):
        return compare_columns(_column(left), op, _column(right))
    if isinstance(left, exp.Column):
        return Compare(_column(left), op, _scalar(right))
    if isinstance(right, exp.Column):
        return Compare(_column(right), op.flipped, _scalar(left))
    # An operand that isn't allowed is the better message.
    _scalar(left), _scalar(right)
    raise _refused("a comparison needs a column")


def _bare(node: exp.Expr) -> exp.Expr:
    while isinstance(node, exp.Paren):
        _only(node, "this")
        node = node.this
    return node


def _column(node: exp.Expr) -> str:
    node = _bare(node)
    if not isinstance(node, exp.Column):
        raise _refused(f"{node.key.upper()} is not allowed where a column is expected")
    if node.args.get("table"):
        raise _refused(f"{node.sql()} is qualified; name the column alone")
    _only(node, "this")
    name = node.this
    if not isinstance(name, exp.Identifier) or not name.this:
        raise _refused("name a column")
    # Postgres folds unquoted names to lower case.
    return str(name.this) if name.args.get("quoted") else str(name.this).lower()


def _scalar(node: exp.Expr) -> WhereValue:
    node = _bare(node)
    match node:
        case exp.Boolean():
            return bool(node.this)
        case exp.Null():
            raise _refused("nothing equals NULL; use IS NULL or IS NOT NULL")
        case exp.Neg():
            value = _scalar(node.this)
            if isinstance(value, bool | str):
                raise _refused("only a number can be negative")
            return -value
        case exp.Literal():
            _only(node, "this", "is_string")
            return str(node.this) if node.is_string else _number(str(node.this))
        case _:
            raise _refused(f"{node.key.upper()} is not allowed where a literal is expected")


def _number(text: str) -> int | float:
    """Whole numbers stay exact, however they are written; any other is a finite float."""
    try:
        exact = Decimal(text)
    except InvalidOperation:
        raise _refused(f"{text} is not a number") from None
    # By its exponent, before int(): 1e999999999 is short to write and huge to compute.
    if not exact.is_finite() or exact.adjusted() >= MAX_DIGITS or exact.adjusted() < -300:
        raise _refused(f"{text} is out of range")
    return int(exact) if exact == exact.to_integral_value() else float(exact)


def _only(node: exp.Expr, *known: str) -> None:
    # Empty arguments mean that the syntax wasn't used.
    unknown = [name for name, value in node.args.items() if value and name not in known]
    if unknown:
        raise _refused(f"{node.key.upper()} with {', '.join(unknown)} is not allowed")
