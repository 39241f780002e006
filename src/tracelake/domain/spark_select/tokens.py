"""The tokens of a SQL text (words, names, strings, numbers and signs) and a cursor over them."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from tracelake.domain.errors import Invalid

TokenKind = Literal["word", "name", "string", "number", "sign", "end"]

_TOKEN = re.compile(
    r"""
      (?P<skip> [ \t\r\n]+ | --[^\n]* | /\*(?!\+)(?:(?!/\*|\*/).)*\*/ )
    | (?P<string> '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" )
    | (?P<name> `(?:[^`]|``)+` )
    | (?P<number> (?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+) (?:[eE][+-]?[0-9]+)? (?:BD|[LSYFD])? (?![A-Za-z0-9_]) )
    | (?P<word> [A-Za-z_][A-Za-z0-9_]* )
    | (?P<sign> <=> | << | <= | >= | <> | != | == | \|\| | :: | -> | (?!/\*|\*/|\|>) [(),.:+*%<>=!&|^~\[\]/-] )
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE | re.ASCII,
)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([01][0-7]{2})|(.))", re.DOTALL)
_SHORT = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a", "%": "\\%", "_": "\\_"}


# Words that people are likely to try, and that get an error of their own.
_NEVER = frozenset({"LATERAL", "PIVOT", "TABLESAMPLE", "UNPIVOT"})
# Spark reads these words together with the string after them.
_BEFORE_STRINGS = frozenset({"x", "date", "timestamp", "timestamp_ntz", "timestamp_ltz", "interval"})
_QUERY = frozenset({"SELECT", "VALUES", "WITH"})
_QUERY_GOES_ON = frozenset(
    {"CLUSTER", "DISTRIBUTE", "EXCEPT", "INTERSECT", "LIMIT", "MINUS", "OFFSET", "ORDER", "SORT", "UNION"}
)


class SqlToken(Struct, frozen=True):
    """``value`` is a string's content, a name without quotes, and any other token as it was written."""

    kind: TokenKind
    value: str
    start: int
    end: int


class TokenReader:
    """A cursor over the tokens of one text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._closing = _closing(self._tokens)
        self._at = 0

    @property
    def token(self) -> SqlToken:
        return self._tokens[self._at]

    def peek(self, ahead: int = 1) -> SqlToken:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def next(self) -> SqlToken:
        token = self.token
        self._at = min(self._at + 1, len(self._tokens) - 1)
        return token

    def sees(self, *words: str) -> bool:
        """Whether these keywords come next, one after the other."""
        for ahead, word in enumerate(words):
            token = self.peek(ahead)
            if token.kind != "word" or token.value.upper() != word:
                return False
        return True

    def take(self, *words: str) -> bool:
        if not self.sees(*words):
            return False
        self._at += len(words)
        return True

    def sees_sign(self, sign: str, ahead: int = 0) -> bool:
        token = self.peek(ahead)
        return token.kind == "sign" and token.value == sign

    def take_sign(self, sign: str) -> bool:
        if not self.sees_sign(sign):
            return False
        self._at += 1
        return True

    def sees_query(self, ahead: int = 0) -> bool:
        """Whether the parenthesis there contains a query, and not an expression or a join that begins with one."""
        place = self._at + ahead
        opened = place
        while self._is_sign(opened, "("):
            opened += 1
        first = self._tokens[opened]
        if opened == place or first.kind != "word" or first.value.upper() not in _QUERY:
            return False
        for inner in range(opened - 1, place, -1):
            after = self._tokens[self._closing.get(inner, -2) + 1]
            if after.value != ")" and not (after.kind == "word" and after.value.upper() in _QUERY_GOES_ON):
                return False
        return True

    def _is_sign(self, place: int, sign: str) -> bool:
        token = self._tokens[place]
        return token.kind == "sign" and token.value == sign

    def need(self, *words: str) -> None:
        if not self.take(*words):
            raise self.unexpected(f"expected {' '.join(words)}")

    def need_sign(self, sign: str) -> None:
        if not self.take_sign(sign):
            raise self.unexpected(f"expected {sign!r}")

    def unexpected(self, why: str) -> Invalid:
        token = self.token
        line = self._text.count("\n", 0, token.start) + 1
        column = token.start - self._text.rfind("\n", 0, token.start)
        found = "the end" if token.kind == "end" else repr(self._text[token.start : token.end][:40])
        if token.kind == "word" and token.value.upper() in _NEVER:
            why = f"must not contain {token.value.upper()}"
            return refused(f"{why}, as it does at line {line}, column {column}")
        return refused(f"can't be read: {why}, but found {found} at line {line}, column {column}")


def refused(what: str) -> Invalid:
    return Invalid("InvalidSql", f"sql {what}")


def _tokens(text: str) -> list[SqlToken]:
    tokens: list[SqlToken] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None or found.lastgroup is None:
            raise refused(_what_is_wrong(text[position:]))
        start, position = found.span()
        match found.lastgroup:
            case "skip":
                pass
            case "string":
                _check_before(tokens, start, found[0])
                tokens.append(SqlToken("string", _unescaped(found[0]), start, position))
            case "name":
                tokens.append(SqlToken("name", _checked_name(found[0]), start, position))
            case "number":
                tokens.append(SqlToken("number", found[0], start, position))
            case "word":
                tokens.append(SqlToken("word", found[0], start, position))
            case _:
                tokens.append(SqlToken("sign", found[0], start, position))
    tokens.append(SqlToken("end", "", len(text), len(text)))
    return tokens


def _closing(tokens: list[SqlToken]) -> dict[int, int]:
    """The place where each parenthesis is closed; the reader reports one that isn't."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for place, token in enumerate(tokens):
        if token.kind == "sign" and token.value == "(":
            opened.append(place)
        elif token.kind == "sign" and token.value == ")" and opened:
            closing[opened.pop()] = place
    return closing


def _what_is_wrong(rest: str) -> str:
    known = {
        "/*+": "hints are not allowed",
        "/*": "this comment doesn't end, or has another one in it",
        "|>": "write a SELECT instead of pipes",
        "?": "there are no parameters",
        "$": "there are no variables",
        ";": "it must be exactly one statement",
        **dict.fromkeys("'\"`", "this quote doesn't end, or there is nothing in it"),
    }
    hints = [f": {hint}" for start, hint in known.items() if rest.startswith(start)]
    return f"has something unexpected at {rest[:20]!r}{''.join(hints[:1])}"


