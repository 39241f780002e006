"""The nodes of a DAG file with their places, and the problems that are collected about them.

A problem is added by its path in the file; line and column are looked up in the tree, at the deepest part of the
path that exists, so that a missing field points at the block that lacks it. All problems are collected before they
are raised. A check that depends on a field with a problem adds none: one mistake, one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from tracelake.domain.errors import DagProblem, InvalidDag

Path: TypeAlias = tuple[str | int, ...]
FILE = "$"
MAX_REPORTED = 200
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


class Mark(NamedTuple):
    """A place in a file, counted from 1 as editors do; columns are characters."""

    line: int
    column: int


START = Mark(1, 1)


@dataclass(frozen=True, slots=True)
class Scalar:
    mark: Mark
    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Seq:
    mark: Mark
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Map:
    mark: Mark
    entries: dict[str, Node]
    key_marks: dict[str, Mark]


Node: TypeAlias = Scalar | Seq | Map


def plain(node: Node) -> Any:
    """The node as JSON-like data."""
    match node:
        case Scalar():
            return node.value
        case Seq():
            return [plain(item) for item in node.items]
        case Map():
            return {key: plain(value) for key, value in node.entries.items()}


def kind_of(node: Node) -> str:
    """The node's type, for messages."""
    match node:
        case Seq():
            return "a list"
        case Map():
            return "a map"
        case Scalar(value=None):
            return "empty"
        case Scalar(value=bool()):
            return "a boolean"
        case Scalar(value=str()):
            return "a string"
        case _:
            return "a number"


def format_path(path: Path) -> str:
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN_KEY.match(part):
            text += f".{part}" if text else part
        else:
            text += f"[{part[:80]!r}]"
    return text or FILE


def fatal(mark: Mark, message: str) -> InvalidDag:
    """The error of a file that can't be read any further."""
    return InvalidDag([DagProblem(mark.line, mark.column, FILE, message)])


class FoundProblem(NamedTuple):
    mark: Mark
    path: Path
    message: str


class Problems:
    def __init__(self, root: Node, found: Iterable[FoundProblem] = ()) -> None:
        self._root = root
        self._found: list[FoundProblem] = []
        self._known: set[Path] = set()
        for problem in found:
            self._record(problem)

    def add(self, path: Path, message: str) -> None:
        self._record(FoundProblem(self.mark(path), path, message))

    def add_unless_known(self, path: Path, message: str) -> None:
        """Add the problem of a follow-up check, unless the field or a part of it already has one."""
        if path not in self._known:
            self.add(path, message)

    def known(self, path: Path) -> bool:
        return path in self._known

    def _record(self, problem: FoundProblem) -> None:
        self._found.append(problem)
        # With every path above it: a check of the whole map stays silent then.
        self._known.update(problem.path[:length] for length in range(len(problem.path) + 1))

    def mark(self, path: Path) -> Mark:
        node, mark = self._root, self._root.mark
        for part in path:
            if isinstance(node, Map) and isinstance(part, str) and part in node.key_marks:
                mark = node.key_marks[part]
                if part not in node.entries:
                    return mark
                node = node.entries[part]
            elif isinstance(node, Seq) and isinstance(part, int) and part < len(node.items):
                node = node.items[part]
                mark = node.mark
            else:
                return mark
        return mark

    def raise_if_any(self) -> None:
        if self._found:
            unique = {DagProblem(*mark, format_path(path), message) for mark, path, message in self._found}
            ordered = sorted(unique, key=lambda each: (each.line, each.column, each.field, each.message))
            raise InvalidDag(ordered[:MAX_REPORTED])
