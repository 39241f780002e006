"""Differences of chain profiles that show in rows: transactions in Ethereum's form, and their receipts' places.

A transaction type without a signature has none in its row, whatever an endpoint fills the fields with, and what an
endpoint leaves out is filled in where it follows from the type: a table must not depend on the endpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tracelake.evm.consensus import contract_address
from tracelake.evm.profiles.profile import ChainProfile, TransactionType
from tracelake.evm.raw_block import BlockMalformed, RawBlock

_NOT_OF_OWN_TYPES = (
    *("v", "r", "s", "yParity", "maxFeePerGas", "maxPriorityFeePerGas", "maxFeePerBlobGas"),
    *("blobVersionedHashes", "accessList", "authorizationList"),
)


def transactions_of_block(raw: RawBlock) -> Any:
    """The block's transactions. Objects that aren't transactions are left to the decoder to report."""
    profile, transactions = raw.profile, raw.block.get("transactions")
    if not isinstance(transactions, list) or (profile.rewrite is None and not profile.types):
        return transactions
    try:
        return [_plain(tx, profile) for tx in transactions]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BlockMalformed(
            raw.number,
            raw.endpoint,
            "transactions",
            f"aren't those of chain profile {profile.name}: {error!r}",
        ) from None


def _plain(tx: dict[str, Any], profile: ChainProfile) -> dict[str, Any]:
    if profile.rewrite is not None:
        tx = profile.rewrite(tx)
    own = profile.types.get(tx.get("type") or "0x0")
    # A type that can't be encoded may have such fields: they are the node's word, as everything of it.
    if own is None or own.encode is None:
        return tx
    return {name: value for name, value in tx.items() if name not in _NOT_OF_OWN_TYPES}


def header_of_block(raw: RawBlock) -> dict[str, Any]:
    """The block without the header fields that it can't have."""
    absent = () if raw.profile.absent is None else raw.profile.absent(raw.block)
    return {**raw.block, **dict.fromkeys(absent)} if absent else raw.block


def receipts_of_block(raw: RawBlock) -> Any:
    """The block's receipts, with what follows from the type of a transaction where an endpoint leaves it out."""
    types, receipts = raw.profile.types, raw.receipts
    if not any(own.free or own.creates for own in types.values()) or not isinstance(receipts, list):
        return receipts
    transactions = raw.block.get("transactions")
    if not isinstance(transactions, list) or len(transactions) != len(receipts):
        return receipts
    return [_completed(tx, receipt, types) for tx, receipt in zip(transactions, receipts, strict=True)]


def _completed(tx: Any, receipt: Any, types: Mapping[str, TransactionType]) -> Any:
    if not isinstance(tx, dict) or not isinstance(receipt, dict) or not isinstance(tx.get("type"), str):
        return receipt
    own = types.get(tx["type"])
    if own is None:
        return receipt
    filled = dict(receipt)
    if own.free and receipt.get("effectiveGasPrice") is None:
        filled["effectiveGasPrice"] = "0x0"
    if own.creates and tx.get("to") is None and receipt.get("contractAddress") is None:
        filled["contractAddress"] = contract_address(tx["from"], tx["nonce"])
    return filled


def places_of_receipts(raw: Sequence[RawBlock]) -> list[int | None]:
    """For each transaction of all blocks, the place of its receipt among all receipts; None if it has none."""
    places: list[int | None] = []
    before = 0
    for one in raw:
        transactions, receipts = one.block["transactions"], one.receipts or []
        if len(transactions) == len(receipts):
            places += range(before, before + len(receipts))
        else:
            places += _sparse(one, transactions, receipts, before)
        before += len(receipts)
    return places


def _sparse(
    raw: RawBlock, transactions: Sequence[Any], receipts: Sequence[Any], before: int
) -> list[int | None]:
    profile = raw.profile
    try:
        may_lack = set(profile.places_outside_roots(raw.block)) if profile.may_lack_receipts else set()
        given = {receipt["transactionHash"]: place for place, receipt in enumerate(receipts, before)}
        places = [given.get(tx["hash"]) for tx in transactions]
    except (KeyError, TypeError, AttributeError, ValueError):
        may_lack, places = set(), [None]
    lacking = {place for place, found in enumerate(places) if found is None}
    if len(places) - len(lacking) != len(receipts) or not lacking <= may_lack:
        raise BlockMalformed(
            raw.number, raw.endpoint, "receipts", f"are {len(receipts)} for {len(transactions)} transactions"
        )
    return places
