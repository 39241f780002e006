"""Columns of the tables of a chain, and the type of each kind of column in Arrow, Spark and Postgres.

Integers are signed, since Spark has no others. Amounts of wei per gas are decimals: anyone with enough balance
can offer a fee beyond 63 bits, and a fee times gas overflows 63 bits every day. A uint256 is exact and takes
several columns in files: ``_binary`` (32 bytes, big-endian, so that it sorts), ``_string`` (decimal), ``_f64``
(nearest double) and its digits in pieces for sums (``digit_columns``); in Postgres it is one ``numeric``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import pyarrow as pa

from tracelake.evm.digit_columns import DIGIT_ARROW, DIGIT_PARTS, DIGIT_SPARK

UINT256_PARTS = ("_binary", "_string", "_f64", *DIGIT_PARTS)
WEI = pa.decimal128(38, 0)
INSTANT = pa.timestamp("us", tz="UTC")
UINT256_ARROW = (pa.binary(), pa.string(), pa.float64(), *DIGIT_ARROW)
UINT256_SPARK = ("BINARY", "STRING", "DOUBLE", *DIGIT_SPARK)


class ColumnKind(StrEnum):
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


class Proof(StrEnum):
    """Why a column is true under ``verify: full``."""

    HASH = "by hash"
    """The block's hash covers it."""
    DERIVED = "derived"
    """It follows from what is hashed: an endpoint that says otherwise is refused, one that says nothing is
    supplemented."""
    NODE = "node's word"
    """Nothing here can check it, so it may differ by endpoint."""


@dataclass(frozen=True, slots=True)
class ChainColumn:
    """One column, or those of a uint256. ``nullable``: a value may be absent on some chain."""

    name: str
    kind: ColumnKind
    about: str
    nullable: bool = False
    proof: Proof = Proof.HASH


