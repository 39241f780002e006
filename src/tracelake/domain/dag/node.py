"""The nodes of a DAG file: JSON-like values that know where they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias


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
    """What people call it in a message."""
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
