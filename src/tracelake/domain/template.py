"""Templates of deliveries: text with ``{{column}}`` in it, and nothing that could run.

A placeholder names a column of the row, and below it, by dots, a key or an index of JSON: ``{{payload.hits.0}}``.
There are no filters, conditions, loops or calls, so what a template can cost is known from its text: a template
language with limits would have to be trusted to keep them. A value that is missing is empty, a long one is cut.

Values stay marked in a text until it is sent: only then is it known what would be markup to the receiver, which may
be another one by then. The marks are noncharacters, which Unicode keeps for use inside of a program.

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
_BEGIN, _END = "\ufdd0", "\ufdd1"
_VALUE = re.compile(f"{_BEGIN}([^{_END}]*){_END}")
#: And NUL, which Postgres can't store.
_UNWANTED = str.maketrans("", "", f"\0{_BEGIN}{_END}")

TemplateRow = Mapping[str, Any]


class Placeholder(msgspec.Struct, frozen=True):
    column: str
    below: tuple[str, ...] = ()


class TextTemplate(msgspec.Struct, frozen=True):
    """Literal texts and placeholders in turn."""

    parts: tuple[str | Placeholder, ...]

    @property
    def placeholders(self) -> tuple[Placeholder, ...]:
        return tuple(part for part in self.parts if isinstance(part, Placeholder))

    def render(self, row: TemplateRow) -> str:
        """The text with its values marked; ``read_marked`` makes it one to send."""
        found: list[str] = []
        room = MAX_TEXT_CHARS
        opened = _Opened(row)
        for part in self.parts:
            text = part if isinstance(part, str) else _cut(shown(opened.value(part)), MAX_VALUE_CHARS)
            text = _cut(text.translate(_UNWANTED), room)
            found.append(text if isinstance(part, str) else f"{_BEGIN}{text}{_END}")
            room -= len(text)
            if room < 0:
                break
        return "".join(found)


def read_marked(text: str, escape: Callable[[str], str] = str) -> str:
    """A rendered text, as it is sent. ``escape`` is applied to values, never to the template's own text."""
    return _VALUE.sub(lambda value: escape(value[1]), text)


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


class _Opened:
    """A row whose JSON is opened level by level, each part once, however many placeholders lead through it."""

    def __init__(self, row: TemplateRow) -> None:
        self._row = row
        self._parts: dict[tuple[str, ...], _Part] = {}

    def value(self, placeholder: Placeholder) -> Any:
        value = self._row.get(placeholder.column)
        way: tuple[str, ...] = (placeholder.column,)
        for part in placeholder.below:
            if way not in self._parts:
                self._parts[way] = _open(value)
            value, way = _below(self._parts[way], part), (*way, part)
        return value


_Part = dict[str, msgspec.Raw] | list[msgspec.Raw] | None


def _open(value: Any) -> _Part:
    match memoryview(value)[:1].tobytes() if isinstance(value, msgspec.Raw) else None:
        case b"{":
            return msgspec.json.decode(value, type=dict[str, msgspec.Raw])
        case b"[":
            return msgspec.json.decode(value, type=list[msgspec.Raw])
        case _:
            return None


def _below(opened: _Part, part: str) -> msgspec.Raw | None:
    match opened:
        case dict():
            return opened.get(part)
        case list() if part.isdecimal():
            place = int(part[:9])
            return opened[place] if place < len(opened) else None
        case _:
            return None


def json_scalar(value: msgspec.Raw) -> Any:
    """A text, a truth value, an exact number, or None; an array or an object stays as it is."""
    match memoryview(value)[:1].tobytes():
        case b"{" | b"[":
            return value
        case b'"' | b"t" | b"f" | b"n":
            return msgspec.json.decode(value)
        case _:
            return Decimal(bytes(value).decode())


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


def describe(data: str, dataset: str) -> str:
    """The text of a row, as JSON, without a template: its values that are set, by name."""
    row = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    pairs = (f"{name}={_cut(shown(value), 200)}" for name, value in row.items() if bytes(value) != b"null")
    return _cut(f"{dataset}: {', '.join(pairs)}", MAX_VALUE_CHARS)
