"""A judged query, and the one text that it is written as.

The reader of ``queries`` makes a tree of these pieces. Words and signs come from the reader, never from a DAG;
names and strings are the DAG's, and are written so that Spark can't take them for anything else: every name is
quoted, every string is plain ASCII with the rest escaped. ``$`` is escaped too, so there is nothing that Spark's
variable substitution would find in a text, even where somebody has it switched on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct


class Name(Struct, frozen=True):
    """A column, a relation or an alias."""

    value: str


class Text(Struct, frozen=True):
    """A string; ``fixed`` is part of a date, an interval and the like, which the parser itself reads."""

    value: str
    fixed: bool = False


class Computed(Struct, frozen=True):
    """Text that the query makes of its own constants, without any column. It is written as what it is made of."""

    piece: Piece


class Limit(Struct, frozen=True):
    """LIMIT and OFFSET of a query."""

    piece: Piece


Piece: TypeAlias = "str | Name | Text | Computed | Limit | tuple[Piece, ...]"


def computed(piece: Piece) -> list[Piece]:
    """The texts that a query makes of constants."""
    found: list[Piece] = []
    waiting = [piece]
    while waiting:
        match waiting.pop():
            case Computed(inner):
                found.append(inner)
                waiting.append(inner)
            case Limit(inner):
                waiting.append(inner)
            case tuple() as several:
                waiting.extend(several)
            case _:
                pass
    return found


def texts(piece: Piece) -> Iterator[str]:
    """The strings that a query has, in no order."""
    waiting = [piece]
    while waiting:
        match waiting.pop():
            case Text(value):
                yield value
            case Computed(inner) | Limit(inner):
                waiting.append(inner)
            case tuple() as several:
                waiting.extend(several)
            case _:
                pass


def render(piece: Piece) -> str:
    """The text that runs."""
    return _render(piece, _quoted, _string)


def render_on_one_line(piece: Piece) -> str:
    """The same query, where strings have no control characters: what Spark shows of it has the lines Spark made."""
    return _render(piece, _quoted, _string_on_one_line)


def render_without_limits(piece: Piece) -> str:
    """The same on one line, and without LIMIT and OFFSET: Spark can't plan those unless it computes constants."""
    return _render(piece, _quoted, _string_on_one_line, limits=False)


def render_skeleton(piece: Piece) -> str:
    """The same query without anything that a DAG chose, except for functions: Spark parses it in the same way, and
    nothing in what it shows of it can be mistaken for something else."""
    numbers: dict[str, int] = {}

    def numbered(name: Name) -> str:
        return f"`n{numbers.setdefault(name.value.lower(), len(numbers))}`"

    return _render(piece, numbered, lambda text: _string(text if text.fixed else Text("s")))


def joined(pieces: Iterable[Piece], separator: str = ",") -> tuple[Piece, ...]:
    out: list[Piece] = []
    for piece in pieces:
        out += [separator, piece] if out else [piece]
    return tuple(out)


def _render(
    piece: Piece, name: Callable[[Name], str], text: Callable[[Text], str], *, limits: bool = True
) -> str:
    written: list[str] = []
    waiting = [piece]
    while waiting:
        match waiting.pop():
            case str() as word:
                written.append(word)
            case Name() as each:
                written.append(name(each))
            case Text() as each:
                written.append(text(each))
            case Computed(inner):
                waiting.append(inner)
            case Limit(inner):
                waiting += [inner] if limits else []
            case tuple() as several:
                waiting.extend(reversed(several))
    return " ".join(written)


def _quoted(name: Name) -> str:
    return "`" + name.value.replace("`", "``") + "`"


def _string(text: Text) -> str:
    return "'" + "".join(map(_escaped, text.value)) + "'"


def _string_on_one_line(text: Text) -> str:
    return _string(Text("".join(map(_visible, text.value)), text.fixed))


def _escaped(char: str) -> str:
    if char in "\\'":
        return "\\" + char
    if " " <= char <= "~" and char != "$":
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _visible(char: str) -> str:
    return char if char.isprintable() else " "
