"""What a stranger said, fit to be quoted: short, and on one line."""

from __future__ import annotations

import reprlib

SHORT = 200

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 70


def printable(text: str, most: int = SHORT) -> str:
    line = "".join(letter if letter.isprintable() else " " for letter in text[: most * 2])
    line = " ".join(line.split())
    return line if len(line) <= most else f"{line[:most]}…"


def shown(value: object) -> str:
    """A value of any kind, however large or deep it is."""
    return _REPR.repr(value)
