"""The columns of transactions and receipts of every type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.evm.bad_value import BadValue
from tracelake.evm.block_errors import BlockMalformed
from tracelake.evm.columns import WEI
from tracelake.evm.decode_blocks import transactions_of, uint256_columns
from tracelake.evm.hex_columns import integers, places, uint256, varying_bytes, wei, words
from tracelake.evm.nested_columns import access_lists, authorization_lists, hash_lists, must_be_lists
from tracelake.evm.raw_block import RawBlock
from tracelake.evm.rows import ADDRESS, BLOOM, HASH, Rows

Columns = dict[str, pa.Array]
Integers = npt.NDArray[np.int64]

_FIRST_WITH_FEES = 2
_BLOB = 3
_OUTCOME = ("gas_used", "cumulative_gas_used", "blob_gas_used")


def transaction_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, Columns]:
    rows = transactions_of(raw)
    kinds = _kinds(rows)
    gas_price = rows.optional("gasPrice", wei)
    columns = {
        "transaction_index": rows.column("transactionIndex", places),
        "transaction_hash": rows.column("hash", HASH),
        "transaction_type": pa.array(kinds),
        "nonce": rows.column("nonce", integers),
        "from_address": rows.column("from", ADDRESS),
        "to_address": rows.optional("to", ADDRESS),
        "gas_limit": rows.column("gas", integers),
        "max_priority_fee_per_gas": rows.optional("maxPriorityFeePerGas", wei),
        "max_fee_per_gas": rows.optional("maxFeePerGas", wei),
        "max_fee_per_blob_gas": rows.optional("maxFeePerBlobGas", wei),
        "blob_versioned_hashes": rows.optional("blobVersionedHashes", hash_lists),
        "access_list": rows.convert("accessList", _since_typed(rows, kinds, "accessList"), access_lists),
        "authorization_list": rows.optional("authorizationList", authorization_lists),
        "r": rows.optional("r", words),
        "s": rows.optional("s", words),
    }
    columns |= uint256_columns("value", rows.column("value", uint256))
    columns |= _input(rows.column("input", varying_bytes))
    columns |= _parity(rows)
    columns |= _outcome(raw, rows, kinds, gas_price)
    columns["gas_price"] = _gas_price(kinds, gas_price, columns["effective_gas_price"])
    return rows, columns


def receipt_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, Columns]:
    rows = Rows(raw, [one.receipts for one in raw], "receipts")
    kinds = _kinds(rows)
    columns = _receipt_outcome(rows, kinds)
    columns |= {
        "transaction_index": rows.column("transactionIndex", places),
        "transaction_hash": rows.column("transactionHash", HASH),
        "transaction_type": pa.array(kinds),
        "from_address": rows.column("from", ADDRESS),
        "to_address": rows.optional("to", ADDRESS),
        "root": rows.optional("root", HASH),
        "logs_bloom": rows.column("logsBloom", BLOOM),
        "log_count": rows.column("logs", _lengths),
    }
    return rows, columns


def _outcome(raw: Sequence[RawBlock], rows: Rows, kinds: Integers, gas_price: pa.Array) -> Columns:
    """What the receipts add to their transactions: nothing if they weren't asked for."""
    if any(one.receipts is None for one in raw):
        nulls: Columns = {name: pa.nulls(len(rows), pa.int64()) for name in _OUTCOME}
        return nulls | {
            "success": pa.nulls(len(rows), pa.bool_()),
            "contract_address": pa.nulls(len(rows), pa.binary()),
            "effective_gas_price": pa.nulls(len(rows), WEI),
            "blob_gas_price": pa.nulls(len(rows), WEI),
        }
    receipts = Rows(raw, [one.receipts for one in raw], "receipts")
    for one, transactions, own in zip(raw, rows.counts, receipts.counts, strict=True):
        if transactions != own:
            raise BlockMalformed(
                one.number, one.endpoint, "receipts", f"are {own} for {transactions} transactions"
            )
    columns = _receipt_outcome(receipts, kinds)
    effective = columns["effective_gas_price"]
    if effective.null_count:
        columns["effective_gas_price"] = pc.coalesce(effective, gas_price)
    return columns


