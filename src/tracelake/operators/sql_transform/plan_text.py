"""Parentheses and commas in what Spark shows of a plan."""

from __future__ import annotations


def closes(text: str, opened: int) -> int:
    """Where the parenthesis or bracket that stands there is closed; -1: nowhere."""
    depth = 0
    for place in range(opened, len(text)):
        if text[place] in "([":
            depth += 1
        elif text[place] in ")]":
            depth -= 1
            if depth == 0:
                return place
    return -1


def split(text: str) -> list[str]:
    """At the commas that are in no parentheses."""
    parts, depth, start = [], 0, 0
    for place, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]
