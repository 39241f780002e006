"""Expressions of Spark SQL, with Spark's precedence: a tree of ``pieces`` in which every operation has parentheses.

Functions are called by their plain names and must be in ``functions.ALLOWED``. This is an allow-list: an expression
that the reader doesn't know is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from tracelake.domain.errors import Invalid
from tracelake.domain.spark_select.functions import ALLOWED, MAKES_TEXT
from tracelake.domain.spark_select.literals import (
    FIELDS,
    HEX,
    INSTANT,
    INSTANTS,
    MAX_DEPTH,
    TIME_ALONE,
    LiteralReader,
    needs_a_day,
    written_anew,
)
from tracelake.domain.spark_select.pieces import Computed, Name, Piece, Text, joined
from tracelake.domain.spark_select.tokens import SqlToken, refused

# Words of the language: as a name they need backticks.
_RESERVED_WORDS = """
    ALL AND ANTI AS BETWEEN BY CASE CAST CROSS DISTINCT DIV ELSE EXCEPT FROM FULL GROUP HAVING ILIKE IN INNER
    INTERSECT IS JOIN LATERAL LIKE LIMIT MINUS NATURAL NOT NULL OFFSET ON OR ORDER OVER PIVOT QUALIFY REGEXP
    RLIKE SELECT SEMI SETMINUS TABLESAMPLE THEN TRY_CAST UNION UNPIVOT USING VALUES WHEN WHERE WINDOW WITH
"""
RESERVED = frozenset(_RESERVED_WORDS.split())
# Those of them that can't even be a column where an expression is expected.
_KEYWORDS_WORDS = """
    AND AS BETWEEN BY CASE CAST DISTINCT ELSE EXCEPT FROM GROUP HAVING IN INTERSECT IS JOIN LATERAL LIKE NOT NULL ON
    OR ORDER SELECT THEN TRY_CAST UNION USING VALUES WHEN WHERE WITH
"""
_KEYWORDS = frozenset(_KEYWORDS_WORDS.split())
# Words that end an expression or a relation: without AS they are no alias.
_NO_ALIAS_WORDS = """
    ASC CLUSTER DESC DISTRIBUTE ELSE END ESCAPE FETCH FILTER FOR LEFT MAP MATCH_RECOGNIZE NULLS PLACING REDUCE
    RIGHT ROWS RANGE SORT TABLE TRANSFORM WITHIN
"""
_NO_ALIAS = RESERVED | frozenset(_NO_ALIAS_WORDS.split())
# Without a column of that name, Spark takes them for functions, whose results change from run to run.
_NO_COLUMN_WORDS = """
    current_catalog current_database current_date current_schema current_time current_timestamp current_timezone
    current_user localtimestamp now session_user
