"""The pieces of an accepted query, and the one text that they are written as.

The reader of ``queries`` makes a tree of these pieces. Words and signs come from the reader, never from a DAG;
names and strings are the DAG's, and are written so that Spark can't take them for anything else: every name is
quoted, every string is plain ASCII with the rest escaped. ``$`` is escaped too, so Spark's variable substitution
finds nothing in a text, even where it is switched on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct


class Name(Struct, frozen=True):
    """A column, a relation or an alias."""

    value: str


class Text(Struct, frozen=True):
    """A string; ``fixed``: it is part of a date, an interval or the like, which Spark's parser itself reads."""

    value: str
    fixed: bool = False


class Computed(Struct, frozen=True):
    """Text that the query computes from constants, without any column. It is written as the piece inside."""

    piece: Piece


class Limit(Struct, frozen=True):
    """LIMIT and OFFSET of a query."""

    piece: Piece


Piece: TypeAlias = "str | Name | Text | Computed | Limit | tuple[Piece, ...]"


def computed(piece: Piece) -> list[Piece]:
    """The texts that a query computes from constants."""
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
    """The strings of a query, in no particular order."""
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
    """The text that Spark runs."""
    return _render(piece, _quoted, _string)


def render_on_one_line(piece: Piece) -> str:
    """The same query without control characters in strings, so that all line breaks in Spark's plan are Spark's
    own."""
    return _render(piece, _quoted, _string_on_one_line)


def render_without_limits(piece: Piece) -> str:
    """The same on one line and without LIMIT and OFFSET, which Spark can't plan without computing constants."""
    return _render(piece, _quoted, _string_on_one_line, limits=False)


def render_skeleton(piece: Piece) -> str:
    """The same query with neutral names and strings, so that only functions are the DAG's choice: Spark parses it
    in the same way, and no name or string in its plan can be mistaken for something else."""
    numbers: dict[str, int] = {}

    # Spark compares names without regard to case, so two spellings must stay one name.
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
                # The last one is popped first.
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
    # Where variable substitution is on, Spark replaces ${…} before it parses a text.
    if " " <= char <= "~" and char != "$":
        return char
    return f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _visible(char: str) -> str:
    return char if char.isprintable() else " "
