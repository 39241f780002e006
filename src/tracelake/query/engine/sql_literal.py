"""Literals of a query as scalars of a predicate: what the gate, without a schema, tells ``fit_relation``.

Numbers and truth values stand for themselves; a decimal fraction only when a double holds it exactly enough to be
told apart from its neighbours. Text stands for itself unless it has a backslash, which keeps the backslash free for
values whose type the query says: ``\\x0a0b`` is bytes, ``\\timestamp …``, ``\\timestamptz …`` and ``\\date …`` are
points in time. What can't be said so isn't pushed down.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from tracelake.domain.where import Scalar

Params: TypeAlias = Sequence[Any] | Mapping[str, Any]

_INTEGER = re.compile(r"-?[0-9]{1,38}\Z")
_FRACTION = re.compile(r"-?[0-9]*\.[0-9]*\Z")
_HEX = re.compile(r"([0-9a-fA-F]{2})*\Z")
_BLOB_TEXT = re.compile(r"(?:\\x[0-9a-fA-F]{2}|[\x20-\x5b\x5d-\x7e])*\Z")
_BLOB_PART = re.compile(r"\\x([0-9a-fA-F]{2})|(.)", re.DOTALL)
_DIGITS_OF_A_DOUBLE = 15
_TYPED = {
    "timestamp": "timestamp",
    "datetime": "timestamp",
    "timestamptz": "timestamptz",
    "timestamp with time zone": "timestamptz",
    "date": "date",
}


def literal(tree: Any, params: Params) -> Scalar | None:
    """The value of a constant expression; None when it isn't one, is NULL, or can't be told exactly."""
    match tree:
        case {"class": "CONSTANT", "literal": {"kind": kind, **rest}}:
            return _constant(str(kind), str(rest.get("text", "")))
        case {"class": "PARAMETER", "identifier": str(identifier)}:
            return _given(_parameter(identifier, params))
        case {"class": "CAST", "child": child, "type_expr": {"type_name": str(name)} as type_}:
            if "children" in type_ or tree.get("try_cast"):
                return None
            return _cast(name.lower(), _string(child))
        case {
            "class": "FUNCTION",
            "function_name": "unhex" | "from_hex",
            "arguments": [{"expression": child}],
        }:
            text = _string(child)
            return None if text is None else _bytes(text)
        case _:
            return None


def is_null(tree: Any) -> bool:
    match tree:
        case {"class": "CONSTANT", "literal": {"kind": "NULL_LITERAL"}}:
            return True
        case _:
            return False


def _constant(kind: str, text: str) -> Scalar | None:
    match kind:
        case "INTEGER":
            return int(text) if _INTEGER.match(text) else None
        case "NUMERIC":
            digits = text.strip("-").replace(".", "")
            exact = _FRACTION.match(text) and digits and len(digits) <= _DIGITS_OF_A_DOUBLE
            return float(text) if exact else None
        case "BOOLEAN":
            return text.lower() == "true"
        case "STRING":
            return _text(text)
        case "HEX":
            return _bytes(text)
        case _:
            return None


def _cast(name: str, text: str | None) -> Scalar | None:
    if text is None:
        return None
    if name in ("blob", "bytea", "binary", "varbinary"):
        return blob(text)
    kind = _TYPED.get(name)
    return None if kind is None else f"\\{kind} {text}"


def blob(text: str) -> str | None:
    """Text as the engine casts it to bytes: ASCII, and ``\\xNN`` for one byte."""
    if not _BLOB_TEXT.match(text):
        return None
    octets = bytes(int(pair, 16) if pair else ord(char) for pair, char in _BLOB_PART.findall(text))
    return "\\x" + octets.hex()


def _bytes(digits: str) -> str | None:
    return "\\x" + digits.lower() if _HEX.match(digits) else None


def _text(text: str) -> str | None:
    return None if "\\" in text or "\0" in text else text


def _string(tree: Any) -> str | None:
    match tree:
        case {"class": "CONSTANT", "literal": {"kind": "STRING", **rest}}:
            return str(rest.get("text", ""))
        case _:
            return None


def _parameter(identifier: str, params: Params) -> Any:
    if isinstance(params, Mapping):
        # The engine makes no difference between upper and lower case here (``query_api.from_wire``).
        return {name.lower(): value for name, value in params.items()}.get(identifier.lower())
    index = int(identifier) if identifier.isascii() and identifier.isdigit() else 0
    return params[index - 1] if 1 <= index <= len(params) else None


def _given(value: Any) -> Scalar | None:
    match value:
        case bytes():
            return _bytes(value.hex())
        case str():
            return _text(value)
        case bool():
            return value
        case int():
            return value if abs(value) < 2**127 else None
        case float():
            return value if math.isfinite(value) else None
        case _:
            return None
