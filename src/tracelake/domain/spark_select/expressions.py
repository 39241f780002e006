"""Expressions of Spark SQL, with Spark's precedence: a tree of ``pieces`` in which every operation has parentheses.

A function is called by its plain name and is one of ``functions.ALLOWED``. What isn't read here isn't allowed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from tracelake.domain.errors import Invalid
from tracelake.domain.spark_select.functions import ALLOWED, MAKES_TEXT
from tracelake.domain.spark_select.pieces import Computed, Name, Piece, Text, joined, render
from tracelake.domain.spark_select.words import Reader, Token, refused

MAX_DEPTH = 64

# Words that a query is made of: as a name they need backticks.
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
_NONE: frozenset[str] = frozenset()
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
_FIELDS_WORDS = """
    CENTURY DAY DAYOFWEEK DAYOFWEEK_ISO DAYOFYEAR DAYS DECADE DOW DOW_ISO DOY EPOCH HOUR HOURS ISODOW ISOYEAR
    MICROSECOND MICROSECONDS MILLENNIUM MILLISECOND MILLISECONDS MINUTE MINUTES MONTH MONTHS NANOSECOND NANOSECONDS
    QUARTER SECOND SECONDS WEEK WEEKS YEAR YEARS YEAROFWEEK
"""
_FIELDS = frozenset(_FIELDS_WORDS.split())
_UNIT_FIRST = frozenset({"dateadd", "datediff", "date_add", "date_diff", "timestampadd", "timestampdiff"})
_TYPES_WORDS = """
    BIGINT BINARY BOOLEAN BYTE CHAR CHARACTER DATE DEC DECIMAL DOUBLE FLOAT INT INTEGER LONG NUMERIC REAL SHORT
    SMALLINT STRING TIME TIMESTAMP TIMESTAMP_LTZ TIMESTAMP_NTZ TINYINT VARCHAR VOID
