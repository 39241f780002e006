"""One comparison between two values, as Postgres would decide it.

NULL makes it unknown (``None``), and so do two values that have no common order: SQL would refuse the
query, a row filter leaves the row out. A string literal takes the type of the column beside it, as
untyped literals do in SQL. NaN equals itself and is above every number. Strings order by code point,
which is what the C collation of the data database does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, TypeAlias
from uuid import UUID

_Key: TypeAlias = tuple[str, Any]

_COMPARE: dict[str, Callable[[Any, Any], object]] = {
    "=": operator.eq,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def compare(left: object, op: str, right: object) -> bool | None:
    if left is None or right is None:
        return None
    one, two = _aligned(left, right)
    if one is None or two is None or one[0] != two[0]:
        return None
    return bool(_COMPARE[op](one[1], two[1]))


def _aligned(left: object, right: object) -> tuple[_Key | None, _Key | None]:
    if isinstance(right, str) and not isinstance(left, str):
        right = _as_type_of(left, right)
    elif isinstance(left, str) and not isinstance(right, str):
        left = _as_type_of(right, left)
    if isinstance(left, Decimal) and isinstance(right, float):
        right = Decimal(repr(right))
    elif isinstance(right, Decimal) and isinstance(left, float):
        left = Decimal(repr(left))
    return _key(left), _key(right)


def _as_type_of(model: object, text: str) -> object:
    try:
        if isinstance(model, datetime):
            return datetime.fromisoformat(text)
        if isinstance(model, date):
            return date.fromisoformat(text)
        if isinstance(model, UUID):
            return UUID(text)
        if isinstance(model, bytes) and text.startswith("\\x"):
            return bytes.fromhex(text[2:])
    except ValueError:
        return None
    return text


def _key(value: object) -> _Key | None:
    """A value's kind and something that orders within that kind."""
    match value:
        case bool():
            return "bool", value
        case int() | float() | Decimal():
            return "number", (True, 0) if value != value else (False, value)
        case str():
            return "text", value
        case bytes():
            return "bytes", value
        case datetime():
            return "instant", value if value.tzinfo else value.replace(tzinfo=UTC)
        case date():
            return "date", value
        case UUID():
            return "uuid", value
        case _:
            return None