def _check_before(tokens: list[SqlToken], start: int, quoted: str) -> None:
    """A word directly before a string changes its meaning: ``r'…'`` is raw."""
    if not tokens or tokens[-1].end != start:
        return
    before = tokens[-1]
    if before.kind in ("word", "name", "number") and before.value.lower() not in _BEFORE_STRINGS:
        raise refused(f"must not write {before.value}{quoted[:20]}: put a space before the string")


def _checked_name(quoted: str) -> str:
    name = quoted[1:-1].replace("``", "`")
    # Where variable substitution is on, Spark replaces ${…} inside of names too.
    if not name.isprintable() or "${" in name:
        raise refused(f"has a name with characters that names must not have here: {name[:40]!r}")
    return name


def _unescaped(quoted: str) -> str:
    """A string's content as Spark reads it: backslashes escape, and a doubled quote is one."""
    quote, inner = quoted[0], quoted[1:-1]
    # Outside of escapes, a quote inside of a string is always doubled.
    parts: list[str] = []
    position = 0
    for found in _ESCAPE.finditer(inner):
        parts += [inner[position : found.start()].replace(quote * 2, quote), _character(found)]
        position = found.end()
    parts.append(inner[position:].replace(quote * 2, quote))
    try:
        # Two escapes may form one character, as a surrogate pair.
        return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeError:
        raise refused("has a string with half of a surrogate pair") from None


def _character(found: re.Match[str]) -> str:
    short, wide, octal, other = found.groups()
    if octal is not None:
        return chr(int(octal, 8))
    if other is not None:
        return _SHORT.get(other, other)
    code = int(short or wide, 16)
    if code > 0x10FFFF:
        raise refused(f"has a string with {found[0]}, which is no character")
    return chr(code)
