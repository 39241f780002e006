"""Column types of hot tables: which Postgres type keeps an Arrow column, and as what a stored one is read.

``numeric`` that fits Spark's decimals is read as one; wider ones, such as uint256, as text, which is exact
everywhere.
"""

from __future__ import annotations

import re

import pyarrow as pa

from tracelake.domain.errors import Invalid

_NUMBERS = {"smallint", "integer", "bigint", "real", "double precision", "numeric"}
_TIMES = {"date", "timestamp", "timestamptz"}
_TYPES = _NUMBERS | _TIMES | {"boolean", "text", "bytea", "jsonb", "uuid"}
_NUMERIC = re.compile(r"numeric\(([0-9]{1,3}),([0-9]{1,3})\)")
_MAX_DECIMAL = 38
_READ_AS = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us"),
    "timestamp without time zone": pa.timestamp("us"),
    "timestamptz": pa.timestamp("us", "UTC"),
    "timestamp with time zone": pa.timestamp("us", "UTC"),
    "bytea": pa.binary(),
}


def column_type(kind: pa.DataType) -> str:
    """The type that keeps a column of this Arrow type, unless somebody says otherwise."""
    match kind:
        case _ if pa.types.is_boolean(kind):
            return "boolean"
        case _ if pa.types.is_integer(kind):
            return "bigint"
        case _ if pa.types.is_floating(kind):
            return "double precision"
        case _ if pa.types.is_decimal(kind):
            return f"numeric({kind.precision},{kind.scale})"
        case _ if pa.types.is_timestamp(kind):
            return "timestamptz" if kind.tz else "timestamp"
        case _ if pa.types.is_date(kind):
            return "date"
        case _ if pa.types.is_binary(kind) or pa.types.is_fixed_size_binary(kind):
            return "bytea"
        case _ if pa.types.is_nested(kind):
            return "jsonb"
        case _ if pa.types.is_string(kind):
            return "text"
        case _:
            raise Invalid("RowsRefused", f"no Postgres type for {kind}")


def checked_type(name: str) -> str:
    """A type's name, if it is one that hot tables have; the data database has the same list."""
    if name not in _TYPES and not _NUMERIC.fullmatch(name):
        raise Invalid("RowsRefused", f"{name!r} is not a column type; one of {', '.join(sorted(_TYPES))}")
    return name


def arrow_type(stored: str) -> pa.DataType:
    """As what a column is read, by its type as Postgres spells it (``format_type``) or as people do."""
    if (exact := _NUMERIC.fullmatch(stored)) is not None and int(exact[1]) <= _MAX_DECIMAL:
        return pa.decimal128(int(exact[1]), int(exact[2]))
    return _READ_AS.get(stored, pa.string())


def is_text(stored: str) -> bool:
    """Whether a column is text in Postgres as well, and not only read as it."""
    return stored == "text" or stored.startswith("character varying")
