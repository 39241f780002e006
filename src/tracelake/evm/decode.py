"""``decode``: blocks in JSON-RPC's shape to Arrow columns, in the shape and the order of ``schemas.TABLES``.

``Rows`` reads JSON objects of one kind from many blocks, field by field, a whole column at a time. A field that
can't be read is reported with the block, the endpoint that sent it and its place in the answer.

Differences between clients for one and the same block are removed here (types that are left out, fields of other
transaction types, prices of blob gas for transactions without blobs), and what a client leaves out is filled in
where it follows from the rest (the price paid, a created contract, gas of blobs), so a table doesn't depend on
the endpoint. Traces have the shape of OpenEthereum's trace_block, which Erigon, Reth and Nethermind use as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tracelake.domain.errors import Invalid
from tracelake.evm import hex_columns
from tracelake.evm.columns import INSTANT, WEI
from tracelake.evm.consensus import BLOB_GAS, contract_address, type_of
from tracelake.evm.digit_columns import named_digit_columns
from tracelake.evm.hex_columns import (
    BadValue,
    TooWide,
    access_lists,
    authorization_lists,
    cut,
    fixed_bytes,
    hash_lists,
    integers,
    microseconds,
    must_be_lists,
    numbers,
    places,
    uint256,
    unhex_fixed,
    varying_bytes,
    wei,
    words,
)
from tracelake.evm.profiles.registry import advice_about_type
from tracelake.evm.profiles.rows import (
    header_of_block,
    places_of_receipts,
    receipts_of_block,
    transactions_of_block,
)
from tracelake.evm.raw_block import BlockMalformed, ChainTable, RawBlock, shown
from tracelake.evm.schemas import TABLES
from tracelake.evm.wide_values import COLUMN as WIDE_VALUES
from tracelake.evm.wide_values import WideValues

Columns = dict[str, pa.Array]
_NEEDS_RECEIPTS = (ChainTable.LOGS, ChainTable.RECEIPTS)
Convert = Callable[[Sequence[Any]], Any]
HASH: Convert = partial(hex_columns.fixed_bytes, width=32)
ADDRESS: Convert = partial(hex_columns.fixed_bytes, width=20)
BLOOM: Convert = partial(hex_columns.fixed_bytes, width=256)
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
    ("block_access_list_hash", "blockAccessListHash", HASH),
    ("slot_number", "slotNumber", integers),
)
Integers = npt.NDArray[np.int64]
_LEGACY, _FIRST_WITH_FEES, _BLOB, _LAST_KNOWN = 0, 2, 3, 4
# Transaction types that can't have a field. Other chains' own types are above the last known one, and keep theirs.
_WITHOUT_ACCESS_LIST = frozenset({0})
_WITHOUT_FEES = frozenset({0, 1})
_WITHOUT_BLOBS = frozenset({0, 1, 2, 4})
_WITHOUT_AUTHORIZATIONS = frozenset({0, 1, 2, 3})
# Transactions with blobs or authorizations must have a recipient.
_CREATING = ("0x0", "0x1", "0x2")
# Rows are sorted by indexes; the others are only an endpoint's word, and not kept among values that are proven.
_NEVER_WIDE = ("index", "logIndex", "transactionIndex", "size", "blobGasPrice")
_KNOWN_TYPES = ("0x0", "0x1", "0x2", "0x3", "0x4")
_OUTCOME = ("gas_used", "cumulative_gas_used", "blob_gas_used")
MOST_TOPICS = 4


class Rows:
    """Objects of one kind. ``lists`` has one list for each block; ``what`` is JSON-RPC's name for them, for
    errors."""

    def __init__(self, blocks: Sequence[RawBlock], lists: Sequence[Any], what: str) -> None:
        self._blocks, self._lists, self._what = blocks, lists, what
        for raw, objects in zip(blocks, lists, strict=True):
            # Native calls, since there may be tens of thousands of objects.
            if not isinstance(objects, list) or not set(map(type, objects)) <= {dict}:
                raise BlockMalformed(raw.number, raw.endpoint, what or "the block", "isn't a list of objects")
        self.counts = np.fromiter(map(len, lists), np.int64, len(lists))
        self.objects: list[dict[str, Any]] = list(chain.from_iterable(lists))
        self.wide = WideValues()

    def __len__(self) -> int:
        return len(self.objects)

    def column(self, key: str, convert: Convert) -> Any:
        """Convert a field that every object has."""
        values = self.values(key)
        # ``all`` is cheaper than ``in``, and empty values are rare.
        if not all(values) and None in values:
            self._must_be_optional(key, values)
        return self.convert(key, values, convert)

    def optional(self, key: str, convert: Convert) -> Any:
        """Convert a field that may be absent or null."""
        return self.convert(key, self.values(key), convert)

    def values(self, key: str) -> list[Any]:
        try:
            # The fast path: almost always every object has the key.
            return list(map(itemgetter(key), self.objects))
        except KeyError:
            return [item.get(key) for item in self.objects]

    def convert(self, key: str, values: Sequence[Any], convert: Convert) -> Any:
        """Convert values that were read from the objects, one for each."""
        try:
            try:
                return convert(values)
            except TooWide as wide:
                # Other converters use the numbers for more than a column, and can't do without one.
                if convert not in (integers, wei) or key in _NEVER_WIDE:
                    raise
                values = self.wide.take_out(key, values, wide.limit)
                return convert(values)
        except BadValue as bad:
            # Converters skip nulls, so their index counts only the values that are there.
            there = [index for index, value in enumerate(values) if value is not None]
            raise self._malformed(key, there[bad.index], bad.problem) from None

    def per_row(self, per_block: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Repeat a value of each block for each of its objects."""
        return np.repeat(per_block, self.counts, axis=0)

    def _must_be_optional(self, key: str, values: Sequence[Any]) -> None:
        """Refuse absent values, but of transaction types that lack the field on their chain."""
        profile = self._blocks[0].profile
        for index, value in enumerate(values):
            given = self.objects[index].get("type")
            kind = given if isinstance(given, str) else "0x0"
            if value is None and not profile.may_lack(key, kind):
                known = kind in _KNOWN_TYPES or kind in profile.types
                advice = (
                    "" if known else f"; transaction type {shown(kind)}: {advice_about_type(kind, profile)}"
                )
                raise self._malformed(key, index, f"is missing{advice}")

    def _malformed(self, key: str, index: int, problem: str) -> BlockMalformed:
        block = int(np.searchsorted(np.cumsum(self.counts), index, side="right"))
        raw = self._blocks[block]
        place = index - int(self.counts[:block].sum())
        field = f"{self._what}[{place}].{key}" if self._what else key
        return BlockMalformed(raw.number, raw.endpoint, field, problem)


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
        [one.block.get("withdrawalsRoot") is not None for one in raw], np.bool_, len(raw)
    )
    # Null before Shanghai, and 0 for a later block without withdrawals.
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
    return Rows(raw, [transactions_of_block(one) for one in raw], "transactions")


