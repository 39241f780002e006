"""The OP stack: deposits from layer 1 are transactions of type 0x7e, without a signature.

A deposit's hash covers its sender, so the sender is proven too. Its nonce is in its receipt's encoding since the
Canyon upgrade, together with ``depositReceiptVersion``; before, receipts were hashed without it. Since Isthmus the
header's ``withdrawalsRoot`` is the storage root of a contract, and there are no withdrawals.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Mapping

from tracelake.evm.consensus import QUANTITY, addressed, data, hashed, listed
from tracelake.evm.forks import JsonMapping
from tracelake.evm.profiles.profile import ChainProfile, TransactionType

_PROVES = "the same as on Ethereum, deposits with their senders included, and with their nonces since Canyon"


def _deposit(tx: JsonMapping) -> bytes:
    to = tx.get("to")
    recipient = "80" if to is None else addressed(to)
    # Endpoints leave out what is nothing: a deposit that mints no ether, and that isn't the system's.
    amounts = f"{QUANTITY[tx.get('mint') or '0x0']}{QUANTITY[tx['value']]}{QUANTITY[tx['gas']]}"
    is_system = "01" if tx.get("isSystemTx") else "80"
    payload = (
        f"{hashed(tx['sourceHash'])}{addressed(tx['from'])}{recipient}{amounts}{is_system}{data(tx['input'])}"
    )
    return unhexlify("7e" + listed(payload))


def _receipt_tail(receipt: JsonMapping) -> str:
    version = receipt.get("depositReceiptVersion")
    if version is None:
        return ""
    return QUANTITY[receipt["depositNonce"]] + QUANTITY[version]


def _expected(tx: JsonMapping, receipt: JsonMapping | None) -> Mapping[str, str]:
    # An endpoint may leave out that it costs nothing.
    price = {} if tx.get("gasPrice") is None else {"gasPrice": "0x0"}
    if receipt is None or receipt.get("depositReceiptVersion") is None:
        return price
    return price | {"nonce": receipt["depositNonce"]}


_TYPES = {
    "0x7e": TransactionType(
        "deposit",
        encode=_deposit,
        receipt_tail=_receipt_tail,
        expected=_expected,
        creates=True,
        free=True,
    )
}

OPTIMISM = ChainProfile(
    name="optimism",
    about="OP Mainnet and every other chain of the OP stack: deposits (type 0x7e)",
    proves=f"{_PROVES}. The senders of OP Mainnet's deposits from before Bedrock are the node's word",
    chain_ids=frozenset({10, 11155420, 130, 480, 1868, 34443, 57073, 7777777}),
    types=_TYPES,
    system_transactions=True,
    withdrawals_root_is_state=True,
)

BASE = ChainProfile(
    name="base",
    about="Base: the OP stack",
    proves=_PROVES,
    chain_ids=frozenset({8453, 84532}),
    types=_TYPES,
    withdrawals_root_is_state=True,
)
