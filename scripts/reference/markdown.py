"""Markdown for the generated pages: table rows with escaped cells, and the types of a JSON Schema with links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]
_FAR = 2**31 - 1


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [_line(head), "|" + "---|" * len(head), *(_line(row) for row in rows)]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def json_type(schema: Json) -> str:
    if "$ref" in schema:
        return link(schema["$ref"].rsplit("/", 1)[-1])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if forms := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(json_type(form) for form in forms))
    match schema.get("type"):
        case "array":
            return f"list of {json_type(schema.get('items', {}))}"
        case "object":
            values = schema.get("additionalProperties")
            return f"map to {json_type(values)}" if isinstance(values, dict) and values else "object"
        case "string":
            return _text(schema)
        case "integer":
            return "integer" + _bounds(schema)
        case "number":
            return "number" + _bounds(schema)
        case None:
            return "anything"
        case kind:
            return str(kind)


def link(name: str) -> str:
    return f"[{name}](#{name.lower()})"


def _text(schema: Json) -> str:
    if schema.get("format"):
        return str(schema["format"])
    if schema.get("pattern"):
        return f"text like `{schema['pattern']}`".replace("|", "\\|")
    return "text"


def _bounds(schema: Json) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None and high < _FAR:
        return f" {low}–{high}"
    return f" ≥ {low}" if low is not None else ""