def uint256_columns(name: str, parts: Any) -> Columns:
    binary, text, double = parts
    columns = {f"{name}_binary": binary, f"{name}_string": text, f"{name}_f64": double}
    return {**columns, **named_digit_columns(name, text)}


def _withdrawals(raw: Sequence[RawBlock]) -> Rows:
    return Rows(raw, [one.block.get("withdrawals") or [] for one in raw], "withdrawals")


def transaction_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, Columns]:
    rows = transactions_of(raw)
    kinds = _kinds(rows)
    columns = {
        "transaction_index": rows.column("transactionIndex", places),
        "transaction_hash": rows.column("hash", HASH),
        "transaction_type": pa.array(kinds),
        "nonce": rows.column("nonce", integers),
        "from_address": rows.column("from", ADDRESS),
        "to_address": rows.optional("to", ADDRESS),
        "gas_limit": rows.column("gas", integers),
        "max_priority_fee_per_gas": _but_of(_WITHOUT_FEES, rows, kinds, "maxPriorityFeePerGas", wei),
        "max_fee_per_gas": _but_of(_WITHOUT_FEES, rows, kinds, "maxFeePerGas", wei),
        "max_fee_per_blob_gas": _but_of(_WITHOUT_BLOBS, rows, kinds, "maxFeePerBlobGas", wei),
        "blob_versioned_hashes": _but_of(_WITHOUT_BLOBS, rows, kinds, "blobVersionedHashes", hash_lists),
        "access_list": rows.convert("accessList", _access_lists(rows, kinds), access_lists),
        "authorization_list": _but_of(
            _WITHOUT_AUTHORIZATIONS, rows, kinds, "authorizationList", authorization_lists
        ),
        "r": rows.optional("r", words),
        "s": rows.optional("s", words),
    }
    columns |= uint256_columns("value", rows.column("value", uint256))
    columns |= _input(rows.column("input", varying_bytes))
    columns |= _parity(rows, kinds)
    columns |= _outcome(raw, rows, kinds)
    paid = columns["effective_gas_price"]
    if paid.null_count:
        paid = pc.coalesce(paid, rows.convert("gasPrice", _prices_paid(raw), wei))
    columns["gas_price"] = _gas_price(rows, kinds, paid)
    return rows, columns


