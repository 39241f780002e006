"""The proof that a block's contents are what its hash stands for: every root and every hash, computed anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tracelake.evm.consensus import (
    contract_address,
    header_hash,
    receipt_bytes,
    transaction_bytes,
    type_of,
    withdrawal_bytes,
)
from tracelake.evm.keccak import keccak256
from tracelake.evm.same_block import Contradiction, same_number, same_text
from tracelake.evm.trie import ordered_root

Json = dict[str, Any]

_BLOB_GAS = 1 << 17


def prove_block(block: Json, receipts: list[Json] | None) -> None:
    """``receipts`` are in the order of the transactions, as many as these."""
    _must_be("the header's hash", header_hash(block), block["hash"])
    transactions = block["transactions"]
    encoded = [transaction_bytes(tx) for tx in transactions]
    for place, (tx, content) in enumerate(zip(transactions, encoded, strict=True)):
        if "0x" + keccak256(content).hex() != tx["hash"]:
            _must_be(f"the hash of transaction {place}", keccak256(content), tx["hash"])
    _must_be("the transactions' root", ordered_root(encoded), block["transactionsRoot"])
    _prove_withdrawals(block)
    if receipts is None:
        return
    root = ordered_root([receipt_bytes(receipt) for receipt in receipts])
    _must_be("the receipts' root", root, block["receiptsRoot"])
    _check_derived(block, transactions, receipts)


def _must_be(what: str, computed: bytes, given: str) -> None:
    if not same_text(given, "0x" + computed.hex()):
        raise Contradiction(f"{what} is 0x{computed.hex()}, and {given} was given")


def _prove_withdrawals(block: Json) -> None:
    root, withdrawals = block.get("withdrawalsRoot"), block.get("withdrawals")
    if root is None:
        if withdrawals:
            raise Contradiction("there are withdrawals without a withdrawalsRoot")
        return
    computed = ordered_root([withdrawal_bytes(one) for one in block["withdrawals"]])
    _must_be("the withdrawals' root", computed, root)


def _check_derived(block: Json, transactions: Sequence[Json], receipts: Sequence[Json]) -> None:
    """What receipts and transactions say beyond their hashed bytes follows from these, and must agree."""
    base_fee, gas_before = int(block.get("baseFeePerGas") or "0x0", 16), 0
    for place, (tx, receipt) in enumerate(zip(transactions, receipts, strict=True)):
        if type_of(tx) != type_of(receipt):
            raise Contradiction(
                f"receipt {place} is of type {receipt.get('type')}, its transaction of {tx.get('type')}"
            )
        if not same_text(receipt["from"], tx["from"]):
            raise Contradiction(f"receipt {place} has another sender than its transaction")
        gas = int(receipt["cumulativeGasUsed"], 16)
        if int(receipt["gasUsed"], 16) != gas - gas_before:
            raise Contradiction(
                f"receipt {place} used {receipt['gasUsed']} gas, and {gas - gas_before:#x} were added up"
            )
        gas_before = gas
        _check_recipient(place, tx, receipt)
        _check_signature(place, tx)
        _check_prices(place, tx, receipt, base_fee)
    if gas_before != int(block["gasUsed"], 16):
        raise Contradiction(f"the block used {block['gasUsed']} gas, and its transactions {gas_before:#x}")


def _check_recipient(place: int, tx: Json, receipt: Json) -> None:
    to, made = tx.get("to"), receipt.get("contractAddress")
    given = receipt.get("to")
    if given != to and (given is None or to is None or not same_text(given, to)):
        raise Contradiction(f"receipt {place} has another recipient than its transaction")
    if made is None:
        return
    if to is not None:
        raise Contradiction(f"receipt {place} has a contractAddress, and its transaction a recipient")
    if not same_text(made, contract_address(tx["from"], tx["nonce"])):
        raise Contradiction(f"receipt {place} has a contractAddress that its sender can't have made")


def _check_signature(place: int, tx: Json) -> None:
    """``v`` and ``yParity`` say the same, and so do ``v`` and the chain of a legacy transaction."""
    v, parity, chain = tx.get("v"), tx.get("yParity"), tx.get("chainId")
    if v is None:
        return
    number = int(v, 16)
    if number >= 35:
        if chain is not None and int(chain, 16) != (number - 35) // 2:
            raise Contradiction(
                f"transaction {place} is of chain {int(chain, 16)}, and signed for {(number - 35) // 2}"
            )
        number = (number - 35) % 2
    elif number >= 27:
        number -= 27
    if parity is not None and int(parity, 16) != number:
        raise Contradiction(f"transaction {place} has the parity {parity}, and v is {v}")


def _check_prices(place: int, tx: Json, receipt: Json, base_fee: int) -> None:
    kind, effective = type_of(tx), receipt.get("effectiveGasPrice")
    if kind in ("0x0", "0x1"):
        price = int(tx["gasPrice"], 16)
    else:
        most = int(tx["maxFeePerGas"], 16)
        price = min(most, base_fee + int(tx["maxPriorityFeePerGas"], 16))
        given = tx.get("gasPrice")
        if given is not None and int(given, 16) not in (price, most):
            raise Contradiction(f"transaction {place} has the gasPrice {given}, and its fees give {price:#x}")
    if effective is not None and int(effective, 16) != price:
        raise Contradiction(
            f"receipt {place} has the effectiveGasPrice {effective}, and it follows {price:#x}"
        )
    if kind == "0x3" and (blob_gas := receipt.get("blobGasUsed")) is not None:
        expected = hex(_BLOB_GAS * len(tx["blobVersionedHashes"]))
        if not same_number(blob_gas, expected):
            raise Contradiction(
                f"receipt {place} has the blobGasUsed {blob_gas}, and its blobs take {expected}"
            )
