"""The nodes of a DAG file: JSON-like values that know their lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Scalar:
    line: int
    value: str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class Seq:
    line: int
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Map:
    line: int
    entries: dict[str, Node]
    key_lines: dict[str, int]


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
