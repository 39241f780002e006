"""The columns of blocks and withdrawals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from tracelake.evm.hex_columns import fixed_bytes, integers, uint256, varying_bytes, wei
from tracelake.evm.nested_columns import hash_lists
from tracelake.evm.raw_block import RawBlock
from tracelake.evm.rows import ADDRESS, BLOOM, HASH, Rows

Columns = dict[str, pa.Array]

_REQUIRED = (
    ("parent_hash", "parentHash", HASH),
    ("author", "miner", ADDRESS),
    ("gas_limit", "gasLimit", integers),
    ("gas_used", "gasUsed", integers),
    ("extra_data", "extraData", varying_bytes),
    ("logs_bloom", "logsBloom", BLOOM),
    ("state_root", "stateRoot", HASH),
    ("transactions_root", "transactionsRoot", HASH),
    ("receipts_root", "receiptsRoot", HASH),
    ("uncles_hash", "sha3Uncles", HASH),
)
_OPTIONAL = (
    ("base_fee_per_gas", "baseFeePerGas", wei),
    ("blob_gas_used", "blobGasUsed", integers),
    ("excess_blob_gas", "excessBlobGas", integers),
    ("size", "size", integers),
    ("withdrawals_root", "withdrawalsRoot", HASH),
    ("mix_hash", "mixHash", HASH),
    ("parent_beacon_block_root", "parentBeaconBlockRoot", HASH),
    ("requests_hash", "requestsHash", HASH),
)


def block_columns(raw: Sequence[RawBlock], blocks: Rows) -> tuple[Rows, Columns]:
    columns: Columns = {name: blocks.column(key, convert) for name, key, convert in _REQUIRED}
    columns |= {name: blocks.optional(key, convert) for name, key, convert in _OPTIONAL}
    columns["nonce"] = blocks.optional("nonce", lambda values: fixed_bytes(values, 8))
    columns["uncles"] = blocks.convert(
        "uncles", [item.get("uncles") or [] for item in blocks.objects], hash_lists
    )
    columns |= uint256_columns("difficulty", blocks.column("difficulty", uint256))
    columns |= uint256_columns("total_difficulty", blocks.optional("totalDifficulty", uint256))
    columns["transaction_count"] = pa.array(transactions_of(raw).counts)
    withdrawals = _withdrawals(raw)
    since_shanghai = np.fromiter(
        [one.block.get("withdrawals") is not None for one in raw], np.bool_, len(raw)
    )
    columns["withdrawal_count"] = pa.array(withdrawals.counts, mask=~since_shanghai)
    return blocks, columns


def withdrawal_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, Columns]:
    rows = _withdrawals(raw)
    return rows, {
        "withdrawal_index": rows.column("index", integers),
        "validator_index": rows.column("validatorIndex", integers),
        "address": rows.column("address", ADDRESS),
        "amount": rows.column("amount", integers),
    }


def transactions_of(raw: Sequence[RawBlock]) -> Rows:
    return Rows(raw, [one.block.get("transactions") for one in raw], "transactions")


def uint256_columns(name: str, parts: Any) -> Columns:
    binary, text, double = parts
    return {f"{name}_binary": binary, f"{name}_string": text, f"{name}_f64": double}


def _withdrawals(raw: Sequence[RawBlock]) -> Rows:
    return Rows(raw, [one.block.get("withdrawals") or [] for one in raw], "withdrawals")
