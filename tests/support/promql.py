"""A strict reader of PromQL: what rules and panels of this repository use of it, and no more.

``read_promql`` parses a whole expression and returns its selectors and the labels that aggregations and matchings
name; anything that it doesn't know is an error, so a typing error can't hide as an unknown construct.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

FUNCTIONS = frozenset(
    {"rate", "irate", "increase", "delta", "deriv", "changes", "histogram_quantile", "max_over_time", "time"}
    | {
        "min_over_time",
        "avg_over_time",
        "clamp_min",
        "clamp_max",
        "absent",
        "label_replace",
        "vector",
        "round",
    }
)
AGGREGATIONS = frozenset({"sum", "max", "min", "avg", "count", "topk", "bottomk", "group"})
SET_OPERATORS = frozenset({"and", "or", "unless"})
_MATCHINGS = frozenset({"on", "ignoring"})
_GROUPINGS = frozenset({"by", "without"})
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![a-z\d]))
      | (?P<duration>\d+(?:ms|[smhdwy])|\$__(?:rate_)?interval|\$__range)
      | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
      | (?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)
      | (?P<mark>==|!=|<=|>=|=~|!~|[-+*/%^<>=(){}\[\],]))""",
    re.VERBOSE,
)


class PromqlError(ValueError):
    pass


@dataclass(frozen=True, slots=True)
class PromqlSelector:
    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    has_range: bool

    @property
    def labels(self) -> set[str]:
        return {name for name, _, _ in self.matchers}


@dataclass(slots=True)
class PromqlExpression:
    """``grouped`` are the labels that aggregations keep and matchings compare, with the metrics below each."""

    selectors: list[PromqlSelector] = field(default_factory=list)
    grouped: list[tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=list)


def read_promql(text: str) -> PromqlExpression:
    reader = _Reader(_tokens(text), text)
    reader.expression()
    reader.end()
    return reader.found


def _tokens(text: str) -> list[tuple[str, str]]:
    found, place = [], 0
    while place < len(text.rstrip()):
        match = _TOKEN.match(text, place)
        if match is None or match.lastgroup is None:
            raise PromqlError(f"unreadable from {text[place : place + 20]!r} in {text!r}")
        found.append((match.lastgroup, match[match.lastgroup]))
        place = match.end()
    return found


class _Reader:
    def __init__(self, tokens: list[tuple[str, str]], text: str) -> None:
        self._tokens = tokens
        self._place = 0
        self._text = text
        self.found = PromqlExpression()

    def expression(self) -> None:
        first = len(self.found.selectors)
        self._operand()
        while self._is_operator():
            operator = self._next()
            if operator not in SET_OPERATORS and self._peek() == "bool":
                self._next()
            labels: tuple[str, ...] = ()
            if self._peek() in _MATCHINGS:
                self._next()
                labels = self._labels()
            if self._peek() in ("group_left", "group_right"):
                self._next()
                if self._peek() == "(":
                    self._labels()
            self._operand()
            self._note(labels, first)

    def end(self) -> None:
        if self._place < len(self._tokens):
            raise self._error("the end")

    def _operand(self) -> None:
        kind, text = self._token()
        if text in ("-", "+"):
            self._next()
            self._operand()
        elif text == "(":
            self._next()
            self.expression()
            self._must(")")
        elif kind == "number":
            self._next()
        elif kind == "name" or text == "{":
            self._named()
        else:
            raise self._error("an operand")

    def _named(self) -> None:
        name = self._next() if self._peek() != "{" else ""
        if name in AGGREGATIONS:
            self._aggregation()
        elif self._peek() == "(":
            if name not in FUNCTIONS:
                raise PromqlError(f"unknown function {name} in {self._text!r}")
            self._arguments()
        elif name in SET_OPERATORS | _MATCHINGS | _GROUPINGS or not name:
            raise self._error("a metric")
        else:
            self._selector(name)

    def _aggregation(self) -> None:
        first = len(self.found.selectors)
        labels: tuple[str, ...] | None = None
        if self._peek() in _GROUPINGS:
            self._next()
            labels = self._labels()
        self._arguments()
        if labels is None and self._peek() in _GROUPINGS:
            self._next()
            labels = self._labels()
        self._note(labels or (), first)

    def _arguments(self) -> None:
        self._must("(")
        while self._peek() != ")":
            if self._token()[0] == "string":
                self._next()
            else:
                self.expression()
            if self._peek() != ")":
                self._must(",")
        self._must(")")

    def _selector(self, metric: str) -> None:
        matchers = []
        if self._peek() == "{":
            self._next()
            while self._peek() != "}":
                label = self._kind("name", "a label")
                operator = self._next()
                if operator not in ("=", "!=", "=~", "!~"):
                    raise self._error("a matcher")
                value = self._kind("string", "a value")[1:-1]
                if "~" in operator:
                    re.compile(value)
                matchers.append((label, operator, value))
                if self._peek() != "}":
                    self._must(",")
            self._must("}")
        has_range = self._peek() == "["
        if has_range:
            self._next()
            self._kind("duration", "a duration")
            self._must("]")
        if self._peek() == "offset":
            self._next()
            self._kind("duration", "a duration")
        self.found.selectors.append(PromqlSelector(metric, tuple(matchers), has_range))

    def _labels(self) -> tuple[str, ...]:
        self._must("(")
        found = []
        while self._peek() != ")":
            found.append(self._kind("name", "a label"))
            if self._peek() != ")":
                self._must(",")
        self._must(")")
        return tuple(found)

    def _note(self, labels: tuple[str, ...], first: int) -> None:
        metrics = tuple(each.metric for each in self.found.selectors[first:])
        if labels:
            self.found.grouped.append((labels, metrics))

    def _is_operator(self) -> bool:
        return self._peek() in SET_OPERATORS | {
            *("+", "-", "*", "/", "%", "^"),
            *("==", "!=", "<", ">", "<=", ">="),
        }

    def _token(self) -> tuple[str, str]:
        return self._tokens[self._place] if self._place < len(self._tokens) else ("end", "")

    def _peek(self) -> str:
        return self._token()[1]

    def _next(self) -> str:
        found = self._peek()
        self._place += 1
        return found

    def _must(self, wanted: str) -> None:
        if self._peek() != wanted:
            raise self._error(repr(wanted))
        self._place += 1

    def _kind(self, kind: str, what: str) -> str:
        if self._token()[0] != kind:
            raise self._error(what)
        return self._next()

    def _error(self, wanted: str) -> PromqlError:
        return PromqlError(f"expected {wanted}, found {self._peek()!r} in {self._text!r}")
