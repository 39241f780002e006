"""No field of any object can be altered, left out or invented under ``verify: full`` without being refused, but for
those that become columns of the class "node's word": on blocks of every fork and with every transaction type.

Each lie is told one at a time to a block that verifies. Either the block is refused, or every table is the same
but for columns of that class; and each of those can indeed be changed, or it would be in another class.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pyarrow as pa
import pytest

from tests.support.recorded_blocks import RECORDED, SYNTHETIC, KnownBlock
from tracelake.evm.columns import Proof, arrow_fields
from tracelake.evm.decode import decode
from tracelake.evm.forks import Fork
from tracelake.evm.raw_block import BlockMalformed, BlockMismatch, ChainTable, Unprovable, Verify
from tracelake.evm.schemas import TABLES
from tracelake.evm.verify import check_block

Json = dict[str, Any]
Tables = dict[ChainTable, pa.RecordBatch]
BLOCKS = [*RECORDED, *SYNTHETIC]
REFUSED = (BlockMismatch, BlockMalformed, Unprovable)
GONE = object()
NODES_WORD = {
    (table, field.name)
    for table, schema in TABLES.items()
    if table is not ChainTable.TRACES
    for column in schema.columns
    if column.proof is Proof.NODE
    for field in arrow_fields(column)
}
# What a node could invent for an object that doesn't have it: a value that looks right for each field.
WORD, ADDRESS = "0x" + "ab" * 32, "0x" + "cd" * 20
INVENTED: dict[str, Json] = {
    "block": {
        **dict.fromkeys(
            ("withdrawalsRoot", "parentBeaconBlockRoot", "requestsHash", "blockAccessListHash", "mixHash"),
            WORD,
        ),
        **dict.fromkeys(("baseFeePerGas", "blobGasUsed", "excessBlobGas", "slotNumber"), "0x7"),
        "withdrawals": [{"index": "0x1", "validatorIndex": "0x2", "address": ADDRESS, "amount": "0x3"}],
        "uncles": [WORD],
        "size": "0x400",
        "totalDifficulty": hex(2**150),
    },
    "transaction": {
        **dict.fromkeys(("maxPriorityFeePerGas", "maxFeePerGas", "maxFeePerBlobGas", "gasPrice"), "0x9"),
        "blobVersionedHashes": [WORD],
        "accessList": [{"address": ADDRESS, "storageKeys": [WORD]}],
        "authorizationList": [
            {"chainId": "0x1", "address": ADDRESS, "nonce": "0x1", "yParity": "0x0", "r": WORD, "s": WORD}
        ],
        "chainId": "0x5",
        "yParity": "0x1",
        "to": ADDRESS,
    },
    "receipt": {
        **dict.fromkeys(("blobGasUsed", "blobGasPrice", "effectiveGasPrice"), "0x9"),
        "contractAddress": ADDRESS,
        "to": ADDRESS,
        "root": WORD,
        "status": "0x1",
        "type": "0x2",
    },
    "log": {"removed": True},
}


def objects(known: KnownBlock) -> Iterator[tuple[str, Json]]:
    """The objects of a block, by kind; of many transactions one of each form, with its receipt and two logs."""
    raw, seen = known.raw, set()
    yield "block", raw.block
    for entry in (raw.block.get("withdrawals") or [])[:1]:
        yield "withdrawal", entry
    for place, tx in enumerate(raw.block["transactions"]):
        receipt = raw.receipts[place] if raw.receipts else {}
        form = (tx.get("type"), tx["to"] is None, bool(receipt.get("logs")), receipt.get("status"))
        if form in seen:
            continue
        seen.add(form)
        yield "transaction", tx
        for name in ("accessList", "authorizationList"):
            yield from (("entry", entry) for entry in (tx.get(name) or [])[:1])
        if receipt:
            yield "receipt", receipt
            yield from (("log", log) for log in receipt["logs"][:2])


def lies(kind: str, item: Json) -> Iterator[tuple[str, Any]]:
    """Every field, altered in several ways; and every field of its kind that it doesn't have."""
    for key, value in list(item.items()):
        if key in ("transactions", "logs"):
            continue
        yield key, GONE
        yield key, None
        for other in altered(value):
            if other != value:
                yield key, other
    for key, invention in INVENTED.get(kind, {}).items():
        if item.get(key) != invention:
            yield key, invention


