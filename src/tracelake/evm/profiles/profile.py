"""``ChainProfile``: how the blocks of a chain differ from Ethereum's, and what of them can be proven.

Ethereum's own rules are in ``consensus`` and ``verify``; a profile has only the differences. A chain that has
none is a name and a sentence. A family of chains is one module of this package that declares its profiles,
and a line in ``registry``; its blocks in ``tests/unit/evm/recorded`` show that the declaration is right.

Objects are JSON-RPC's, as an endpoint sent them: a function of a profile may raise ``KeyError`` or ``ValueError``
for a field that is missing or wrong, which verification reports as a malformed block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from tracelake.evm.forks import JsonMapping

ZERO_ADDRESS = "0x" + "00" * 20
_NOTHING: Mapping[str, str] = {}


def _nothing_expected(tx: JsonMapping, receipt: JsonMapping | None) -> Mapping[str, str]:
    return _NOTHING


@dataclass(frozen=True, slots=True)
class TransactionType:
    """A transaction type that Ethereum doesn't have. It carries no signature in Ethereum's form.

    ``encode`` gives the bytes that are hashed; None if JSON-RPC doesn't show all of them. ``receipt_tail`` is
    the RLP, as text, that its receipts have behind the logs. ``expected`` gives the fields that no hash covers and
    that follow from others, with their values. ``optional`` are fields that such a transaction may lack.
    ``creates`` means that the address of a created contract follows from sender and nonce, ``free`` that its gas
    costs nothing."""

    name: str
    encode: Callable[[JsonMapping], bytes] | None = None
    receipt_tail: Callable[[JsonMapping], str] | None = None
    expected: Callable[[JsonMapping, JsonMapping | None], Mapping[str, str]] = _nothing_expected
    optional: frozenset[str] = frozenset()
    creates: bool = False
    free: bool = False


@dataclass(frozen=True, kw_only=True)
class ChainProfile:
    """``proves`` completes the sentence "``verify: full`` proves …". The other fields are differences:

    - ``unprovable``: why ``full`` isn't possible on this chain at all;
    - ``types``: transaction types of its own, by JSON-RPC's text for them;
    - ``header``: the bytes of a header, or None for a block that has Ethereum's header;
    - ``absent``: fields of Ethereum's header that this block's header doesn't have;
    - ``marks``: fields that only blocks of this chain have, to recognize it by;
    - ``outside_roots``: the places of transactions that are in the block, but in none of its roots and filters;
    - ``fields_outside_roots``: the values that fields of such transactions always have;
    - ``may_lack_receipts``: such transactions may have no receipt;
    - ``system_transactions``: legacy transactions without a signature are the chain's own, and ``system_sender``
      is the sender of all of them, if they have one in common;
    - ``own_fees``: what a transaction pays doesn't follow from its fields and the base fee;
    - ``withdrawals_root_is_state``: the header's withdrawalsRoot is a root of state, and there are no withdrawals;
    - ``log_indexes_restart``: an endpoint may number logs from 0 in each transaction, so we number them;
    - ``rewrite``: a transaction in Ethereum's form, where endpoints give it another one.
    """

    name: str
    about: str
    proves: str
    chain_ids: frozenset[int] = frozenset()
    unprovable: str | None = None
    types: Mapping[str, TransactionType] = field(default_factory=dict)
    header: Callable[[JsonMapping], bytes | None] | None = None
    absent: Callable[[JsonMapping], Collection[str]] | None = None
    marks: frozenset[str] = frozenset()
    outside_roots: Callable[[JsonMapping], Collection[int]] | None = None
    fields_outside_roots: Mapping[str, str] = field(default_factory=dict)
    may_lack_receipts: bool = False
    system_transactions: bool = False
    system_sender: str | None = None
    own_fees: bool = False
    withdrawals_root_is_state: bool = False
    log_indexes_restart: bool = False
    rewrite: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @property
    def proves_as_ethereum(self) -> bool:
        """Whether ``full`` leaves no more to the node than it does on Ethereum."""
        return not (self.types or self.outside_roots or self.own_fees or self.system_transactions)

    def places_outside_roots(self, block: JsonMapping) -> Collection[int]:
        return () if self.outside_roots is None else self.outside_roots(block)

    def may_lack(self, field_name: str, kind: str | None) -> bool:
        """Whether a transaction of this type may be without this field."""
        own = self.types.get(kind or "0x0")
        return own is not None and field_name in own.optional

    def is_system(self, tx: JsonMapping) -> bool:
        return self.system_transactions and is_unsigned(tx)


def rewritten(block: dict[str, Any], profile: ChainProfile) -> dict[str, Any]:
    """The block with its transactions in Ethereum's form."""
    if profile.rewrite is None:
        return block
    return {**block, "transactions": [profile.rewrite(tx) for tx in block["transactions"]]}


def is_unsigned(tx: JsonMapping) -> bool:
    """Whether a transaction has the form of a legacy one without a signature."""
    if (tx.get("type") or "0x0") != "0x0":
        return False
    return all(int(tx.get(part) or "0x0", 16) == 0 for part in ("r", "s"))


ETHEREUM = ChainProfile(
    name="ethereum",
    about="Ethereum, its test networks, and chains that follow its rules",
    proves="every column but those that are the node's word",
    chain_ids=frozenset({1, 11155111, 17000, 560048}),
)