"""
_NO_COLUMN = frozenset(_NO_COLUMN_WORDS.split())
_UNIT_FIRST = frozenset({"dateadd", "datediff", "date_add", "date_diff", "timestampadd", "timestampdiff"})
_STRINGS = ("STRING", "CHAR", "CHARACTER", "VARCHAR")
_BOOLEAN = {"OR": 0, "AND": 1}
_SHIFTS = (">>", ">>>")
_VALUES = {
    operator: level
    for level, operators in enumerate(
        ("= == <=> <> != <= >= < >", "|", "^", "&", "<< >> >>>", "+ - ||", "* / % DIV")
    )
    for operator in operators.split()
}


class Expressions(LiteralReader):
    """A subclass reads subqueries by ``query``. ``_columns`` counts the columns, stars and variables that have been
    read: a piece that adds none of them is a constant."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._columns = 0

    def query(self) -> Piece:
        raise NotImplementedError

    def expression(self) -> Piece:
        with self.deeper():
            return self._operations(self._not, _BOOLEAN)

    def expressions(self) -> Piece:
        return joined(self.several(self.expression))

    def alias(self) -> Name | None:
        if self.take("AS"):
            return self.name("an alias")
        token = self.token
        if token.kind == "name" or (token.kind == "word" and token.value.upper() not in _NO_ALIAS):
            return self.name()
        return None

    def _operations(self, operand: Callable[[], Piece], levels: Mapping[str, int], lowest: int = 0) -> Piece:
        """Operations from left to right, those of higher precedence first. Those of one level share one pair of
        parentheses, as Spark reads them anyway, so that a thousand conditions aren't nested."""
        columns = self._columns
        parts = [operand()]
        level = -1
        while (operator := self._operator(levels, lowest)) is not None:
            if level not in (-1, levels[operator]):
                parts = [("(", *parts, ")")]
            level = levels[operator]
            parts += [operator, self._operations(operand, levels, level + 1)]
        if len(parts) == 1:
            return parts[0]
        return self._maybe_computed(("(", *parts, ")"), columns, "||" in parts)

    def _maybe_computed(self, piece: Piece, columns: int, is_text: bool) -> Piece:
        """``columns``: the value of ``_columns`` before the piece was read."""
        return Computed(piece) if is_text and self._columns == columns else piece

    def _operator(self, levels: Mapping[str, int], lowest: int) -> str | None:
        token = self.token
        if token.kind not in ("word", "sign"):
            return None
        operator = token.value.upper()
        # Adjacent ``>`` are a shift; with a space between them they close nested types.
        while token.kind == "sign" and self._touches(operator):
            operator += ">"
        if levels.get(operator, -1) < lowest:
            return None
        for _ in range(len(operator) if operator in _SHIFTS else 1):
            self.next()
        return operator

    def _touches(self, operator: str) -> bool:
        following = self.peek(len(operator))
        return (
            operator in (">", ">>")
            and following.value == ">"
            and following.start == self.token.start + len(operator)
        )

    def _not(self) -> Piece:
        if self.take("NOT") or self.take_sign("!"):
            with self.deeper():
                return ("(", "NOT", self._not(), ")")
        return self._predicate()

    def _predicate(self) -> Piece:
        value = self._value()
        if self.take("IS"):
            return ("(", value, "IS", *self._is(), ")")
        negated = ("NOT",) if self.take("NOT") else ()
        if self.take("BETWEEN"):
            low = self._value()
            self.need("AND")
            return ("(", value, *negated, "BETWEEN", low, "AND", self._value(), ")")
        if self.take("IN"):
            inner = self.query if self.sees_query() else self.expressions
            return ("(", value, *negated, "IN", self.in_parentheses(inner), ")")
        for word in ("LIKE", "ILIKE", "RLIKE", "REGEXP"):
            if self.take(word):
                return ("(", value, *negated, word, *self._pattern(word), ")")
        if negated:
            raise self.unexpected("expected BETWEEN, IN or LIKE after NOT")
        return value

    def _is(self) -> Iterator[Piece]:
        if self.take("NOT"):
            yield "NOT"
        if self.take("DISTINCT", "FROM"):
            yield from ("DISTINCT", "FROM", self._value())
            return
        for word in ("NULL", "TRUE", "FALSE", "UNKNOWN"):
            if self.take(word):
                yield word
                return
        raise self.unexpected("expected NULL, TRUE, FALSE, UNKNOWN or DISTINCT FROM after IS")

    def _pattern(self, word: str) -> Iterator[Piece]:
        for each in ("ANY", "SOME", "ALL"):
            if word in ("LIKE", "ILIKE") and self.sees(each) and self.sees_sign("(", 1):
                self.next()
                yield from (each, self.in_parentheses(self.expressions))
                return
        yield self._value()
        if self.take("ESCAPE"):
            if self.token.kind != "string" or len(self.token.value) != 1:
                raise self.unexpected("expected a string of one character after ESCAPE")
            yield from ("ESCAPE", Text(self.next().value))

    def _value(self) -> Piece:
        return self._operations(self._unary, _VALUES)

    def _unary(self) -> Piece:
        for sign in ("-", "+", "~"):
            if self.sees_sign(sign):
                if sign == "-" and self.peek().kind == "number":
                    # Spark reads it as one number too: the smallest integer has no positive counterpart.
                    self.next()
                    return self._after(f"-{self.next().value}")
                self.next()
                with self.deeper():
                    return ("(", sign, self._unary(), ")")
        columns = self._columns
        return self._after(*self._primary(), columns=columns)

    def _after(self, value: Piece, plain: bool = False, columns: int = -1) -> Piece:
        """Fields, elements and casts of a value. ``plain``: the value is a name, whose fields are part of it;
        ``columns``: the value of ``_columns`` before it was read."""
        for _ in range(MAX_DEPTH):
            if self.take_sign("."):
                if self.sees_sign("(", 1):
                    if self.token.value.lower() not in ALLOWED:
                        raise _not_to_be_called(self.token.value.lower())
                    raise refused(f"must call functions by their plain names: {self.token.value[:60]}()")
                value = (value, ".", self.name("a field")) if plain else ("(", value, ")", ".", self.name())
            elif self.sees_sign("["):
                self.next()
                value, plain = (value, "[", self.expression(), "]"), False
                self.need_sign("]")
            elif self.take_sign("::"):
                value, plain = self._cast_of("CAST", value, self._cast_type(), columns), False
            else:
                return value
        raise refused("is nested too deeply")

    def _primary(self) -> tuple[Piece, bool]:
        columns, name = self._columns, self.token.value.lower()
        makes_text = self.token.kind in ("word", "name") and name in MAKES_TEXT and self.sees_sign("(", 1)
        value, plain = self._bare_primary()
        return self._maybe_computed(value, columns, makes_text), plain

    def _bare_primary(self) -> tuple[Piece, bool]:
        token = self.token
        match token.kind:
            case "number":
                return self.next().value, False
            case "string":
                return self._strings(), False
            case "name":
                if self.sees_sign("(", 1):
                    return self._call(), False
                return self._column(), True
            case "word":
                return self._word()
            case "sign" if token.value == "(":
                return self._parentheses(), False
        raise self.unexpected("expected an expression")

    def _column(self) -> Name:
        self._columns += 1
        name = self.name("an expression", _KEYWORDS)
        if name.value.lower() in _NO_COLUMN and not self.sees_sign("."):
            raise _not_to_be_called(name.value.lower())
        return name

    def _word(self) -> tuple[Piece, bool]:
        word = self.token.value.upper()
        following = self.peek()
        if word in ("NULL", "TRUE", "FALSE"):
            self.next()
            return word, False
        if word == "CASE":
            return self._case(), False
        if word == "INTERVAL" and (following.kind in ("string", "number") or following.value in ("+", "-")):
            return self._interval(), False
        if following.kind == "string" and word in (
            "DATE",
            "TIMESTAMP",
            "TIMESTAMP_NTZ",
            "TIMESTAMP_LTZ",
            "X",
        ):
            self.next()
            if self.token.kind == "string" and word != "X" and TIME_ALONE.fullmatch(self.token.value):
                raise needs_a_day(self.token.value)
            return (word, self._fixed(HEX if word == "X" else INSTANT)), False
        if self.sees_sign("(", 1):
            return self._call_of_word(word), False
        return self._column(), True

    def _call_of_word(self, word: str) -> Piece:
        if word == "EXISTS" and self.sees_query(1):
            self.next()
            return ("(", "EXISTS", self.in_parentheses(self.query), ")")
        match word:
            case "CAST" | "TRY_CAST":
                return self._cast()
            case "EXTRACT":
                return self._extract()
            case "STRUCT":
                return self._struct()
            case "TRIM":
                return self._trim()
            case "SUBSTRING" | "SUBSTR" | "POSITION" | "OVERLAY":
                return self._with_words(word)
        return self._call()

    def _parentheses(self) -> Piece:
        if self.sees_query():
            return self.in_parentheses(self.query)
        self.need_sign("(")
        values = self.several(self.expression)
        self.need_sign(")")
        return ("(", joined(values), ")")

    def _case(self) -> Piece:
        self.need("CASE")
        parts: list[Piece] = ["CASE"]
        if not self.sees("WHEN"):
            parts.append(self.expression())
        while self.take("WHEN"):
            condition = self.expression()
            self.need("THEN")
            parts += ["WHEN", condition, "THEN", self.expression()]
        if "WHEN" not in parts:
            raise self.unexpected("expected WHEN")
        if self.take("ELSE"):
            parts += ["ELSE", self.expression()]
        self.need("END")
        return (*parts, "END")

    def _cast(self) -> Piece:
        columns = self._columns
        word = self.next().value.upper()
        self.need_sign("(")
        value = self.expression()
        self.need("AS")
        kind = self._cast_type()
        self.need_sign(")")
        return self._cast_of(word, value, kind, columns)

    def _cast_of(self, word: str, value: Piece, kind: Piece, columns: int) -> Piece:
        if kind in INSTANTS and isinstance(value, Text) and TIME_ALONE.fullmatch(value.value):
            raise needs_a_day(value.value)
        is_text = (kind[0] if isinstance(kind, tuple) else kind) in _STRINGS
        return self._maybe_computed((word, "(", value, "AS", kind, ")"), columns, is_text)

    def _extract(self) -> Piece:
        self.next()
        self.need_sign("(")
        field = self._unit()
        self.need("FROM")
        value = self._value()
        self.need_sign(")")
        return ("EXTRACT", "(", field, "FROM", value, ")")

    def _trim(self) -> Piece:
        """TRIM(BOTH FROM text), TRIM(LEADING 'x' FROM text) or TRIM('x' FROM text), besides the plain call."""
        name = self.next()
        self.need_sign("(")
        parts: list[Piece] = ["TRIM", "("]
        sided = any(self.sees(side) for side in ("BOTH", "LEADING", "TRAILING"))
        if sided and not self.sees_sign(",", 1) and not self.sees_sign(")", 1):
            parts.append(self.next().value.upper())
        elif not self.sees("FROM"):
            first = self.expression()
            if not self.sees("FROM"):
                return self._arguments(name, first)
            parts.append(first)
        if not self.sees("FROM"):
            parts.append(self._value())
        self.need("FROM")
        text = self._value()
        self.need_sign(")")
        return (*parts, "FROM", text, ")")

    def _with_words(self, word: str) -> Piece:
        """SUBSTRING(text FROM 1 FOR 2), POSITION(part IN text), OVERLAY(text PLACING part FROM 1 FOR 2)."""
        name = self.next()
        self.need_sign("(")
        first = self._value()
        expected = {"POSITION": ("IN",), "OVERLAY": ("PLACING", "FROM", "FOR")}.get(word, ("FROM", "FOR"))
        if not self.sees(expected[0]):
            return self._arguments(name, first)
        parts: list[Piece] = [word, "(", first]
        for each in expected:
            if self.take(each):
                parts += [each, self._value()]
            elif each != "FOR":
                raise self.unexpected(f"expected {each}")
        self.need_sign(")")
        return (*parts, ")")

    def _struct(self) -> Piece:
        self.next()
        self.need_sign("(")
        fields = [] if self.sees_sign(")") else self.several(self.named_expression)
        self.need_sign(")")
        return ("STRUCT", "(", joined(fields), ")")

    def named_expression(self) -> Piece:
        star = self._star()
        if star is not None:
            return star
        value = self.expression()
        if self.sees("AS") and self.sees_sign("(", 1):
            self.next()
            return (value, "AS", self.names())
        alias = self.alias()
        return (value, "AS", alias) if alias is not None else value

    def _star(self) -> Piece | None:
        """``*`` and ``t.*``, with the columns that EXCEPT leaves out."""
        ahead = 0
        while self.peek(ahead).kind in ("word", "name") and self.sees_sign(".", ahead + 1):
            ahead += 2
        if not self.sees_sign("*", ahead):
            return None
        self._columns += 1
        parts: list[Piece] = []
        while not self.sees_sign("*"):
            parts += [self.name(), "."]
            self.next()
        self.next()
        if self.sees("EXCEPT") and self.sees_sign("(", 1) and not self.sees_query(1):
            self.next()
            return (*parts, "*", "EXCEPT", self.names())
        return (*parts, "*")

    def _call(self) -> Piece:
        name = self.next()
        self.need_sign("(")
        return self._arguments(name, None)

    def _arguments(self, token: SqlToken, first: Piece | None) -> Piece:
        """The rest of a call whose parenthesis is open, and whose first argument may have been read."""
        name = token.value.lower()
        if name not in ALLOWED:
            raise _not_to_be_called(name)
        if name in ("from_json", "to_json"):
            return self._json_call(name)
        if name == "unix_timestamp" and first is None and self.sees_sign(")"):
            raise refused("must not call unix_timestamp() without an argument: it is then the current time")
        distinct = ("DISTINCT",) if first is None and self.take("DISTINCT") else ()
        unit = self.token
        has_unit = name in _UNIT_FIRST and unit.value.upper() in FIELDS and self.sees_sign(",", 1)
        found = [] if first is None else [first]
        if (first is None and not self.sees_sign(")")) or self.take_sign(","):
            found += self.several(self._argument)
        nulls = self._nulls()
        self.need_sign(")")
        if has_unit and len(found) == 3:
            # Spark reads a unit only after the keyword, not after a quoted name.
            return (name.upper(), "(", unit.value, ",", joined(found[1:]), ")")
        return (f"`{name}`", "(", *distinct, joined(found), ")", *self._after_call(nulls))

    def _json_call(self, name: str) -> Piece:
        """``to_json(value)`` and ``from_json(text, 'schema')``. Options would name classes and formats."""
        value = self.expression()
        schema: tuple[Piece, ...] = ()
        if name == "from_json":
            self.need_sign(",")
            if self.token.kind != "string":
                raise self.unexpected("expected the schema of from_json() as one string")
            schema = (",", Text(written_anew(self._strings().value), fixed=True))
        if not self.sees_sign(")"):
            raise self.unexpected(f"expected ')', since {name}() takes no options here")
        self.next()
        return (f"`{name}`", "(", value, *schema, ")")

    def _argument(self) -> Piece:
        star = self._star()
        if star is not None:
            return star
        if self.token.kind in ("word", "name") and self.sees_sign("->", 1):
            variables: Piece = self.name()
            self._columns += 1
        elif self.sees_sign("(") and self._sees_variables():
            variables = self.names()
            self._columns += 1
        else:
            return self.expression()
        self.need_sign("->")
        return (variables, "->", self.expression())

    def _sees_variables(self) -> bool:
        ahead = 1
        while self.peek(ahead).kind in ("word", "name") and self.sees_sign(",", ahead + 1):
            ahead += 2
        return (
            self.peek(ahead).kind in ("word", "name")
            and self.sees_sign(")", ahead + 1)
            and self.sees_sign("->", ahead + 2)
        )

    def _nulls(self) -> tuple[Piece, ...]:
        for word in ("IGNORE", "RESPECT"):
            if self.take(word, "NULLS"):
                return (word, "NULLS")
        return ()

    def _after_call(self, nulls: tuple[Piece, ...]) -> Iterator[Piece]:
        if self.take("WITHIN", "GROUP"):
            yield from ("WITHIN", "GROUP", self.in_parentheses(self.order_by))
        if self.sees("FILTER") and self.sees_sign("(", 1):
            self.next()
            yield from ("FILTER", self.in_parentheses(self.where))
        yield from nulls or self._nulls()
        if self.take("OVER"):
            yield "OVER"
            yield self.window() if self.sees_sign("(") else self.name("a window")

    def where(self) -> Piece:
        self.need("WHERE")
        return ("WHERE", self.expression())

    def order_by(self) -> Piece:
        word = "SORT" if self.sees("SORT") else "ORDER"
        self.need(word, "BY")
        if self.take("ALL"):
            return (word, "BY", "ALL", *self._direction())
        return (word, "BY", joined(self.several(lambda: (self.expression(), *self._direction()))))

    def _direction(self) -> Iterator[Piece]:
        for word in ("ASC", "DESC"):
            if self.take(word):
                yield word
                break
        for word in ("FIRST", "LAST"):
            if self.take("NULLS", word):
                yield from ("NULLS", word)
                break

    def window(self) -> Piece:
        if self.peek().kind in ("word", "name") and self.sees_sign(")", 2):
            return self.in_parentheses(lambda: self.name("a window"))
        self.need_sign("(")
        parts: list[Piece] = ["("]
        if self.take("PARTITION", "BY"):
            parts += ["PARTITION", "BY", self.expressions()]
        elif self.take("DISTRIBUTE", "BY"):
            parts += ["DISTRIBUTE", "BY", self.expressions()]
        if self.sees("ORDER") or self.sees("SORT"):
            parts.append(self.order_by())
        for word in ("ROWS", "RANGE"):
            if self.take(word):
                parts += [word, *self._frame()]
        self.need_sign(")")
        return (*parts, ")")

    def _frame(self) -> Iterator[Piece]:
        if not self.take("BETWEEN"):
            yield from self._bound()
            return
        yield "BETWEEN"
        yield from self._bound()
        self.need("AND")
        yield "AND"
        yield from self._bound()

    def _bound(self) -> Iterator[Piece]:
        if self.take("CURRENT", "ROW"):
            yield from ("CURRENT", "ROW")
            return
        yield "UNBOUNDED" if self.take("UNBOUNDED") else self.expression()
        for word in ("PRECEDING", "FOLLOWING"):
            if self.take(word):
                yield word
                return
        raise self.unexpected("expected PRECEDING or FOLLOWING")


def _not_to_be_called(name: str) -> Invalid:
    if name in _NO_COLUMN:
        return refused(f"must not use {name.upper()}: it changes from run to run")
    return refused(f"must not call {name[:60]}()")