def receipt_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, Columns]:
    rows = Rows(raw, [receipts_of_block(one) for one in raw], "receipts")
    kinds = _kinds(rows)
    columns = _receipt_outcome(raw, rows, kinds)
    columns |= {
        "transaction_index": rows.column("transactionIndex", places),
        "transaction_hash": rows.column("transactionHash", HASH),
        "transaction_type": pa.array(kinds),
        "from_address": rows.column("from", ADDRESS),
        "to_address": rows.optional("to", ADDRESS),
        "root": rows.convert("root", _roots(rows), HASH),
        "logs_bloom": rows.column("logsBloom", BLOOM),
        "log_count": rows.column("logs", _lengths),
    }
    return rows, columns


def _outcome(raw: Sequence[RawBlock], rows: Rows, kinds: Integers) -> Columns:
    """Columns of transactions that come from receipts: all null if receipts weren't requested."""
    if any(one.receipts is None for one in raw):
        nulls: Columns = {name: pa.nulls(len(rows), pa.int64()) for name in _OUTCOME}
        return nulls | {
            "success": pa.nulls(len(rows), pa.bool_()),
            "contract_address": pa.nulls(len(rows), pa.binary()),
            "effective_gas_price": pa.nulls(len(rows), WEI),
            "blob_gas_price": pa.nulls(len(rows), WEI),
        }
    receipts = Rows(raw, [receipts_of_block(one) for one in raw], "receipts")
    found = places_of_receipts(raw)
    if len(receipts) == len(rows):
        columns = _receipt_outcome(raw, receipts, kinds)
    else:
        own = _receipt_outcome(raw, receipts, _kinds(receipts))
        columns = {name: column.take(pa.array(found, pa.int64())) for name, column in own.items()}
    rows.wide.adopt(receipts.wide, found)
    return columns


def _receipt_outcome(raw: Sequence[RawBlock], receipts: Rows, kinds: Integers) -> Columns:
    beside = _Beside(raw, receipts)
    return {
        "gas_used": receipts.column("gasUsed", integers),
        "cumulative_gas_used": receipts.column("cumulativeGasUsed", integers),
        "effective_gas_price": receipts.convert("effectiveGasPrice", beside.prices(), wei),
        "blob_gas_used": receipts.convert("blobGasUsed", beside.blob_gas(kinds), integers),
        "blob_gas_price": _but_of(_WITHOUT_BLOBS, receipts, kinds, "blobGasPrice", wei),
        "success": receipts.optional("status", _success),
        "contract_address": receipts.convert("contractAddress", beside.created(), ADDRESS),
    }


Derive = Callable[[dict[str, Any], dict[str, Any]], str | None]


