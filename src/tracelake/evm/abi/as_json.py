"""Arrays and tuples as JSON text, by rules that depend on the type alone.

Integers of up to 48 bits are numbers, wider ones decimal strings (readers that take numbers for doubles lose
nothing); addresses and bytes are ``0x`` and hex digits; a tuple is an object, or a list when a field of it has no
name or two have the same.
"""

from __future__ import annotations

from decimal import Decimal, localcontext
from typing import Any, assert_never

import orjson

from tracelake.domain.event_abi.model import AbiType, Array, Bytes, Tuple, Word, WordKind

_EXACT_IN_DOUBLE = 48


def json_text(kind: AbiType, value: Any, *, hot: bool = False) -> str:
    return orjson.dumps(_value(kind, value, hot)).decode()


def hot_text(text: str) -> str:
    """Postgres has no text with a NUL in it, and contracts write what they like."""
    return text.replace("\0", "\ufffd")


def _value(kind: AbiType, value: Any, hot: bool) -> Any:
    match kind:
        case Word():
            return _word(kind, value)
        case Bytes(text=True):
            return hot_text(value) if hot else value
        case Bytes():
            return "0x" + value.hex()
        case Array(item, _):
            return [_value(item, each, hot) for each in value]
        case Tuple(fields):
            values = [_value(field.type, each, hot) for field, each in zip(fields, value, strict=True)]
            names = [field.name for field in fields]
            return (
                values
                if "" in names or len(set(names)) < len(names)
                else dict(zip(names, values, strict=True))
            )
        case _:
            assert_never(kind)


def _word(kind: Word, value: Any) -> Any:
    match kind.kind:
        case WordKind.UINT | WordKind.INT:
            return value if kind.size <= _EXACT_IN_DOUBLE else str(value)
        case WordKind.FIXED | WordKind.UFIXED:
            return fixed_text(value, kind.places)
        case WordKind.BOOL:
            return value
        case WordKind.ADDRESS | WordKind.BYTES | WordKind.FUNCTION:
            return "0x" + value.hex()
        case _:
            assert_never(kind.kind)


def fixed_text(value: int, places: int) -> str:
    """The exact decimal of a fixed-point number, with all its places."""
    with localcontext() as exact:
        exact.prec = 200
        return format(Decimal(value).scaleb(-places), "f")