def _list_of(element: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", element))


BYTES_LIST = _list_of(pa.binary())


ACCESS_LIST = _list_of(pa.struct([("address", pa.binary()), ("storage_keys", BYTES_LIST)]))


AUTHORIZATIONS = _list_of(  # a signer may put any chain and any nonce into one, valid or not
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


ARROW: Mapping[ColumnKind, pa.DataType] = {
    ColumnKind.INTEGER: pa.int64(),
    ColumnKind.WEI: WEI,
    ColumnKind.BYTES: pa.binary(),
    ColumnKind.TEXT: pa.string(),
    ColumnKind.BOOLEAN: pa.bool_(),
    ColumnKind.INSTANT: INSTANT,
    ColumnKind.BYTES_LIST: BYTES_LIST,
    ColumnKind.ACCESS_LIST: ACCESS_LIST,
    ColumnKind.AUTHORIZATIONS: AUTHORIZATIONS,
}


SPARK: Mapping[ColumnKind, str] = {
    ColumnKind.INTEGER: "BIGINT",
    ColumnKind.WEI: "DECIMAL(38,0)",
    ColumnKind.BYTES: "BINARY",
    ColumnKind.TEXT: "STRING",
    ColumnKind.BOOLEAN: "BOOLEAN",
    ColumnKind.INSTANT: "TIMESTAMP",
    ColumnKind.BYTES_LIST: "ARRAY<BINARY>",
    ColumnKind.ACCESS_LIST: "ARRAY<STRUCT<address: BINARY, storage_keys: ARRAY<BINARY>>>",
    ColumnKind.AUTHORIZATIONS: (
        "ARRAY<STRUCT<chain_id: STRING, address: BINARY, nonce: DECIMAL(38,0), y_parity: BIGINT, "
        "r: BINARY, s: BINARY>>"
    ),
}


POSTGRES: Mapping[ColumnKind, str] = {
    ColumnKind.INTEGER: "bigint",
    ColumnKind.WEI: "numeric(78,0)",
    ColumnKind.UINT256: "numeric(78,0)",
    ColumnKind.BYTES: "bytea",
    ColumnKind.TEXT: "text",
    ColumnKind.BOOLEAN: "boolean",
    ColumnKind.INSTANT: "timestamptz",
    ColumnKind.BYTES_LIST: "jsonb",
    ColumnKind.ACCESS_LIST: "jsonb",
    ColumnKind.AUTHORIZATIONS: "jsonb",
}


NESTED = frozenset({ColumnKind.BYTES_LIST, ColumnKind.ACCESS_LIST, ColumnKind.AUTHORIZATIONS})


def arrow_fields(column: ChainColumn) -> list[pa.Field]:
    """The fields of a column in files."""
    if column.kind is ColumnKind.UINT256:
        parts = zip(UINT256_PARTS, UINT256_ARROW, strict=True)
        return [pa.field(column.name + part, kind) for part, kind in parts]
    return [pa.field(column.name, ARROW[column.kind])]


def spark_fields(column: ChainColumn) -> list[str]:
    if column.kind is ColumnKind.UINT256:
        parts = zip(UINT256_PARTS, UINT256_SPARK, strict=True)
        return [f"{column.name}{part} {kind}" for part, kind in parts]
    return [f"{column.name} {SPARK[column.kind]}"]


def hot_field(column: ChainColumn) -> pa.Field:
    """The field of a column on its way to Postgres and back: numbers beyond 38 digits and JSON are text."""
    if column.kind is ColumnKind.UINT256 or column.kind in NESTED:
        return pa.field(column.name, pa.string())
    return pa.field(column.name, ARROW[column.kind])


_INTEGER, _WEI, _UINT256, _BYTES = ColumnKind.INTEGER, ColumnKind.WEI, ColumnKind.UINT256, ColumnKind.BYTES
_DERIVED, _NODE = Proof.DERIVED, Proof.NODE


EVERY_TABLE = (
    ChainColumn("chain_id", _INTEGER, "chain id, of the pool; signatures must be for it", proof=_DERIVED),
    ChainColumn("block_number", _INTEGER, "block number"),
    ChainColumn("block_hash", _BYTES, "block hash, 32 bytes"),
    ChainColumn("timestamp", ColumnKind.INSTANT, "block timestamp, UTC"),
)


def _wide_values(proof: Proof = Proof.HASH) -> ChainColumn:
    about = "JSON of numbers beyond the type of their column, exact; the column itself is null then"
    return ChainColumn("wide_values", ColumnKind.TEXT, about, nullable=True, proof=proof)


BLOCKS = (
    ChainColumn("parent_hash", _BYTES, "hash of the parent block"),
    ChainColumn("author", _BYTES, "fee recipient (coinbase)"),
    ChainColumn("gas_limit", _INTEGER, "block gas limit"),
    ChainColumn("gas_used", _INTEGER, "gas used by the block"),
    ChainColumn("base_fee_per_gas", _WEI, "base fee per gas, wei; since London", nullable=True),
    ChainColumn("blob_gas_used", _INTEGER, "blob gas used by the block; since Cancun", nullable=True),
    ChainColumn("excess_blob_gas", _INTEGER, "excess blob gas (EIP-4844); since Cancun", nullable=True),
    ChainColumn("extra_data", _BYTES, "arbitrary bytes set by the block producer"),
    ChainColumn("transaction_count", _INTEGER, "number of transactions", proof=_DERIVED),
    ChainColumn(
        "withdrawal_count", _INTEGER, "number of withdrawals; since Shanghai", nullable=True, proof=_DERIVED
    ),
    ChainColumn("size", _INTEGER, "block size in bytes", nullable=True, proof=_NODE),
    ChainColumn("difficulty", _UINT256, "proof-of-work difficulty; 0 since the Merge"),
    ChainColumn(
        "total_difficulty",
        _UINT256,
        "total difficulty up to this block; recent nodes omit it",
        nullable=True,
        proof=_NODE,
    ),
    ChainColumn("logs_bloom", _BYTES, "Bloom filter of all logs, 256 bytes"),
    ChainColumn("state_root", _BYTES, "state root"),
    ChainColumn("transactions_root", _BYTES, "transactions root"),
    ChainColumn("receipts_root", _BYTES, "receipts root"),
    ChainColumn("withdrawals_root", _BYTES, "withdrawals root; since Shanghai", nullable=True),
    ChainColumn("uncles_hash", _BYTES, "hash of the list of uncles"),
    ChainColumn(
        "uncles",
        ColumnKind.BYTES_LIST,
        "hashes of the uncles; the block's hash only shows whether there are any",
        proof=_NODE,
    ),
    ChainColumn("mix_hash", _BYTES, "mix hash; prevRandao since the Merge", nullable=True),
    ChainColumn("nonce", _BYTES, "proof-of-work nonce, 8 bytes", nullable=True),
    ChainColumn(
        "parent_beacon_block_root",
        _BYTES,
        "root of the parent beacon block (EIP-4788); since Cancun",
        nullable=True,
    ),
    ChainColumn(
        "requests_hash", _BYTES, "hash of execution requests (EIP-7685); since Prague", nullable=True
    ),
    ChainColumn(
        "block_access_list_hash",
        _BYTES,
        "hash of the block access list (EIP-7928); since Amsterdam",
        nullable=True,
    ),
    ChainColumn(
        "slot_number", _INTEGER, "slot of the beacon chain (EIP-7843); since Amsterdam", nullable=True
    ),
    _wide_values(),
)


TRANSACTIONS = (
    ChainColumn("transaction_index", _INTEGER, "index in the block"),
    ChainColumn("transaction_hash", _BYTES, "transaction hash"),
    ChainColumn("transaction_type", _INTEGER, "0 legacy, 1 EIP-2930, 2 EIP-1559, 3 EIP-4844, 4 EIP-7702"),
    ChainColumn("nonce", _INTEGER, "sender nonce"),
    ChainColumn(
        "from_address",
        _BYTES,
        "sender, recovered from the signature; the node's word with `senders: node`",
        proof=_DERIVED,
    ),
    ChainColumn("to_address", _BYTES, "recipient; null for a contract creation", nullable=True),
    ChainColumn(
        "value", _UINT256, "wei transferred; null for a type that makes several calls", nullable=True
    ),
    ChainColumn(
        "input", _BYTES, "call data, or init code of a contract creation; null as value is", nullable=True
    ),
    ChainColumn("n_input_bytes", _INTEGER, "bytes in input", nullable=True, proof=_DERIVED),
    ChainColumn("n_input_zero_bytes", _INTEGER, "zero bytes in input", nullable=True, proof=_DERIVED),
    ChainColumn("n_input_nonzero_bytes", _INTEGER, "non-zero bytes in input", nullable=True, proof=_DERIVED),
    ChainColumn("gas_limit", _INTEGER, "transaction gas limit"),
    ChainColumn("gas_used", _INTEGER, "gas used; needs the receipt", nullable=True, proof=_DERIVED),
    ChainColumn("cumulative_gas_used", _INTEGER, "cumulative gas used in the block", nullable=True),
    ChainColumn(
        "gas_price",
        _WEI,
        "gas price paid, wei: of the transaction for types 0 and 1, `effective_gas_price` since type 2",
        nullable=True,
        proof=_DERIVED,
    ),
    ChainColumn(
        "effective_gas_price",
        _WEI,
        "effective gas price, wei; needs the receipt",
        nullable=True,
        proof=_DERIVED,
    ),
    ChainColumn(
        "max_priority_fee_per_gas", _WEI, "max priority fee per gas, wei; since type 2", nullable=True
    ),
    ChainColumn("max_fee_per_gas", _WEI, "max fee per gas, wei; since type 2", nullable=True),
    ChainColumn("max_fee_per_blob_gas", _WEI, "max fee per blob gas, wei; type 3", nullable=True),
    ChainColumn("blob_gas_used", _INTEGER, "blob gas used; type 3", nullable=True, proof=_DERIVED),
    ChainColumn("blob_gas_price", _WEI, "blob gas price, wei", nullable=True, proof=_NODE),
    ChainColumn(
        "blob_versioned_hashes", ColumnKind.BYTES_LIST, "versioned blob hashes; type 3", nullable=True
    ),
    ChainColumn("access_list", ColumnKind.ACCESS_LIST, "access list (EIP-2930); since type 1", nullable=True),
    ChainColumn(
        "authorization_list",
        ColumnKind.AUTHORIZATIONS,
        "authorization list (EIP-7702); type 4",
        nullable=True,
    ),
    ChainColumn("success", ColumnKind.BOOLEAN, "whether it succeeded; null before Byzantium", nullable=True),
    ChainColumn(
        "contract_address",
        _BYTES,
        "address of the created contract, also of a creation that failed",
        nullable=True,
        proof=_DERIVED,
    ),
    ChainColumn(
        "v",
        _INTEGER,
        "signature v: with the chain id for type 0 (EIP-155), `y_parity` since type 1",
        nullable=True,
    ),
    ChainColumn("r", _BYTES, "signature r, 32 bytes", nullable=True),
    ChainColumn("s", _BYTES, "signature s, 32 bytes", nullable=True),
    ChainColumn("y_parity", _INTEGER, "signature y parity, 0 or 1", nullable=True, proof=_DERIVED),
    _wide_values(),
)


LOGS = (
    ChainColumn("transaction_index", _INTEGER, "transaction index"),
    ChainColumn("log_index", _INTEGER, "index in the block", proof=_DERIVED),
    ChainColumn("transaction_hash", _BYTES, "transaction hash"),
    ChainColumn("address", _BYTES, "emitting contract"),
    ChainColumn(
        "topic0", _BYTES, "hash of the event signature, unless the event is anonymous", nullable=True
    ),
    ChainColumn("topic1", _BYTES, "first indexed argument", nullable=True),
    ChainColumn("topic2", _BYTES, "second indexed argument", nullable=True),
    ChainColumn("topic3", _BYTES, "third indexed argument", nullable=True),
    ChainColumn("data", _BYTES, "arguments that are not indexed"),
)


RECEIPTS = (
    ChainColumn("transaction_index", _INTEGER, "transaction index"),
    ChainColumn("transaction_hash", _BYTES, "transaction hash"),
    ChainColumn("transaction_type", _INTEGER, "transaction type, as in transactions"),
    ChainColumn("from_address", _BYTES, "sender, as in transactions", proof=_DERIVED),
    ChainColumn("to_address", _BYTES, "recipient", nullable=True),
    ChainColumn(
        "contract_address",
        _BYTES,
        "address of the created contract, also of a creation that failed",
        nullable=True,
        proof=_DERIVED,
    ),
    ChainColumn("success", ColumnKind.BOOLEAN, "whether it succeeded; null before Byzantium", nullable=True),
    ChainColumn("root", _BYTES, "state root after the transaction; until Byzantium", nullable=True),
    ChainColumn("gas_used", _INTEGER, "gas used", proof=_DERIVED),
    ChainColumn("cumulative_gas_used", _INTEGER, "cumulative gas used in the block"),
    ChainColumn("effective_gas_price", _WEI, "effective gas price, wei", nullable=True, proof=_DERIVED),
    ChainColumn("blob_gas_used", _INTEGER, "blob gas used; type 3", nullable=True, proof=_DERIVED),
    ChainColumn("blob_gas_price", _WEI, "blob gas price, wei", nullable=True, proof=_NODE),
    ChainColumn("logs_bloom", _BYTES, "Bloom filter of its logs, 256 bytes"),
    ChainColumn("log_count", _INTEGER, "number of logs", proof=_DERIVED),
    _wide_values(),
)


WITHDRAWALS = (
    ChainColumn("withdrawal_index", _INTEGER, "global withdrawal index"),
    ChainColumn("validator_index", _INTEGER, "validator index"),
    ChainColumn("address", _BYTES, "recipient"),
    ChainColumn("amount", _INTEGER, "amount in gwei"),
    _wide_values(),
)


TRACES = (
    ChainColumn("trace_index", _INTEGER, "index in the block", proof=_NODE),
    ChainColumn(
        "transaction_index", _INTEGER, "transaction index; null for a reward", nullable=True, proof=_NODE
    ),
    ChainColumn(
        "transaction_hash", _BYTES, "transaction hash; null for a reward", nullable=True, proof=_NODE
    ),
    ChainColumn(
        "trace_address",
        ColumnKind.TEXT,
        "path in the call tree: 0_2 is the third call of the first",
        proof=_NODE,
    ),
    ChainColumn("subtraces", _INTEGER, "number of child calls", proof=_NODE),
    ChainColumn("action_type", ColumnKind.TEXT, "call, create, suicide or reward", proof=_NODE),
    ChainColumn(
        "action_call_type",
        ColumnKind.TEXT,
        "call, delegatecall, staticcall or callcode",
        nullable=True,
        proof=_NODE,
    ),
    ChainColumn("action_reward_type", ColumnKind.TEXT, "block or uncle", nullable=True, proof=_NODE),
    ChainColumn(
        "action_from", _BYTES, "caller; the contract that destroyed itself", nullable=True, proof=_NODE
    ),
    ChainColumn("action_to", _BYTES, "callee; recipient of the refund or reward", nullable=True, proof=_NODE),
    ChainColumn(
        "action_value", _UINT256, "wei transferred, refunded or rewarded", nullable=True, proof=_NODE
    ),
    ChainColumn("action_gas", _INTEGER, "gas provided", nullable=True, proof=_NODE),
    ChainColumn("action_input", _BYTES, "call data", nullable=True, proof=_NODE),
    ChainColumn("action_init", _BYTES, "init code", nullable=True, proof=_NODE),
    ChainColumn("result_gas_used", _INTEGER, "gas used", nullable=True, proof=_NODE),
    ChainColumn("result_output", _BYTES, "return data", nullable=True, proof=_NODE),
    ChainColumn("result_code", _BYTES, "code of the created contract", nullable=True, proof=_NODE),
    ChainColumn("result_address", _BYTES, "address of the created contract", nullable=True, proof=_NODE),
    ChainColumn("error", ColumnKind.TEXT, "error message", nullable=True, proof=_NODE),
    _wide_values(_NODE),
)