class _Beside:
    """Receipts with their transactions, from which follows what a client leaves out of a receipt.

    Only absent values are filled in: chains that aren't Ethereum's have rules of their own, and ``verify: full``
    has compared the values that are there.
    """

    def __init__(self, raw: Sequence[RawBlock], receipts: Rows) -> None:
        self._raw, self._receipts = raw, receipts

    def prices(self) -> list[Any]:
        """Receipts from before London have no price; some clients leave it out later as well."""
        return self._filled("effectiveGasPrice", _price_paid)

    def created(self) -> list[Any]:
        """Some clients leave out the address of a creation that failed."""
        return self._filled("contractAddress", _created)

    def blob_gas(self, kinds: Integers) -> list[Any]:
        if not (kinds == _BLOB).any():
            return [None] * len(self._receipts)
        given = self._filled("blobGasUsed", _blob_gas)
        return [
            None if kind in _WITHOUT_BLOBS else value
            for value, kind in zip(given, kinds.tolist(), strict=True)
        ]

    def _filled(self, key: str, derive: Derive) -> list[Any]:
        given = self._receipts.values(key)
        # The usual case is that every receipt has a price, and next to none a contract.
        if all(given):
            return given
        at = 0
        for one, count in zip(self._raw, self._receipts.counts.tolist(), strict=True):
            transactions = one.block.get("transactions")
            # Without verification an endpoint's receipts may be others than its transactions.
            if isinstance(transactions, list) and len(transactions) == count:
                for place, tx in enumerate(transactions):
                    if given[at + place] is None:
                        given[at + place] = _derived(one, place, tx, derive)
            at += count
        return given


def _derived(raw: RawBlock, place: int, tx: dict[str, Any], derive: Derive) -> str | None:
    try:
        return derive(tx, raw.block)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        problem = "can't be read: what its receipt leaves out doesn't follow from it"
        raise BlockMalformed(raw.number, raw.endpoint, f"transactions[{place}]", problem) from None


def _price_paid(tx: dict[str, Any], block: dict[str, Any]) -> str | None:
    most, tip, base_fee = tx.get("maxFeePerGas"), tx.get("maxPriorityFeePerGas"), block.get("baseFeePerGas")
    if type_of(tx) in ("0x0", "0x1"):
        price: str | None = tx.get("gasPrice")
        return price
    if most is None or tip is None or base_fee is None:
        return None
    highest, fee, base = numbers([most, tip, base_fee])
    return hex(min(highest, base + fee))


def _prices_paid(raw: Sequence[RawBlock]) -> list[str | None]:
    return [
        _derived(one, place, tx, _price_paid)
        for one in raw
        for place, tx in enumerate(one.block["transactions"])
    ]


def _created(tx: dict[str, Any], _: dict[str, Any]) -> str | None:
    if tx.get("to") is not None or type_of(tx) not in _CREATING:
        return None
    return contract_address(tx["from"], tx["nonce"])


def _blob_gas(tx: dict[str, Any], _: dict[str, Any]) -> str | None:
    hashes = tx.get("blobVersionedHashes")
    return hex(BLOB_GAS * len(hashes)) if isinstance(hashes, list) else None


def _roots(receipts: Rows) -> list[Any]:
    """The state's root was part of a receipt until there was a status. It is hashed only without one."""
    given = receipts.values("root")
    if not any(given):
        return given
    return [
        root if item.get("status") is None else None
        for root, item in zip(given, receipts.objects, strict=True)
    ]


def _gas_price(rows: Rows, kinds: Integers, paid: pa.Array) -> pa.Array:
    """The price that was paid. For transactions with fees, clients report the paid or the offered price."""
    by_fees = (kinds >= _FIRST_WITH_FEES) & (kinds <= _LAST_KNOWN)
    known = by_fees & paid.is_valid().to_numpy(zero_copy_only=False)
    given = rows.values("gasPrice")
    if known.any():
        # The offered one may be wider than the column, and isn't the price then.
        given = [None if skip else price for price, skip in zip(given, known.tolist(), strict=True)]
    return pc.coalesce(rows.convert("gasPrice", given, wei), paid)


