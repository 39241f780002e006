"""Everything wrong with a DAG file, gathered before anything is said.

A problem is added by its path in the file; line and column are looked up in the tree, at the deepest part of the
path that exists, so that a missing field points at the block that lacks it. A check that builds on a
field which is already reported stays silent: one mistake, one line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from tracelake.domain.dag.node import Map, Mark, Node, Seq
from tracelake.domain.errors import DagProblem, InvalidDag

Path: TypeAlias = tuple[str | int, ...]

FILE = "$"
MAX_REPORTED = 200

_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")


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
    """A file that can't be read any further."""
    return InvalidDag([DagProblem(mark.line, mark.column, FILE, message)])


class Found(NamedTuple):
    mark: Mark
    path: Path
    message: str


class Problems:
    def __init__(self, root: Node, found: Iterable[Found] = ()) -> None:
        self._root = root
        self._found: list[Found] = []
        self._known: set[Path] = set()
        for problem in found:
            self._record(problem)

    def add(self, path: Path, message: str) -> None:
        self._record(Found(self.mark(path), path, message))

    def add_unless_known(self, path: Path, message: str) -> None:
        """For a follow-up check: silent when the field, or a part of it, is reported already."""
        if path not in self._known:
            self.add(path, message)

    def known(self, path: Path) -> bool:
        return path in self._known

    def _record(self, problem: Found) -> None:
        self._found.append(problem)
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
