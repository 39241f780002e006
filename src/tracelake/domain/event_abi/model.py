"""Events and their types, as the contract ABI specification has them.

A type is one of four: a ``Word`` fills exactly 32 bytes, ``Bytes`` has any length, ``Array`` and ``Tuple`` are made
of others. ``canonical`` is the spelling that signatures are hashed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias


class WordKind(StrEnum):
    UINT = "uint"
    INT = "int"
    ADDRESS = "address"
    BOOL = "bool"
    BYTES = "bytes"
    FIXED = "fixed"
    UFIXED = "ufixed"
    FUNCTION = "function"


@dataclass(frozen=True)
class Word:
    """``size`` in bits for numbers, in bytes for ``bytesN``; ``places`` after the point for fixed numbers."""

    kind: WordKind
    size: int = 0
    places: int = 0
    dynamic = False
    words = 1
    depth = 0

    @property
    def canonical(self) -> str:
        match self.kind:
            case WordKind.ADDRESS | WordKind.BOOL | WordKind.FUNCTION:
                return self.kind.value
            case WordKind.FIXED | WordKind.UFIXED:
                return f"{self.kind.value}{self.size}x{self.places}"
            case _:
                return f"{self.kind.value}{self.size}"


@dataclass(frozen=True)
class Bytes:
    """``bytes``, or ``string`` when they are text."""

    text: bool
    dynamic = True
    words = 1
    depth = 0

    @property
    def canonical(self) -> str:
        return "string" if self.text else "bytes"


@dataclass(frozen=True)
class Array:
    """``length`` None: it comes with the data. ``words`` is what the head of an encoding holds for it."""

    item: AbiType
    length: int | None

    @cached_property
    def dynamic(self) -> bool:
        return self.length is None or self.item.dynamic

    @cached_property
    def words(self) -> int:
        return 1 if self.dynamic or self.length is None else self.length * self.item.words

    @cached_property
    def depth(self) -> int:
        return self.item.depth + 1

    @property
    def canonical(self) -> str:
        return f"{self.item.canonical}[{'' if self.length is None else self.length}]"


@dataclass(frozen=True)
class Tuple:
    fields: tuple[Param, ...]

    @cached_property
    def dynamic(self) -> bool:
        return any(field.type.dynamic for field in self.fields)

    @cached_property
    def words(self) -> int:
        return 1 if self.dynamic else sum(field.type.words for field in self.fields)

    @cached_property
    def depth(self) -> int:
        return max(field.type.depth for field in self.fields) + 1

    @property
    def canonical(self) -> str:
        return f"({','.join(field.type.canonical for field in self.fields)})"


AbiType: TypeAlias = "Word | Bytes | Array | Tuple"


@dataclass(frozen=True)
class Param:
    """A parameter of an event, or a field of a tuple; the name may be empty."""

    name: str
    type: AbiType
    indexed: bool = False

    @property
    def hashed(self) -> bool:
        """Only the hash of it is in the log: it is indexed, and no single word."""
        return self.indexed and not isinstance(self.type, Word)


@dataclass(frozen=True)
class Event:
    name: str
    params: tuple[Param, ...]
    anonymous: bool = False

    @property
    def signature(self) -> str:
        return f"{self.name}({','.join(param.type.canonical for param in self.params)})"

    @property
    def indexed(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if param.indexed)

    @property
    def unindexed(self) -> tuple[Param, ...]:
        return tuple(param for param in self.params if not param.indexed)

    @property
    def topics(self) -> int:
        """How many topics a log of it has."""
        return len(self.indexed) + (0 if self.anonymous else 1)

    @property
    def layout(self) -> tuple[str, bool, tuple[bool, ...]]:
        """What tells it from other events, whatever the parameters are called."""
        return self.signature, self.anonymous, tuple(param.indexed for param in self.params)
