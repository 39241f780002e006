"""The one form in which tables are stored, and the Postgres types of their columns.

Timestamps are microseconds in UTC, integers are signed (Spark has no others), strings and lists are the plain
kinds, and dictionaries are decoded. So the same columns have the same schema hash whether Arrow, pandas or Spark
made them, and every reader gets types that it knows.

In Postgres each Arrow type has a column type. A ``numeric`` that fits Spark's decimals is read as one; wider ones,
such as uint256, as text, which is exact everywhere.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pyarrow as pa

from tracelake.domain.errors import Invalid

_SIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64()}
_PLAIN = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary(), pa.float16(): pa.float32()}
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


def as_table(data: Any) -> pa.Table:
    """A table in the stored form, from Arrow or pandas."""
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    elif isinstance(data, pa.RecordBatchReader):
        data = data.read_all()
    # By its name, so that pandas isn't imported for rows that aren't its own.
    elif type(data).__module__.partition(".")[0] == "pandas":
        data = pa.Table.from_pandas(data, preserve_index=False)
    if not isinstance(data, pa.Table):
        raise Invalid(
            "InvalidRows", f"rows come as a pyarrow.Table or a DataFrame, not as {type(data).__name__}"
        )
    return in_stored_form(data)


def in_stored_form(table: pa.Table) -> pa.Table:
    schema = stored_schema(table.schema)
    # Metadata counts: a file must not depend on the library that made its rows.
    if table.schema.equals(schema, check_metadata=True):
        return table
    try:
        return table.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise Invalid("InvalidRows", f"can't be stored: {error}") from None


def stored_schema(schema: pa.Schema) -> pa.Schema:
    twice = {name for name in schema.names if schema.names.count(name) > 1}
    if twice:
        raise Invalid("InvalidRows", f"two columns of one name: {', '.join(sorted(twice))}")
    if not len(schema):
        raise Invalid("InvalidRows", "there are no columns")
    return pa.schema([pa.field(field.name, _stored_type(field.name, field.type)) for field in schema])


def schema_hash(schema: pa.Schema) -> str:
    """The same for the same names and types in the same order, and for nothing else."""
    text = "".join(f"{field.name!r}: {_type_text(field.type)}\n" for field in schema)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _type_text(kind: pa.DataType) -> str:
    """Names within a type are quoted: unquoted, one that looks like a part of a type would pass for it."""
    if isinstance(kind, pa.BaseExtensionType):
        return f"extension<{kind.extension_name!r}, {_type_text(kind.storage_type)}>"
    if pa.types.is_dictionary(kind):
        return f"dictionary<{_type_text(kind.index_type)}, {_type_text(kind.value_type)}, {kind.ordered}>"
    if pa.types.is_timestamp(kind) and kind.tz not in (None, "UTC"):
        return f"timestamp[{kind.unit}, tz={kind.tz!r}]"
    if not kind.num_fields:
        return str(kind)
    inner = ", ".join(
        f"{field.name!r}: {_type_text(field.type)}{'' if field.nullable else ' not null'}"
        for field in map(kind.field, range(kind.num_fields))
    )
    more = [getattr(kind, name, None) for name in ("list_size", "type_codes", "keys_sorted")]
    return f"{str(kind).partition('<')[0]}<{inner}>{more}"


def _stored_type(name: str, kind: pa.DataType) -> pa.DataType:
    # uint64 becomes int64: the cast refuses values that don't fit.
    if kind in _SIGNED or kind in _PLAIN:
        return _SIGNED.get(kind) or _PLAIN[kind]
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pa.types.is_dictionary(kind):
        return _stored_type(name, kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        # Spark's name of the field; Arrow's is "item", and the hash would differ.
        return pa.list_(pa.field("element", _stored_type(name, kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_stored_type(name, kind.key_type), _stored_type(name, kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _stored_type(name, field.type)) for field in kind])
    if pa.types.is_null(kind):
        raise Invalid("InvalidRows", f"column {name!r} has no type: cast it, it has only nulls")
    return kind


def column_type(kind: pa.DataType) -> str:
    """The default Postgres type of an Arrow type."""
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
    """Refuse a type that hot tables don't have; the data database has the same list."""
    if name not in _TYPES and not _NUMERIC.fullmatch(name):
        raise Invalid("RowsRefused", f"{name!r} is not a column type; one of {', '.join(sorted(_TYPES))}")
    return name


def arrow_type(stored: str) -> pa.DataType:
    """The Arrow type that a column is read as, by its type as Postgres (``format_type``) or people spell it."""
    if (exact := _NUMERIC.fullmatch(stored)) is not None and int(exact[1]) <= _MAX_DECIMAL:
        return pa.decimal128(int(exact[1]), int(exact[2]))
    return _READ_AS.get(stored, pa.string())


def is_wide_integer(stored: str) -> bool:
    """Whether a column holds whole numbers of more digits than a decimal of Arrow and Spark."""
    exact = _NUMERIC.fullmatch(stored)
    return exact is not None and int(exact[1]) > _MAX_DECIMAL and int(exact[2]) == 0


def is_text(stored: str) -> bool:
    """Whether a column is text in Postgres as well, and not only read as it."""
    return stored == "text" or stored.startswith("character varying")
