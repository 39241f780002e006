"""``judge_instants``: refuses a query in whose plan Spark makes timestamps of text.

From a time without a day (``12:00:00``), a cast to a timestamp makes one of the current day, so the rows would
change from day to day. The cast needn't be in the query: Spark adds it where text meets a timestamp, and where a
function of time gets text. Plans show ``cast(… as timestamp)``, but not the type of the value. So the type is
derived from how the value is made: views have types, a name stands for a value, and functions are listed by their
results. A value that may be text is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from tracelake.domain.errors import Invalid
from tracelake.domain.spark_select.functions import GIVES_AN_ARGUMENT, GIVES_NO_TEXT
from tracelake.domain.spark_select.tokens import refused

_TO_INSTANT = " as timestamp)"
_NESTED_INSTANTS = re.compile(r" as (?:array|map|struct)<[^)]*\btimestamp\b")
_CAST = re.compile(r"\b(?:try_)?cast\(", re.IGNORECASE)
_ATTRIBUTE = re.compile(r".*#(?P<id>\d+)(?P<long>L?)", re.DOTALL)
_ALIAS = re.compile(r"(?P<value>.*) AS .*#(?P<id>\d+)L?", re.DOTALL)
_CALL = re.compile(r"(?P<name>\w+)\((?P<inner>.*)\)", re.DOTALL)
_CASE = re.compile(r"CASE WHEN (?P<inner>.*) END", re.DOTALL)
_VALUES_OF_CASE = re.compile(r" (?:THEN|ELSE) (.*?)(?= WHEN | ELSE |$)", re.DOTALL)
# A number, or a day with or without a time: text of this form is the same on every day.
_LITERAL = re.compile(r"[+-]?[0-9]+(?:[-.].*)?|null", re.DOTALL)
_VIEW = re.compile(r"(?P<before>[:+\- ]*)View \(`(?P<name>(?:[^`]|``)+)`, \[")
_NAMED = re.compile(r"(?P<name>[\w ]+)#(?P<id>\d+)")
_LISTS = re.compile(r"[:+\- ]*'?(?:Project|Aggregate|Window)\b")
_MAX_DEPTH = 50
Types = Mapping[str, str]
"""The type's name of each known attribute, by its number."""


def judge_instants(
    optimized: Sequence[str], analyzed: Sequence[str], columns: Callable[[str], Mapping[str, str]]
) -> None:
    """``columns`` gives the types of a view's columns; it is asked only if something is cast."""
    casts = [cast for line in optimized for cast in _casts(line)]
    if any(_NESTED_INSTANTS.search(line) for line in optimized):
        raise _makes_instants("something with text in it")
    if not casts:
        return
    judged = _Judged(_types_of_views(analyzed, columns), _aliases(optimized))
    for cast in casts:
        if not judged.is_no_text(cast):
            raise _makes_instants(_readable(cast))


class _Judged:
    def __init__(self, types: Types, aliases: Mapping[str, str]) -> None:
        self._types = types
        self._aliases = aliases

    def is_no_text(self, value: str, depth: int = 0) -> bool:
        value = value.strip()
        # Aliases stand for other aliases. A value that can't be decided counts as text, and is refused.
        if depth > _MAX_DEPTH:
            return False
        if value.startswith("(") and closes(value, 0) == len(value) - 1:
            # Text is joined by a function, so what stands in parentheses is arithmetic or a condition.
            return True
        if (cast := _CAST.match(value)) is not None and closes(value, cast.end() - 1) == len(value) - 1:
            kind = value[:-1].rpartition(" as ")[2]
            return kind not in ("string", "binary") and "char" not in kind
        call = _CALL.fullmatch(value)
        if call is not None and closes(value, len(call["name"])) == len(value) - 1:
            name = call["name"].lower()
            if name in GIVES_AN_ARGUMENT:
                return all(self.is_no_text(each, depth + 1) for each in split(call["inner"]))
            return name in GIVES_NO_TEXT or name == "gettimestamp"
        if (case := _CASE.fullmatch(value)) is not None and "CASE" not in case["inner"]:
            found = _VALUES_OF_CASE.findall(case["inner"])
            return bool(found) and all(self.is_no_text(each, depth + 1) for each in found)
        if (attribute := _ATTRIBUTE.fullmatch(value)) is not None:
            return self._is_attribute_no_text(attribute, depth)
        return _LITERAL.fullmatch(value) is not None

    def _is_attribute_no_text(self, attribute: re.Match[str], depth: int) -> bool:
        # Spark marks attributes of type long with an L.
        if attribute["long"]:
            return True
        number = attribute["id"]
        if number in self._types:
            return self._types[number] != "string"
        return number in self._aliases and self.is_no_text(self._aliases[number], depth + 1)


def _casts(line: str) -> Iterator[str]:
    """The values that are cast to a timestamp in a line of a plan."""
    if _TO_INSTANT not in line:
        return
    known = 0
    for cast in _CAST.finditer(line):
        end = closes(line, cast.end() - 1)
        inside = line[cast.end() : end]
        if end != -1 and f"{inside})".endswith(_TO_INSTANT):
            known += 1
            yield inside.removesuffix(_TO_INSTANT[:-1])
    if known < line.count(_TO_INSTANT):
        # A string with parentheses is in the way, or looks like a cast.
        raise _makes_instants("something")


def _types_of_views(analyzed: Sequence[str], columns: Callable[[str], Mapping[str, str]]) -> dict[str, str]:
    """Types by attribute number. A view's column names are the same in the plan below the view."""
    types: dict[str, str] = {}
    known: Mapping[str, str] = {}
    below: int | None = None
    for line in analyzed:
        depth = len(line) - len(line.lstrip(":+- "))
        if (view := _VIEW.match(line)) is not None and (below is None or depth <= below):
            known, below = columns(view["name"].replace("``", "`")), depth
        elif below is not None and depth <= below:
            below = None
        if below is not None:
            for found in _NAMED.finditer(line):
                if (name := found["name"].strip()) in known:
                    types[found["id"]] = known[name]
    return types


def _aliases(plan: Sequence[str]) -> dict[str, str]:
    """The values of a plan's aliases, by attribute number."""
    found: dict[str, str] = {}
    for line in plan:
        if _LISTS.match(line) is None:
            continue
        start = line.find("[")
        while start != -1:
            end = closes(line, start)
            for item in split(line[start + 1 : end]):
                if (alias := _ALIAS.fullmatch(item.strip())) is not None:
                    found[alias["id"]] = alias["value"]
            start = line.find("[", end) if end != -1 else -1
    return found


def _readable(value: str) -> str:
    return re.sub(r"#\d+L?", "", value)[:60]


def _makes_instants(what: str) -> Invalid:
    return refused(
        f"takes {what} for a timestamp, which may be text: of a time without a day, Spark makes one of the "
        "current day; use to_timestamp(text, format) for text and timestamp_seconds(number) for numbers"
    )


def closes(text: str, opened: int) -> int:
    """The position where the parenthesis or bracket at ``opened`` is closed; -1 if it isn't."""
    depth = 0
    for place in range(opened, len(text)):
        if text[place] in "([":
            depth += 1
        elif text[place] in ")]":
            depth -= 1
            if depth == 0:
                return place
    return -1


def split(text: str) -> list[str]:
    """Split at the commas outside of parentheses."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]
