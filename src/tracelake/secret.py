"""A value that must not be seen: it hides in logs, tracebacks and ``repr``, and is shown only when asked."""

from __future__ import annotations

from typing import final


@final
class Secret:
    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return "Secret(…)"

    __str__ = __repr__
