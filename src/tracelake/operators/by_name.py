"""Inputs and outputs of a task: by position, or by name as a DAG writes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from tracelake.domain.errors import Invalid


class HasName(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=HasName)


class ByName(Generic[T]):
    def __init__(self, kind: str, items: Sequence[T]) -> None:
        self._kind = kind
        self._items = tuple(items)

    def __getitem__(self, key: int | str) -> T:
        if isinstance(key, int):
            if not 0 <= key < len(self._items):
                raise Invalid(f"Unknown{self._kind.title()}", f"the task has no {self._kind} {key}")
            return self._items[key]
        found = [item for item in self._items if item.name == key]
        if len(found) != 1:
            names = ", ".join(item.name for item in self._items) or "none"
            why = (
                f"no {self._kind} {key!r}" if not found else f"several {self._kind}s {key!r}: use their index"
            )
            raise Invalid(f"Unknown{self._kind.title()}", f"the task has {why}; it has {names}")
        return found[0]

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"[{', '.join(item.name for item in self._items)}]"