def _kinds(rows: Rows) -> Integers:
    types = ["0x0" if kind is None else kind for kind in rows.values("type")]
    kinds: Integers = rows.convert("type", types, _types).to_numpy()
    return kinds


def _types(values: Sequence[Any]) -> pa.Array:
    return integers(values)


def _but_of(without: frozenset[int], rows: Rows, kinds: Integers, key: str, convert: Convert) -> Any:
    """Convert a field that only some transaction types have. What a client gives to the others isn't hashed."""
    values = rows.values(key)
    if any(value is not None for value in values) and not without.isdisjoint(kinds.tolist()):
        values = [
            None if kind in without else value for value, kind in zip(values, kinds.tolist(), strict=True)
        ]
    return rows.convert(key, values, convert)


def _access_lists(rows: Rows, kinds: Integers) -> list[Any]:
    """Access lists of typed transactions. Some clients leave out an empty one, and give one to legacy
    transactions."""
    return [
        None if kind in _WITHOUT_ACCESS_LIST else [] if given is None and kind <= _LAST_KNOWN else given
        for given, kind in zip(rows.values("accessList"), kinds.tolist(), strict=True)
    ]


def _parity(rows: Rows, kinds: Integers) -> Columns:
    """The parity: typed transactions sign it as such, legacy ones in ``v``, with the chain since EIP-155."""
    # Some clients give typed transactions only one of the two, or a ``v`` in the legacy form.
    values = [
        item.get("v") or item.get("yParity") if kind == _LEGACY else item.get("yParity") or item.get("v")
        for item, kind in zip(rows.objects, kinds.tolist(), strict=True)
    ]
    v = rows.convert("v", values, integers)
    given = v.fill_null(0).to_numpy()
    # EIP-155 has 35 + 2 * chain + parity; before it, 27 + parity.
    parity = np.where(given >= 35, (given - 35) & 1, np.where(given >= 27, given - 27, given))
    typed = (kinds > _LEGACY) & (kinds <= _LAST_KNOWN)
    missing = v.is_null().to_numpy(zero_copy_only=False) if v.null_count else None
    unknown = missing
    if missing is not None and (wide := rows.wide.of_column("v")):
        unknown = missing.copy()
        for row, number in wide.items():
            parity[row], unknown[row] = (number - 35) & 1, False
    return {
        "v": pa.array(np.where(typed, parity, given), mask=missing),
        "y_parity": pa.array(parity, mask=unknown),
    }


def _input(data: pa.Array) -> Columns:
    """Call data and its number of zero bytes, which cost less gas."""
    # A running count of zeros over the column's content: a value's count is a difference of two.
    _, offsets, content = data.buffers()
    bounds = np.frombuffer(offsets, np.int32)[: len(data) + 1]
    zeros = np.zeros(int(bounds[-1]) + 1, np.int64)
    np.cumsum(np.frombuffer(content, np.uint8)[: bounds[-1]] == 0, out=zeros[1:])
    lengths, zero = np.diff(bounds).astype(np.int64), np.diff(zeros[bounds])
    missing = data.is_null().to_numpy(zero_copy_only=False) if data.null_count else None
    return {
        "input": data,
        "n_input_bytes": pa.array(lengths, mask=missing),
        "n_input_zero_bytes": pa.array(zero, mask=missing),
        "n_input_nonzero_bytes": pa.array(lengths - zero, mask=missing),
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


def log_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, dict[str, pa.Array]]:
    rows = Rows(raw, [_logs_of(one) for one in raw], "logs")
    topics = rows.column("topics", _topics)
    given = rows.column("logIndex", places)
    return rows, {
        "transaction_index": rows.column("transactionIndex", places),
        # Where an endpoint's indexes begin again with each transaction, the order of the logs gives them.
        "log_index": pa.array(_places(rows)) if raw[0].profile.log_indexes_restart else given,
        "transaction_hash": rows.column("transactionHash", HASH),
        "address": rows.column("address", ADDRESS),
        **{f"topic{place}": topic for place, topic in enumerate(topics)},
        "data": rows.column("data", varying_bytes),
    }


