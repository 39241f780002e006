"""Proofs of what only some chain profiles have: transaction types of their own, and transactions outside of the
roots.

A type's encoding covers some of its fields, and others follow from these: both are checked, so that an endpoint
can't make anything up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tracelake.evm.consensus import type_of
from tracelake.evm.forks import Contradiction
from tracelake.evm.profiles.profile import ChainProfile, TransactionType
from tracelake.evm.profiles.registry import BLOOM_WORKS
from tracelake.evm.raw_block import same_number, same_text

_JsonObject = dict[str, Any]
_LONGEST_NUMBER = 20  # of a quantity in JSON, where an address has 42 digits


class CannotProve(Exception):
    """The profile can't prove the block. The text is a clause that follows the block and the endpoint."""


def own_bytes(tx: _JsonObject, own: TransactionType) -> bytes:
    if own.encode is None:
        raise CannotProve(
            f"transactions of type {tx['type']} ({own.name}) can't be proven, since JSON-RPC doesn't show all that "
            f"their hash covers; {BLOOM_WORKS}"
        )
    return own.encode(tx)


def within_roots(
    transactions: list[_JsonObject],
    receipts: list[_JsonObject] | None,
    outside: Collection[int],
    profile: ChainProfile,
) -> tuple[list[_JsonObject], list[_JsonObject] | None]:
    """The transactions that roots cover, and their receipts. The fields of the others are checked here."""
    for place in outside:
        _check_fields(place, transactions[place], profile.fields_outside_roots)
    others = {transactions[place]["hash"] for place in outside}
    within = [tx for tx in transactions if tx["hash"] not in others]
    if receipts is None:
        return within, None
    return within, [receipt for receipt in receipts if receipt["transactionHash"] not in others]


def check_own_fields(
    transactions: Sequence[_JsonObject], receipts: Sequence[_JsonObject] | None, profile: ChainProfile
) -> None:
    for place, tx in enumerate(transactions):
        if (own := profile.types.get(type_of(tx))) is not None:
            receipt = None if receipts is None else receipts[place]
            _check_fields(place, tx, own.expected(tx, receipt))


def check_free(place: int, receipt: _JsonObject, own: TransactionType) -> None:
    price = receipt.get("effectiveGasPrice")
    if own.free and price is not None and int(price, 16):
        raise Contradiction(f"receipt {place} has the effectiveGasPrice {price}, and its type is free")


def _check_fields(place: int, tx: _JsonObject, expected: Mapping[str, str]) -> None:
    for name, value in expected.items():
        given = tx.get(name)
        # Bytes and addresses are as long as their value, and numbers aren't: only those may be padded.
        same = given is not None and (
            same_number(given, value)
            if len(value) <= _LONGEST_NUMBER and value != "0x"
            else same_text(given, value)
        )
        if not same:
            raise Contradiction(f"transaction {place} has the {name} {given}, and it follows {value}")
