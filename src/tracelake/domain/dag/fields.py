"""Typed access to one map of a DAG file.

A reader returns the value, or the default after it has reported a problem, so that parsing goes on and finds the
next one. A field that is present but empty counts as absent. Unknown fields are refused with the nearest known
name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from enum import StrEnum
from typing import Any, TypeVar

from tracelake.domain.dag.problems import Map, Node, Path, Problems, Scalar, Seq, kind_of, plain
from tracelake.domain.duration import parse_duration

E = TypeVar("E", bound=StrEnum)

MAX_SECONDS = 365 * 24 * 3600
MAX_COUNT = 1_000_000_000
MAX_STRINGS = 500
#: Above this number of names errors have no hint: the search for the nearest one takes time for each name.
MAX_HINTS_FROM = 200
#: Fewer letters begin too many names.
_BEGINNING = 3


class Fields:
    def __init__(self, node: Map, path: Path, problems: Problems, known: Collection[str]) -> None:
        self.path = path
        self._node = node
        self._problems = problems
        for key in node.key_marks:
            if key not in known and not problems.known((*path, key)):
                problems.add((*path, key), f"unknown field{did_you_mean(key, known)}")

    def at(self, name: str) -> Path:
        return (*self.path, name)

    def node(self, name: str) -> Node | None:
        node = self._node.entries.get(name)
        # A name without a value is null in YAML; it counts as left out.
        return None if isinstance(node, Scalar) and node.value is None else node

    def has(self, name: str) -> bool:
        return self.node(name) is not None

    def wrong(self, name: str, message: str) -> None:
        self._problems.add_unless_known(self.at(name), message)

    def string(
        self, name: str, *, required: bool = True, pattern: re.Pattern[str] | None = None
    ) -> str | None:
        node = self.node(name)
        if node is None:
            if required:
                self.wrong(name, "is required")
            return None
        if not isinstance(node, Scalar) or not isinstance(node.value, str):
            self.wrong(name, f"must be a string, not {kind_of(node)}")
            return None
        if not node.value.strip() or len(node.value) > 2048:
            self.wrong(name, "must be a string of 1 to 2048 characters")
        elif pattern is not None and not pattern.match(node.value):
            self.wrong(name, f"{node.value[:140]!r} does not match {shown(pattern)}")
        return node.value

    def integer(self, name: str, default: Any, *, low: int, high: int = MAX_COUNT) -> Any:
        node = self.node(name)
        if node is None:
            return default
        value = node.value if isinstance(node, Scalar) else None
        # A bool is an int in Python, but ``true`` in a file is no number.
        if not isinstance(value, int) or isinstance(value, bool):
            self.wrong(name, f"must be a whole number, not {kind_of(node)}")
        elif not low <= value <= high:
            self.wrong(name, f"must be between {low} and {high}")
        else:
            return value
        return default

    def seconds(self, name: str, default: Any, *, low: int = 1) -> Any:
        """A duration: whole seconds, or a number with a unit of s, m, h or d."""
        node = self.node(name)
        if isinstance(node, Scalar) and isinstance(node.value, str):
            seconds = parse_duration(node.value)
            if seconds is None:
                self.wrong(name, "must be seconds or a duration like 30s, 10m, 2h, 1d")
                return default
            if not low <= seconds <= MAX_SECONDS:
                self.wrong(name, f"must be between {low} and {MAX_SECONDS} seconds")
                return default
            return int(seconds)
        return self.integer(name, default, low=low, high=MAX_SECONDS)

    def boolean(self, name: str, default: bool) -> bool:
        node = self.node(name)
        if node is None:
            return default
        if isinstance(node, Scalar) and isinstance(node.value, bool):
            return node.value
        self.wrong(name, f"must be true or false, not {kind_of(node)}")
        return default

    def choice(self, name: str, kind: type[E]) -> E | None:
        node = self.node(name)
        if node is None:
            return None
        value = node.value if isinstance(node, Scalar) else None
        if isinstance(value, str) and value in list(kind):
            return kind(value)
        options = [member.value for member in kind]
        hint = did_you_mean(value, options) if isinstance(value, str) else ""
        self.wrong(name, f"must be one of {', '.join(options)}{hint}")
        return None

    def strings(self, name: str) -> tuple[str, ...]:
        """A list of different, non-empty strings; a single one needs no brackets."""
        node = self.node(name)
        if node is None:
            return ()
        items = node.items if isinstance(node, Seq) else (node,)
        if len(items) > MAX_STRINGS:
            self.wrong(name, f"more than {MAX_STRINGS} entries")
            return ()
        found: list[str] = []
        for index, item in enumerate(items):
            path = (*self.at(name), index) if isinstance(node, Seq) else self.at(name)
            value = item.value if isinstance(item, Scalar) else None
            if not isinstance(value, str) or not value.strip() or len(value) > 256:
                self._problems.add_unless_known(path, "must be a string of 1 to 256 characters")
            elif value in found:
                self._problems.add_unless_known(path, f"{value!r} is listed twice")
            else:
                found.append(value)
        return tuple(found)

    def nested(self, name: str, known: Collection[str]) -> Fields | None:
        node = self.node(name)
        if node is None:
            return None
        if isinstance(node, Map):
            return Fields(node, self.at(name), self._problems, known)
        self.wrong(name, f"must be a map, not {kind_of(node)}")
        return None

    def free_map(self, name: str) -> dict[str, Any]:
        """A map with any keys."""
        node = self.node(name)
        if isinstance(node, Map):
            data: dict[str, Any] = plain(node)
            return data
        if node is not None:
            self.wrong(name, f"must be a map, not {kind_of(node)}")
        return {}

    def entries(self, name: str) -> Iterator[tuple[str, Node]]:
        node = self.node(name)
        if isinstance(node, Map):
            yield from node.entries.items()
        elif node is not None:
            self.wrong(name, f"must be a map, not {kind_of(node)}")

    def items(self, name: str, known: Collection[str]) -> Iterator[Fields]:
        """The maps of a list; an item that isn't a map is reported and left out."""
        node = self.node(name)
        if node is None:
            return
        if not isinstance(node, Seq):
            self.wrong(name, f"must be a list, not {kind_of(node)}")
            return
        for index, item in enumerate(node.items):
            path = (*self.at(name), index)
            if isinstance(item, Map):
                yield Fields(item, path, self._problems, known)
            else:
                self._problems.add_unless_known(path, f"must be a map, not {kind_of(item)}")


def shown(pattern: re.Pattern[str]) -> str:
    """The pattern with ``$`` for Python's ``\\Z``."""
    return pattern.pattern.removesuffix(r"\Z") + "$"


def did_you_mean(word: str, known: Collection[str]) -> str:
    if len(known) > MAX_HINTS_FROM:
        return ""
    # What is only begun, such as timeout for timeout_seconds, may be more similar to another name.
    begun = [name for name in known if name.startswith(word)] if len(word) >= _BEGINNING else []
    near = begun or get_close_matches(word[:80], sorted(known), n=1)
    return f"; did you mean {min(near, key=lambda name: (len(name), name))}?" if near else ""
