"""Templates of deliveries: text with ``{{column}}`` in it, and nothing that could run.

A placeholder names a column of the row, and below it, by dots, a key or an index of JSON: ``{{payload.hits.0}}``.
There are no filters, conditions, loops or calls, so what a template can cost is known from its text: a template
language with limits would have to be trusted to keep them. A value that is missing is empty, a long one is cut.

JSON in a row is ``msgspec.Raw``, the text that the database wrote: a placeholder decodes the way to its value and
nothing beside it, and a number is shown with the digits that it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from typing import Any

import msgspec

from tracelake.domain.errors import Invalid

MAX_PLACEHOLDERS = 100
MAX_VALUE_CHARS = 2_000
MAX_TEXT_CHARS = 16_000
_PART = re.compile(r"[A-Za-z0-9_-]{1,100}\Z")
_COLUMN = re.compile(r"[a-z_][a-z0-9_]{0,62}\Z")
CUT = "…"

TemplateRow = Mapping[str, Any]


class Placeholder(msgspec.Struct, frozen=True):
    column: str
    below: tuple[str, ...] = ()


class TextTemplate(msgspec.Struct, frozen=True):
    """Literal texts and placeholders in turn."""

    parts: tuple[str | Placeholder, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(part.column for part in self.parts if isinstance(part, Placeholder))

    def render(self, row: TemplateRow, escape: Callable[[str], str] = str) -> str:
        """``escape`` is applied to values, never to the template's own text."""
        found: list[str] = []
        room = MAX_TEXT_CHARS
        for part in self.parts:
            text = part if isinstance(part, str) else escape(_cut(shown(_value(part, row)), MAX_VALUE_CHARS))
            if len(text) > room:
                # An escaped character may be cut in two; the sign at the end says that it is cut.
                found.append(text[:room] + CUT)
                break
            found.append(text)
            room -= len(text)
        return "".join(found)


def parse_template(text: str) -> TextTemplate:
    """Raises ``Invalid`` with the place in the text."""
    parts: list[str | Placeholder] = []
    at = 0
    while (start := text.find("{{", at)) >= 0:
        if start > at:
            parts.append(text[at:start])
        end = text.find("}}", start)
        if end < 0:
            raise _bad(start, "{{ has no }}")
        parts.append(_placeholder(text[start + 2 : end].strip(), start))
        if sum(isinstance(part, Placeholder) for part in parts) > MAX_PLACEHOLDERS:
            raise _bad(start, f"there are more than {MAX_PLACEHOLDERS} placeholders")
        at = end + 2
    if text[at:]:
        parts.append(text[at:])
    return TextTemplate(tuple(parts))


def _placeholder(inner: str, start: int) -> Placeholder:
    column, *below = inner.split(".")
    if not _COLUMN.match(column) or not all(_PART.match(part) for part in below) or len(below) > 10:
        raise _bad(start, f"{{{{{inner[:60]}}}}} is not a column, or a column and keys below it with dots")
    return Placeholder(column, tuple(below))


def _bad(start: int, what: str) -> Invalid:
    return Invalid("BadTemplate", f"at character {start + 1}: {what}")


def _value(placeholder: Placeholder, row: TemplateRow) -> Any:
    value = row.get(placeholder.column)
    for part in placeholder.below:
        value = _below(value, part)
    return value


def _below(value: Any, part: str) -> msgspec.Raw | None:
    if not isinstance(value, msgspec.Raw):
        return None
    match bytes(value)[:1]:
        case b"{":
            return msgspec.json.decode(value, type=dict[str, msgspec.Raw]).get(part)
        case b"[" if part.isdecimal():
            items, place = msgspec.json.decode(value, type=list[msgspec.Raw]), int(part[:9])
            return items[place] if place < len(items) else None
        case _:
            return None


def json_scalar(value: msgspec.Raw) -> Any:
    """A text, a truth value, an exact number, or None; an array or an object stays as it is."""
    text = bytes(value).decode()
    match text[:1]:
        case "{" | "[":
            return value
        case '"' | "t" | "f" | "n":
            return msgspec.json.decode(value)
        case _:
            return Decimal(text)


def shown(value: Any) -> str:
    """A value as people read it."""
    match value:
        case None:
            return ""
        case str():
            return value
        case bool():
            return "true" if value else "false"
        case bytes():
            return f"0x{value.hex()}"
        case datetime():
            return value.isoformat()
        case msgspec.Raw():
            text = bytes(value).decode()
            return shown(msgspec.json.decode(value)) if text[:1] in ('"', "n") else text
        case _:
            return str(value)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[:most] + CUT


def describe(row: TemplateRow, dataset: str, escape: Callable[[str], str] = str) -> str:
    """The text of a row without a template: its values that are set, by name."""
    pairs = (f"{name}={_cut(shown(value), 200)}" for name, value in row.items() if value is not None)
    return escape(_cut(f"{dataset}: {', '.join(pairs)}", MAX_VALUE_CHARS))
