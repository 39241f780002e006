"""The kinds of columns that chain tables have, and what each is in Arrow, Spark and Postgres.

Integers are signed, since Spark has no others. Amounts of wei per gas are decimals: anyone with enough
balance can offer a fee beyond 63 bits, and a fee times gas overflows 63 bits every day. A uint256 is exact
and takes three columns in files: ``_binary`` (32 bytes, big-endian, so that it sorts), ``_string`` (decimal)
and ``_f64`` (nearest double); in Postgres it is one ``numeric``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

UINT256_PARTS = ("_binary", "_string", "_f64")


class Kind(StrEnum):
    INTEGER = "integer"
    WEI = "wei"
    UINT256 = "uint256"
    BYTES = "bytes"
    TEXT = "text"
    BOOLEAN = "boolean"
    INSTANT = "instant"
    BYTES_LIST = "list of bytes"
    ACCESS_LIST = "access list"
    AUTHORIZATIONS = "authorization list"


@dataclass(frozen=True, slots=True)
class Column:
    """One column, or the three of a uint256. ``nullable`` says whether a value may be absent on some chain,
    ``proven`` whether ``verify: full`` ties it to the block's hash; other values may differ by endpoint."""

    name: str
    kind: Kind
    about: str
    nullable: bool = False
    proven: bool = True


def _list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element))


WEI = pa.decimal128(38, 0)
INSTANT = pa.timestamp("us", tz="UTC")
BYTES_LIST = _list_of(pa.binary())
ACCESS_LIST = _list_of(pa.struct([("address", pa.binary()), ("storage_keys", BYTES_LIST)]))
AUTHORIZATIONS = _list_of(  # whoever signs one may put any chain and any counter into it, valid or not
    pa.struct(
        [
            ("chain_id", pa.string()),
            ("address", pa.binary()),
            ("nonce", WEI),
            ("y_parity", pa.int64()),
            ("r", pa.binary()),
            ("s", pa.binary()),
        ]
    )
)

ARROW: Mapping[Kind, pa.DataType] = {
    Kind.INTEGER: pa.int64(),
    Kind.WEI: WEI,
    Kind.BYTES: pa.binary(),
    Kind.TEXT: pa.string(),
    Kind.BOOLEAN: pa.bool_(),
    Kind.INSTANT: INSTANT,
    Kind.BYTES_LIST: BYTES_LIST,
    Kind.ACCESS_LIST: ACCESS_LIST,
    Kind.AUTHORIZATIONS: AUTHORIZATIONS,
}

SPARK: Mapping[Kind, str] = {
    Kind.INTEGER: "BIGINT",
    Kind.WEI: "DECIMAL(38,0)",
    Kind.BYTES: "BINARY",
    Kind.TEXT: "STRING",
    Kind.BOOLEAN: "BOOLEAN",
    Kind.INSTANT: "TIMESTAMP",
    Kind.BYTES_LIST: "ARRAY<BINARY>",
    Kind.ACCESS_LIST: "ARRAY<STRUCT<address: BINARY, storage_keys: ARRAY<BINARY>>>",
    Kind.AUTHORIZATIONS: (
        "ARRAY<STRUCT<chain_id: STRING, address: BINARY, nonce: DECIMAL(38,0), y_parity: BIGINT, "
        "r: BINARY, s: BINARY>>"
    ),
}

POSTGRES: Mapping[Kind, str] = {
    Kind.INTEGER: "bigint",
    Kind.WEI: "numeric(78,0)",
    Kind.UINT256: "numeric(78,0)",
    Kind.BYTES: "bytea",
    Kind.TEXT: "text",
    Kind.BOOLEAN: "boolean",
    Kind.INSTANT: "timestamptz",
    Kind.BYTES_LIST: "jsonb",
    Kind.ACCESS_LIST: "jsonb",
    Kind.AUTHORIZATIONS: "jsonb",
}

NESTED = frozenset({Kind.BYTES_LIST, Kind.ACCESS_LIST, Kind.AUTHORIZATIONS})

UINT256_ARROW = (pa.binary(), pa.string(), pa.float64())
UINT256_SPARK = ("BINARY", "STRING", "DOUBLE")


def arrow_fields(column: Column) -> list[pa.Field]:
    """What a column is in files."""
    if column.kind is Kind.UINT256:
        parts = zip(UINT256_PARTS, UINT256_ARROW, strict=True)
        return [pa.field(column.name + part, kind) for part, kind in parts]
    return [pa.field(column.name, ARROW[column.kind])]


def spark_fields(column: Column) -> list[str]:
    if column.kind is Kind.UINT256:
        parts = zip(UINT256_PARTS, UINT256_SPARK, strict=True)
        return [f"{column.name}{part} {kind}" for part, kind in parts]
    return [f"{column.name} {SPARK[column.kind]}"]


def hot_field(column: Column) -> pa.Field:
    """What a column is on its way into Postgres and out of it: numbers beyond 38 digits and JSON travel as text."""
    if column.kind is Kind.UINT256 or column.kind in NESTED:
        return pa.field(column.name, pa.string())
    return pa.field(column.name, ARROW[column.kind])