def _receipt_outcome(receipts: Rows, kinds: Integers) -> Columns:
    return {
        "gas_used": receipts.column("gasUsed", integers),
        "cumulative_gas_used": receipts.column("cumulativeGasUsed", integers),
        "effective_gas_price": receipts.optional("effectiveGasPrice", wei),
        "blob_gas_used": receipts.convert("blobGasUsed", _of_blobs(receipts, kinds, "blobGasUsed"), integers),
        "blob_gas_price": receipts.convert("blobGasPrice", _of_blobs(receipts, kinds, "blobGasPrice"), wei),
        "success": receipts.optional("status", _success),
        "contract_address": receipts.optional("contractAddress", ADDRESS),
    }


def _gas_price(kinds: Integers, given: pa.Array, effective: pa.Array) -> pa.Array:
    """With fees instead of a price, clients give what was paid or what was offered; it's what was paid here."""
    by_fees = pa.array(kinds >= _FIRST_WITH_FEES)
    return pc.if_else(by_fees, pc.coalesce(effective, given), pc.coalesce(given, effective))


def _kinds(rows: Rows) -> Integers:
    types = ["0x0" if kind is None else kind for kind in rows.values("type")]
    kinds: Integers = rows.convert("type", types, integers).to_numpy()
    return kinds


def _since_typed(rows: Rows, kinds: Integers, key: str) -> list[Any]:
    """Some clients give legacy transactions an empty access list, which they can't have."""
    return [item.get(key) if kind else None for item, kind in zip(rows.objects, kinds.tolist(), strict=True)]


def _of_blobs(receipts: Rows, kinds: Integers, key: str) -> list[Any]:
    """Some clients give the price of blob gas to transactions that have no blobs."""
    if not (kinds == _BLOB).any():
        return [None] * len(receipts)
    return [
        item.get(key) if kind == _BLOB else None for item, kind in zip(receipts.objects, kinds, strict=True)
    ]


def _parity(rows: Rows) -> Columns:
    """Typed transactions carry the parity itself, legacy ones have it in ``v``, with the chain since EIP-155."""
    values = [item.get("v") or item.get("yParity") for item in rows.objects]
    v = rows.convert("v", values, integers)
    given = v.fill_null(0).to_numpy()
    parity = np.where(given >= 35, (given - 35) & 1, np.where(given >= 27, given - 27, given))
    missing = v.is_null().to_numpy(zero_copy_only=False) if v.null_count else None
    return {"v": v, "y_parity": pa.array(parity, mask=missing)}


def _input(data: pa.Array) -> Columns:
    """Call data, and how much of it is zeros, which are cheaper."""
    _, offsets, content = data.buffers()
    bounds = np.frombuffer(offsets, np.int32)[: len(data) + 1]
    zeros = np.zeros(int(bounds[-1]) + 1, np.int64)
    np.cumsum(np.frombuffer(content, np.uint8)[: bounds[-1]] == 0, out=zeros[1:])
    lengths, zero = np.diff(bounds).astype(np.int64), np.diff(zeros[bounds])
    return {
        "input": data,
        "n_input_bytes": pa.array(lengths),
        "n_input_zero_bytes": pa.array(zero),
        "n_input_nonzero_bytes": pa.array(lengths - zero),
    }


def _success(values: Sequence[Any]) -> pa.Array:
    outcomes = integers(values)
    given = outcomes.drop_null().to_numpy()
    if (given > 1).any():
        index = int(given.argmax())
        raise BadValue(index, f"is neither 0x0 nor 0x1: {given[index]:#x}")
    return outcomes.cast(pa.bool_())


def _lengths(lists: Sequence[Any]) -> pa.Array:
    must_be_lists(lists)
    return pa.array(np.fromiter(map(len, lists), np.int64, len(lists)))