def _logs_of(raw: RawBlock) -> list[Any]:
    try:
        return list(chain.from_iterable([receipt["logs"] for receipt in raw.receipts or ()]))
    except (KeyError, TypeError):
        raise BlockMalformed(raw.number, raw.endpoint, "receipts[].logs", "is missing") from None


def _topics(lists: Sequence[Any]) -> list[pa.Array]:
    """One column for each place; null where a log has fewer topics. A block may have tens of thousands of logs, so
    topics are cut from one matrix."""
    must_be_lists(lists)
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    if len(lists) and lengths.max() > MOST_TOPICS:
        index = int(lengths.argmax())
        raise BadValue(index, f"has more than {MOST_TOPICS} topics: {shown(lists[index])}")
    ends = np.cumsum(lengths)
    try:
        data = unhex_fixed(list(chain.from_iterable(lists)), 32)
    except BadValue as bad:
        owner = int(np.searchsorted(ends, bad.index, side="right"))
        raise BadValue(owner, f"has one that {bad.problem}") from None
    matrix, starts = np.frombuffer(data, np.uint8).reshape(-1, 32), ends - lengths
    return [_place(matrix, starts, lengths > place, place) for place in range(MOST_TOPICS)]


def _place(matrix: Any, starts: Any, has: Any, place: int) -> pa.Array:
    if not has.any():
        return pa.nulls(len(has), pa.binary())
    return cut(matrix[starts[has] + place].tobytes(), 32, None if has.all() else has)


def trace_columns(raw: Sequence[RawBlock], _: Rows) -> tuple[Rows, Columns]:
    rows = Rows(raw, [one.traces for one in raw], "traces")
    kinds = rows.column("type", _texts)
    columns: Columns = {
        "trace_index": pa.array(_places(rows)),
        "transaction_index": rows.optional("transactionPosition", _plain_integers),
        "transaction_hash": rows.optional("transactionHash", HASH),
        "trace_address": rows.column("traceAddress", _addresses),
        "subtraces": rows.column("subtraces", _plain_integers),
        "action_type": kinds,
        "action_call_type": _part(rows, "action", ("callType",), _texts),
        "action_reward_type": _part(rows, "action", ("rewardType",), _texts),
        "action_from": _part(rows, "action", ("from", "address"), ADDRESS),
        "action_to": _part(rows, "action", ("to", "refundAddress", "author"), ADDRESS),
        "action_gas": _part(rows, "action", ("gas",), integers),
        "action_input": _part(rows, "action", ("input",), varying_bytes),
        "action_init": _part(rows, "action", ("init",), varying_bytes),
        "result_gas_used": _part(rows, "result", ("gasUsed",), integers),
        "result_output": _part(rows, "result", ("output",), varying_bytes),
        "result_code": _part(rows, "result", ("code",), varying_bytes),
        "result_address": _part(rows, "result", ("address",), ADDRESS),
        "error": rows.optional("error", _texts),
    }
    columns |= uint256_columns("action_value", _part(rows, "action", ("value", "balance"), uint256))
    return rows, columns


def _part(rows: Rows, part: str, keys: tuple[str, ...], convert: Convert) -> Any:
    """A field of the action or the result. Different actions use different keys for the same thing."""
    values = []
    for item in rows.objects:
        fields = item.get(part) or {}
        values.append(next((fields[key] for key in keys if fields.get(key) is not None), None))
    return rows.convert(f"{part}.{keys[0]}", values, convert)


def _places(rows: Rows) -> Any:
    starts = np.cumsum(rows.counts) - rows.counts
    return np.arange(len(rows)) - rows.per_row(starts)


def _texts(values: Sequence[Any]) -> pa.Array:
    for index, value in enumerate([value for value in values if value is not None]):
        if not isinstance(value, str):
            raise BadValue(index, f"isn't text: {shown(value)}")
    return pa.array(values, pa.string())