def altered(value: Any) -> Iterator[Any]:
    match value:
        case str() if value.startswith("0x") and len(value) > 2:
            digit = "1" if value[-1] != "1" else "2"
            yield value[:-1] + digit
            # No number has more than 16 digits here that isn't a hash, an address or an amount.
            yield "0x0" if len(value) < 20 else "0x" + "00" * ((len(value) - 2) // 2)
        case str():
            yield "0x00"
        case []:
            yield [WORD]
        case [first, *rest]:
            yield rest
            yield [first, *value]
            if isinstance(first, str):
                yield [WORD, *rest]


def decoded(known: KnownBlock) -> Tables:
    wanted = [ChainTable.BLOCKS, ChainTable.TRANSACTIONS, ChainTable.WITHDRAWALS]
    if known.raw.receipts is not None:
        wanted += [ChainTable.LOGS, ChainTable.RECEIPTS]
    return {table: decode([known.raw], table, known.chain_id) for table in wanted}


def changed_columns(known: KnownBlock, honest: Tables) -> set[tuple[ChainTable, str]]:
    """The columns that differ from those of the honest block; none if the block is refused. Each table is decoded
    by itself, as by a job that stores no other."""
    changed: set[tuple[ChainTable, str]] = set()
    try:
        check_block(known.raw, Verify.FULL, known.chain_id)
    except REFUSED:
        return changed
    for table, rows in honest.items():
        try:
            after = decode([known.raw], table, known.chain_id)
        except REFUSED:
            continue
        changed |= {
            (table, name) for name in rows.schema.names if not rows.column(name).equals(after.column(name))
        }
    return changed


@cache
def told(name: str) -> tuple[tuple[str, frozenset[tuple[ChainTable, str]]], ...]:
    """The lies about the block of this name, each with the columns that it changes; told once for all tests."""
    [known] = [each for each in BLOCKS if each.name == name]
    return tuple(telling(known))


def telling(known: KnownBlock) -> Iterator[tuple[str, frozenset[tuple[ChainTable, str]]]]:
    honest = decoded(known)
    for kind, item in objects(known):
        for key, lie in lies(kind, item):
            before = item.get(key, GONE)
            if lie is GONE:
                item.pop(key, None)
            else:
                item[key] = lie
            try:
                yield (
                    f"{kind}.{key} = {'gone' if lie is GONE else lie}",
                    frozenset(changed_columns(known, honest)),
                )
            finally:
                if before is GONE:
                    item.pop(key, None)
                else:
                    item[key] = before


@pytest.mark.parametrize("known", BLOCKS, ids=str)
def test_no_lie_changes_a_column_that_is_proven_or_derived(known: KnownBlock) -> None:
    wrong = [(lie, columns - NODES_WORD) for lie, columns in told(known.name) if columns - NODES_WORD]
    assert wrong == []
    # The lies were undone.
    check_block(known.raw, Verify.FULL, known.chain_id)


def test_each_column_that_is_the_nodes_word_can_be_changed_by_it() -> None:
    names = ("test chain 25", "Ethereum 1000000", "synthetic Osaka")
    changed = {column for name in names for _, columns in told(name) for column in columns}
    assert changed == NODES_WORD


def test_the_blocks_are_of_every_fork_and_every_type() -> None:
    assert {known.fork for known in BLOCKS} == set(Fork)
    assert {known.fork for known in RECORDED} == set(Fork) - {Fork.BYZANTIUM, Fork.AMSTERDAM}
    for blocks in (RECORDED, SYNTHETIC):
        kinds = {tx.get("type") for known in blocks for tx in known.raw.block["transactions"]}
        assert kinds >= {"0x0", "0x1", "0x2", "0x3", "0x4"}
