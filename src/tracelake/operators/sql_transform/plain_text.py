"""SQL text that can be read in one way only.

Two parsers look at a query: ours, which decides, and Spark's, which runs it. A text that they would cut into words
differently could show a harmless query to the one and another to the other. So comments are taken out, and what is
left must be made of plain words, numbers, signs and quoted strings as both read them.
"""

from __future__ import annotations

import re

from tracelake.domain.errors import Invalid

_PIECE = re.compile(
    r"""
      (?P<comment> --[^\n]* | /\*(?!\+)(?:(?!/\*|\*/).)*\*/ )
    | (?P<quoted> '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | `(?:[^`]|``)*` )
    | (?P<plain> (?! /\* | \*/ | -- ) [\w\s(),.+*%<>=!&|^~\[\]:/-] )
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)
_BEFORE_STRINGS = frozenset({"", "x", "date", "timestamp", "timestamp_ntz", "timestamp_ltz", "interval"})
_LAST_WORD = re.compile(r"\w*\Z", re.ASCII)


def plain_text(text: str) -> tuple[str, list[tuple[int, int]]]:
    """The query without comments, and where its quoted parts are."""
    pieces: list[str] = []
    quoted: list[tuple[int, int]] = []
    position = length = 0
    while position < len(text):
        piece = _PIECE.match(text, position)
        if piece is None:
            raise Invalid("InvalidSql", f"sql has something unexpected at {text[position : position + 20]!r}")
        position = piece.end()
        content = " " if piece["comment"] is not None else piece[0]
        if piece["quoted"] is not None:
            _check_prefix("".join(pieces[-20:]), content)
            quoted.append((length, length + len(content)))
        pieces.append(content)
        length += len(content)
    return "".join(pieces), quoted


def _check_prefix(before: str, quoted: str) -> None:
    """A word that touches a string changes how it is read: ``r'…'`` is raw."""
    found = _LAST_WORD.search(before)
    word = found[0].lower() if found is not None else ""
    if not quoted.startswith("`") and word not in _BEFORE_STRINGS and not word.isdigit():
        raise Invalid("InvalidSql", f"sql must not write {word}{quoted[:20]}: put a space before the string")