def _plain_integers(values: Sequence[Any]) -> pa.Array:
    """Integers that are JSON numbers, which only traces have."""
    for index, value in enumerate([value for value in values if value is not None]):
        # ``type``, since true is an ``int`` as well.
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise BadValue(index, f"isn't a number: {shown(value)}")
    return pa.array(values, pa.int64())


def _addresses(values: Sequence[Any]) -> pa.Array:
    for index, value in enumerate(values):
        if not isinstance(value, list) or any(type(step) is not int for step in value):
            raise BadValue(index, f"isn't a list of numbers: {shown(value)}")
    return pa.array(["_".join(map(str, value)) for value in values], pa.string())


_DECODERS: dict[ChainTable, Callable[[Sequence[RawBlock], Rows], tuple[Rows, Columns]]] = {
    ChainTable.BLOCKS: block_columns,
    ChainTable.TRANSACTIONS: transaction_columns,
    ChainTable.LOGS: log_columns,
    ChainTable.RECEIPTS: receipt_columns,
    ChainTable.WITHDRAWALS: withdrawal_columns,
    ChainTable.TRACES: trace_columns,
}


def decode(raw: Sequence[RawBlock], dataset: ChainTable, chain_id: int) -> pa.RecordBatch:
    """The rows of one table. A field that can't be read raises ``BlockMalformed``."""
    table = TABLES[dataset]
    if not raw:
        return pa.RecordBatch.from_pylist([], schema=table.arrow)
    _must_have_parts(raw, dataset)
    blocks = Rows(raw, [[header_of_block(one)] for one in raw], "")
    rows, columns = _DECODERS[dataset](raw, blocks)
    columns |= _shared_columns(raw, blocks, rows, chain_id)
    columns[WIDE_VALUES] = rows.wide.as_column(len(rows))
    batch = pa.RecordBatch.from_arrays([columns[name] for name in table.arrow.names], schema=table.arrow)
    return _in_order(batch, table.sort_by)


def _shared_columns(raw: Sequence[RawBlock], blocks: Rows, rows: Rows, chain_id: int) -> Columns:
    """The columns that every table has."""
    hashes = blocks.column("hash", lambda values: unhex_fixed(values, 32))
    times = blocks.column("timestamp", microseconds)
    numbers = np.fromiter([one.number for one in raw], np.int64, len(raw))
    of_rows = rows.per_row(np.frombuffer(hashes, np.uint8).reshape(-1, 32))
    return {
        "chain_id": pa.array(np.full(len(rows), chain_id, np.int64)),
        "block_number": pa.array(rows.per_row(numbers)),
        "block_hash": cut(of_rows.tobytes(), 32),
        # A view, because the numbers are microseconds already.
        "timestamp": pa.array(rows.per_row(times)).view(INSTANT),
    }


def _must_have_parts(raw: Sequence[RawBlock], dataset: ChainTable) -> None:
    for one in raw:
        if dataset in _NEEDS_RECEIPTS and one.receipts is None:
            raise Invalid("ReceiptsMissing", f"{dataset} come from receipts, and block {one.number} has none")
        if dataset is ChainTable.TRACES and one.traces is None:
            raise Invalid("TracesMissing", f"block {one.number} was fetched without its traces")


def _in_order(batch: pa.RecordBatch, sort_by: tuple[str, ...]) -> pa.RecordBatch:
    """Sort rows. An endpoint's order is almost always right, and checking it is cheaper than sorting."""
    # ``lexsort`` takes the most significant key last.
    keys: list[npt.NDArray[Any]] = [batch.column(name).to_numpy() for name in reversed(sort_by)]
    rising = np.ones(max(len(batch) - 1, 0), np.bool_)
    for key in keys:
        rising = (key[:-1] < key[1:]) | ((key[:-1] == key[1:]) & rising)
    return batch if rising.all() else batch.take(pa.array(np.lexsort(keys)))