"""
_TYPES = frozenset(_TYPES_WORDS.split())
_DIGITS = re.compile(r"[0-9]+")
_HEX = re.compile(r"(?:[0-9A-Fa-f]{2})*")
_MOMENT = re.compile(r"\s*[+-]?[0-9][0-9A-Za-z .:+/_-]*")
# With its day: of a time alone, Spark makes one of the current day.
_INSTANT = re.compile(r"\s*[+-]?[0-9]{4,6}-[0-9]{2}-[0-9]{2}(?:[ T][0-9A-Za-z .:+/_-]*)?\s*")
_INSTANTS = ("TIMESTAMP", "TIMESTAMP_LTZ")
_STRINGS = ("STRING", "CHAR", "CHARACTER", "VARCHAR")
_CLOCK = re.compile(r"[\s\0-\x20]*(?:now|today|tomorrow|yesterday)(?:\s.*)?", re.IGNORECASE | re.DOTALL)
_TIME_ALONE = re.compile(r"[\s\0-\x20]*(?:T[0-9]|[0-9]{1,2}:[0-9]).*", re.DOTALL)
_BOOLEAN = {"OR": 0, "AND": 1}
_SHIFTS = (">>", ">>>")
_VALUES = {
    operator: level
    for level, operators in enumerate(
        ("= == <=> <> != <= >= < >", "|", "^", "&", "<< >> >>>", "+ - ||", "* / % DIV")
    )
    for operator in operators.split()
}


class Expressions(Reader):
    """``query`` reads a subquery."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._columns = 0
        """How many columns, stars and variables have been read: what adds none of them is a constant."""
        self._is_row = False
        """Whether what is read is a row of VALUES."""

    def query(self) -> Piece:
        raise NotImplementedError

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Spark's parser calls itself as ours does, and doesn't survive what never ends."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise refused("is nested too deeply")
        yield
        self._depth -= 1

    def expression(self) -> Piece:
        with self.deeper():
            return self._operations(self._not, _BOOLEAN)

    def expressions(self) -> Piece:
        return joined(self.several(self.expression))

    def several(self, read: Callable[[], Piece]) -> list[Piece]:
        found = [read()]
        while self.take_sign(","):
            found.append(read())
        return found

    def in_parentheses(self, read: Callable[[], Piece]) -> Piece:
        self.need_sign("(")
        inner = read()
        self.need_sign(")")
        return ("(", inner, ")")

    def name(self, what: str = "a name", reserved: frozenset[str] = _NONE) -> Name:
        """Where only a name can stand, every word is one; ``reserved`` are those that may stand there as well."""
        token = self.token
        if token.kind == "name" or (token.kind == "word" and token.value.upper() not in reserved):
            self.next()
            return Name(token.value)
        raise self.unexpected(f"expected {what}")

    def names(self) -> Piece:
        return self.in_parentheses(lambda: joined(self.several(self.name)))

    def alias(self) -> Name | None:
        if self.take("AS"):
            return self.name("an alias")
        token = self.token
        if token.kind == "name" or (token.kind == "word" and token.value.upper() not in _NO_ALIAS):
            return self.name()
        return None

    def _operations(self, operand: Callable[[], Piece], levels: Mapping[str, int], lowest: int = 0) -> Piece:
        """Operations from left to right, those that bind more first. Those of one level are written in one row, as
        Spark reads them anyway: a thousand conditions are no nesting."""
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
        """``columns`` is how many had been read before the piece was."""
        return Computed(piece) if is_text and self._columns == columns else piece

    def _operator(self, levels: Mapping[str, int], lowest: int) -> str | None:
        token = self.token
        if token.kind not in ("word", "sign"):
            return None
        operator = token.value.upper()
        # Two of these are a shift where they touch, and otherwise the ends of types.
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
                    # One number to Spark too: the least of its kind has no positive counterpart.
                    self.next()
                    return self._after(f"-{self.next().value}")
                self.next()
                with self.deeper():
                    return ("(", sign, self._unary(), ")")
        columns = self._columns
        return self._after(*self._primary(), columns=columns)

    def _after(self, value: Piece, plain: bool = False, columns: int = -1) -> Piece:
        """Fields, elements and casts of a value. ``plain`` is a name, whose fields are part of it; ``columns`` is
        how many had been read before the value was."""
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

    def _strings(self) -> Text:
        """Strings in a row are one."""
        value = self.next().value
        while self.token.kind == "string":
            value += self.next().value
        if _CLOCK.fullmatch(value):
            raise refused(
                f"must not contain the string {value.strip()!r}, which Spark takes for the current time wherever "
                "a date or a timestamp is expected"
            )
        if self._is_row and _TIME_ALONE.fullmatch(value):
            # Spark computes rows while it reads the query: its plan doesn't show what they were made of.
            raise _needs_a_day(value)
        return Text(value)

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
            if self.token.kind == "string" and word != "X" and _TIME_ALONE.fullmatch(self.token.value):
                raise _needs_a_day(self.token.value)
            return (word, self._fixed(_HEX if word == "X" else _INSTANT)), False
        if self.sees_sign("(", 1):
            return self._call_of_word(word), False
        return self._column(), True

    def _fixed(self, allowed: re.Pattern[str]) -> Text:
        if self.token.kind != "string" or not allowed.fullmatch(self.token.value):
            raise self.unexpected("expected a literal of that kind")
        return Text(self.next().value, fixed=True)

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
        if kind in _INSTANTS and isinstance(value, Text) and _TIME_ALONE.fullmatch(value.value):
            raise _needs_a_day(value.value)
        is_text = (kind[0] if isinstance(kind, tuple) else kind) in _STRINGS
        return self._maybe_computed((word, "(", value, "AS", kind, ")"), columns, is_text)

    def _cast_type(self) -> Piece:
        kind = self._type()
        if isinstance(kind, tuple) and _has_instants(kind):
            raise refused(
                "must not cast to a type with timestamps in it: of a time without a day, Spark makes one of the "
                "current day; make each of them with to_timestamp(text, format)"
            )
        return kind

    def _extract(self) -> Piece:
        self.next()
        self.need_sign("(")
        field = self._unit()
        self.need("FROM")
        value = self._value()
        self.need_sign(")")
        return ("EXTRACT", "(", field, "FROM", value, ")")

    def _trim(self) -> Piece:
        """TRIM(BOTH FROM text), TRIM(LEADING 'x' FROM text) or TRIM('x' FROM text), beside the plain call."""
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
        """``*`` and ``t.*``, and the columns that are left out of it."""
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

    def _arguments(self, token: Token, first: Piece | None) -> Piece:
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
        has_unit = name in _UNIT_FIRST and unit.value.upper() in _FIELDS and self.sees_sign(",", 1)
        found = [] if first is None else [first]
        if (first is None and not self.sees_sign(")")) or self.take_sign(","):
            found += self.several(self._argument)
        nulls = self._nulls()
        self.need_sign(")")
        if has_unit and len(found) == 3:
            # Only as a word of the language is it read with a unit.
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
            schema = (",", Text(_written_anew(self._strings().value), fixed=True))
        if not self.sees_sign(")"):
            raise self.unexpected(f"expected ')', since {name}() takes no options here")
        self.next()
        return (f"`{name}`", "(", value, *schema, ")")

    def schema(self) -> Piece:
        """The schema of from_json(), as Spark's DDL has it: ``a INT, b ARRAY<STRING>`` or one nested type."""
        if any(self.sees(word) and self.sees_sign("<", 1) for word in ("ARRAY", "MAP", "STRUCT")):
            found = self._type()
        else:
            found = ("STRUCT", "<", joined(self.several(self._field)), ">")
        if self.token.kind != "end":
            raise self.unexpected("expected the end of the schema")
        if _has_instants(found):
            raise refused(
                "must not read a TIMESTAMP by from_json(): of a time without a day, Spark makes one of the current "
                "day; read it as a STRING and use to_timestamp(text, format)"
            )
        return found

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

    def _unit(self) -> str:
        if self.token.kind != "word" or self.token.value.upper() not in _FIELDS:
            raise self.unexpected("expected a unit of time")
        # As it was written: it becomes part of a column's name.
        return self.next().value

    def _interval(self) -> Piece:
        self.next()
        parts: list[Piece] = ["INTERVAL"]
        while True:
            if self.sees_sign("+") or self.sees_sign("-"):
                parts.append(self.next().value)
            if self.token.kind == "number":
                parts.append(self.next().value)
            else:
                parts.append(self._fixed(_MOMENT))
            if not (self.token.kind == "word" and self.token.value.upper() in _FIELDS):
                if len(parts) == 2 and isinstance(parts[1], Text):
                    return tuple(parts)
                raise self.unexpected("expected a unit of time")
            parts.append(self._unit())
            if self.take("TO"):
                parts += ["TO", self._unit()]
                return tuple(parts)
            following = self.peek(1 if self.token.value in ("+", "-") else 0)
            unit = self.peek(2 if self.token.value in ("+", "-") else 1)
            if following.kind not in ("number", "string") or unit.value.upper() not in _FIELDS:
                return tuple(parts)

    def _type(self) -> Piece:
        with self.deeper():
            word = self.token.value.upper() if self.token.kind == "word" else ""
            if word in ("ARRAY", "MAP", "STRUCT"):
                self.next()
                self.need_sign("<")
                read = self._field if word == "STRUCT" else self._type
                inner = self.several(read)
                self.need_sign(">")
                return (word, "<", joined(inner), ">")
            if word == "INTERVAL":
                self.next()
                unit = self._unit()
                return ("INTERVAL", unit, *(("TO", self._unit()) if self.take("TO") else ()))
            if word not in _TYPES:
                raise self.unexpected("expected a type")
            self.next()
            if not self.take_sign("("):
                return word
            sizes = self.several(self._size)
            self.need_sign(")")
            return (word, "(", joined(sizes), ")")

    def _size(self) -> Piece:
        if self.token.kind != "number" or not _DIGITS.fullmatch(self.token.value):
            raise self.unexpected("expected a whole number")
        return self.next().value

    def _field(self) -> Piece:
        name = self.name("a field")
        self.take_sign(":")
        return (name, self._type())


def _written_anew(schema: str) -> str:
    """A schema as this reader writes it. Spark would also take JSON, which names classes and has SQL in it."""
    try:
        return render(Expressions(schema).schema())
    except Invalid as error:
        why = error.message.removeprefix("sql ")
        raise refused(f"has a schema for from_json() that is not to be used: it {why}") from None


def _has_instants(kind: Piece) -> bool:
    return kind in _INSTANTS or (isinstance(kind, tuple) and any(map(_has_instants, kind)))


def is_clock(text: str) -> bool:
    """Whether Spark makes something of this text that depends on the day."""
    return bool(_CLOCK.fullmatch(text) or _TIME_ALONE.fullmatch(text))


def _needs_a_day(text: str) -> Invalid:
    return refused(
        f"must not take {text.strip()!r} for a timestamp: of a time without a day, Spark makes one of the "
        "current day; write YYYY-MM-DD before it"
    )


def _not_to_be_called(name: str) -> Invalid:
    if name in _NO_COLUMN:
        return refused(f"must not use {name.upper()}: it changes from run to run")
    return refused(f"must not call {name[:60]}()")
