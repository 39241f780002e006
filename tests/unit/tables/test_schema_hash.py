"""Two schemas have one hash only if they are the same, whatever their columns are called."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tracelake.tables.stored_types import schema_hash

A, B = pa.int64(), pa.string()


def struct(**fields: pa.DataType) -> pa.DataType:
    return pa.struct(list(fields.items()))


ALIKE = {
    "a name that is two": (struct(a=A, b=B), pa.struct([("a: int64, b", B)])),
    "a name that closes its type": (
        pa.struct([("a", struct(b=A)), ("c", A)]),
        pa.struct([("a", pa.struct([("b: int64>, c", A)]))]),
    ),
    "a name that is quoted": (struct(a=A, b=B), pa.struct([("a': int64, 'b", B)])),
    "what may be null": (pa.struct([pa.field("a", A, nullable=False)]), pa.struct([("a not null", A)])),
    "an element's name": (pa.list_(pa.field("x: int64", B)), pa.list_(pa.field("x", A))),
    "the length of a list": (pa.list_(A, 2), pa.list_(A, 3)),
    "a list of a length": (pa.list_(A), pa.list_(A, 2)),
    "a map and a list of its entries": (
        pa.map_(B, A),
        pa.list_(
            pa.field("entries", pa.struct([pa.field("key", B, nullable=False), ("value", A)]), nullable=False)
        ),
    ),
    "a time zone": (pa.timestamp("us", "UTC"), pa.timestamp("us", "UTC]")),
    "a dictionary": (pa.dictionary(pa.int8(), B), B),
}


@pytest.mark.parametrize("pair", ALIKE.values(), ids=ALIKE)
def test_types_that_look_alike_have_hashes_of_their_own(pair: tuple[pa.DataType, pa.DataType]) -> None:
    first, second = (schema_hash(pa.schema([("column", kind)])) for kind in pair)
    assert first != second


def test_columns_that_look_alike_have_hashes_of_their_own() -> None:
    one = pa.schema([("a", struct(b=A)), ("c", A)])
    other = pa.schema([("a", pa.struct([("b: int64>\n'c'", A)]))])
    assert schema_hash(one) != schema_hash(other)
    assert schema_hash(pa.schema([("a", A), ("b", B)])) != schema_hash(pa.schema([("b", B), ("a", A)]))


def test_plain_columns_keep_the_hash_that_they_always_had() -> None:
    known = "sha256:de784b3a22f2671054bd5c76dbf738075081c8102e8c48d00a1a18e73ae94994"
    schema = pa.schema([("block_number", A), ("hash", B), ("at", pa.timestamp("us", "UTC"))])
    assert schema_hash(schema) == known
