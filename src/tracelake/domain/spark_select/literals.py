"""Names, types and literals of Spark SQL, read as ``pieces``: the parts of a query that have no operations.

A literal must mean the same in every run. Spark takes strings such as ``'now'`` for the current time, and completes
a time without a day by the current day; so a literal that would become such a timestamp is refused, as are casts
and schemas by which text would become one inside of a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tracelake.domain.errors import Invalid
from tracelake.domain.spark_select.pieces import Name, Piece, Text, joined, render
from tracelake.domain.spark_select.tokens import TokenReader, refused

MAX_DEPTH = 64
_NONE: frozenset[str] = frozenset()
_FIELDS_WORDS = """
    CENTURY DAY DAYOFWEEK DAYOFWEEK_ISO DAYOFYEAR DAYS DECADE DOW DOW_ISO DOY EPOCH HOUR HOURS ISODOW ISOYEAR
    MICROSECOND MICROSECONDS MILLENNIUM MILLISECOND MILLISECONDS MINUTE MINUTES MONTH MONTHS NANOSECOND NANOSECONDS
    QUARTER SECOND SECONDS WEEK WEEKS YEAR YEARS YEAROFWEEK
"""
#: Units of time, and the fields that EXTRACT reads.
FIELDS = frozenset(_FIELDS_WORDS.split())
_TYPES_WORDS = """
    BIGINT BINARY BOOLEAN BYTE CHAR CHARACTER DATE DEC DECIMAL DOUBLE FLOAT INT INTEGER LONG NUMERIC REAL SHORT
    SMALLINT STRING TIME TIMESTAMP TIMESTAMP_LTZ TIMESTAMP_NTZ TINYINT VARCHAR VOID
"""
_TYPES = frozenset(_TYPES_WORDS.split())
INSTANTS = ("TIMESTAMP", "TIMESTAMP_LTZ")
_DIGITS = re.compile(r"[0-9]+")
HEX = re.compile(r"(?:[0-9A-Fa-f]{2})*")
_MOMENT = re.compile(r"\s*[+-]?[0-9][0-9A-Za-z .:+/_-]*")
#: A date with or without a time; never a time alone.
INSTANT = re.compile(r"\s*[+-]?[0-9]{4,6}-[0-9]{2}-[0-9]{2}(?:[ T][0-9A-Za-z .:+/_-]*)?\s*")
_CLOCK = re.compile(r"[\s\0-\x20]*(?:now|today|tomorrow|yesterday)(?:\s.*)?", re.IGNORECASE | re.DOTALL)
TIME_ALONE = re.compile(r"[\s\0-\x20]*(?:T[0-9]|[0-9]{1,2}:[0-9]).*", re.DOTALL)


class LiteralReader(TokenReader):
    """Reads names, types and literals. ``_is_row`` is set while a row of VALUES is read."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._is_row = False

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Limits the depth: Spark's parser recurses as this one does."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise refused("is nested too deeply")
        yield
        self._depth -= 1

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
        """Every word is a name where only a name is allowed; ``reserved`` words have another meaning there."""
        token = self.token
        if token.kind == "name" or (token.kind == "word" and token.value.upper() not in reserved):
            self.next()
            return Name(token.value)
        raise self.unexpected(f"expected {what}")

    def names(self) -> Piece:
        return self.in_parentheses(lambda: joined(self.several(self.name)))

    def _strings(self) -> Text:
        """Adjacent strings are one."""
        value = self.next().value
        while self.token.kind == "string":
            value += self.next().value
        if _CLOCK.fullmatch(value):
            raise refused(
                f"must not contain the string {value.strip()!r}, which Spark takes for the current time wherever "
                "a date or a timestamp is expected"
            )
        if self._is_row and TIME_ALONE.fullmatch(value):
            # Spark computes these rows while it parses, so the plan no longer shows the text that they came from.
            raise needs_a_day(value)
        return Text(value)

    def _fixed(self, allowed: re.Pattern[str]) -> Text:
        if self.token.kind != "string" or not allowed.fullmatch(self.token.value):
            raise self.unexpected("expected a literal of that kind")
        return Text(self.next().value, fixed=True)

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
            if not (self.token.kind == "word" and self.token.value.upper() in FIELDS):
                if len(parts) == 2 and isinstance(parts[1], Text):
                    return tuple(parts)
                raise self.unexpected("expected a unit of time")
            parts.append(self._unit())
            if self.take("TO"):
                parts += ["TO", self._unit()]
                return tuple(parts)
            following = self.peek(1 if self.token.value in ("+", "-") else 0)
            unit = self.peek(2 if self.token.value in ("+", "-") else 1)
            if following.kind not in ("number", "string") or unit.value.upper() not in FIELDS:
                return tuple(parts)

    def _unit(self) -> str:
        if self.token.kind != "word" or self.token.value.upper() not in FIELDS:
            raise self.unexpected("expected a unit of time")
        # Not in upper case: it becomes part of a column's name.
        return self.next().value

    def _cast_type(self) -> Piece:
        kind = self._type()
        if isinstance(kind, tuple) and _has_instants(kind):
            raise refused(
                "must not cast to a type with timestamps in it: of a time without a day, Spark makes one of the "
                "current day; make each of them with to_timestamp(text, format)"
            )
        return kind

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

    def schema(self) -> Piece:
        """The schema of from_json() in Spark's DDL: ``a INT, b ARRAY<STRING>`` or one nested type."""
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


def written_anew(schema: str) -> str:
    """A schema as this reader writes it. Spark would also accept JSON, which can name classes and contain SQL."""
    try:
        return render(LiteralReader(schema).schema())
    except Invalid as error:
        why = error.message.removeprefix("sql ")
        raise refused(f"has a schema for from_json() that isn't allowed: it {why}") from None


def _has_instants(kind: Piece) -> bool:
    return kind in INSTANTS or (isinstance(kind, tuple) and any(map(_has_instants, kind)))


def is_clock(text: str) -> bool:
    """Whether Spark's timestamp for this text depends on the current day."""
    return bool(_CLOCK.fullmatch(text) or TIME_ALONE.fullmatch(text))


def needs_a_day(text: str) -> Invalid:
    return refused(
        f"must not take {text.strip()!r} for a timestamp: of a time without a day, Spark makes one of the "
        "current day; write YYYY-MM-DD before it"
    )
