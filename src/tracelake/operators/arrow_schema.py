"""One form for every table that is stored, whoever made it.

Timestamps are microseconds in UTC, integers are signed (Spark has no others), strings and lists are the plain
kinds, and dictionaries are spelt out. So the same columns have the same schema hash whether Arrow, pandas or
Spark brought them, and every reader gets types that it knows.
"""

from __future__ import annotations

import hashlib
from typing import Any

import pyarrow as pa

from tracelake.domain.errors import Invalid

_SIGNED = {pa.uint8(): pa.int16(), pa.uint16(): pa.int32(), pa.uint32(): pa.int64(), pa.uint64(): pa.int64()}
_PLAIN = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary(), pa.float16(): pa.float32()}


def as_table(data: Any) -> pa.Table:
    """A table in the stored form, from Arrow or pandas."""
    if isinstance(data, pa.RecordBatch):
        data = pa.Table.from_batches([data])
    elif isinstance(data, pa.RecordBatchReader):
        data = data.read_all()
    elif type(data).__module__.partition(".")[0] == "pandas":
        data = pa.Table.from_pandas(data, preserve_index=False)
    if not isinstance(data, pa.Table):
        raise Invalid(
            "InvalidRows", f"rows come as a pyarrow.Table or a DataFrame, not as {type(data).__name__}"
        )
    return in_stored_form(data)


def in_stored_form(table: pa.Table) -> pa.Table:
    schema = stored_schema(table.schema)
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
    if kind in _SIGNED or kind in _PLAIN:
        return _SIGNED.get(kind) or _PLAIN[kind]
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC" if kind.tz else None)
    if pa.types.is_dictionary(kind):
        return _stored_type(name, kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", _stored_type(name, kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_stored_type(name, kind.key_type), _stored_type(name, kind.item_type))
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _stored_type(name, field.type)) for field in kind])
    if pa.types.is_null(kind):
        raise Invalid("InvalidRows", f"column {name!r} has no type: cast it, it holds nothing but nulls")
    return kind
