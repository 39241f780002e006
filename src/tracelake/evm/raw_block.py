"""A block as an endpoint answered it: parsed JSON, unchecked, with the name of who said it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Dataset(StrEnum):
    """The tables of a chain, under the names that the field has for them."""

    BLOCKS = "blocks"
    TRANSACTIONS = "transactions"
    LOGS = "logs"
    RECEIPTS = "receipts"
    WITHDRAWALS = "withdrawals"
    TRACES = "traces"


class Verify(StrEnum):
    """How much of a block is proven before it is used."""

    FULL = "full"
    BLOOM = "bloom"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class RawBlock:
    """``block`` is the answer to eth_getBlockByNumber with whole transactions, ``receipts`` to
    eth_getBlockReceipts in the order of the transactions, ``traces`` to trace_block; the latter two are None
    when they weren't asked for. ``endpoint`` is a name that is safe to print."""

    number: int
    block: dict[str, Any]
    receipts: list[dict[str, Any]] | None
    traces: list[dict[str, Any]] | None
    endpoint: str
