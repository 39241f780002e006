"""Arbitrum's Nitro: messages from layer 1, retries and the chain's own bookkeeping are types 0x64 to 0x6a.

None of them has a signature; the hash of each covers its sender, but for the chain's own (0x6a), which always has
the same one. Transactions from before Nitro (0x78, on Arbitrum One up to block 22,207,816) keep the hash that they
had then, which nothing in them gives. Tips aren't paid, so the price is the base fee whatever was offered, and it
depends on the version of ArbOS: it is the node's word.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Mapping

from tracelake.evm.consensus import QUANTITY, addressed, data, hashed, listed
from tracelake.evm.forks import JsonMapping
from tracelake.evm.profiles.profile import ChainProfile, TransactionType

_SYSTEM = "0x00000000000000000000000000000000000a4b05"
_RETRYABLES = "0x000000000000000000000000000000000000006e"
_SUBMIT = "c9f95d32"


def _address(value: str | None) -> str:
    return "80" if value is None else addressed(value)


def _call(tx: JsonMapping) -> str:
    price = QUANTITY[tx["gasPrice"]] + QUANTITY[tx["gas"]]
    return f"{price}{_address(tx.get('to'))}{QUANTITY[tx['value']]}{data(tx['input'])}"


def _deposit(tx: JsonMapping) -> bytes:
    message = f"{QUANTITY[tx['chainId']]}{hashed(tx['requestId'])}"
    transfer = f"{addressed(tx['from'])}{addressed(tx['to'])}{QUANTITY[tx['value']]}"
    return unhexlify("64" + listed(message + transfer))


def _unsigned(tx: JsonMapping) -> bytes:
    sender = f"{QUANTITY[tx['chainId']]}{addressed(tx['from'])}{QUANTITY[tx['nonce']]}"
    return unhexlify("65" + listed(sender + _call(tx)))


def _contract(tx: JsonMapping) -> bytes:
    message = f"{QUANTITY[tx['chainId']]}{hashed(tx['requestId'])}{addressed(tx['from'])}"
    return unhexlify("66" + listed(message + _call(tx)))


def _retry(tx: JsonMapping) -> bytes:
    sender = f"{QUANTITY[tx['chainId']]}{QUANTITY[tx['nonce']]}{addressed(tx['from'])}"
    ticket = f"{hashed(tx['ticketId'])}{addressed(tx['refundTo'])}"
    refunds = QUANTITY[tx["maxRefund"]] + QUANTITY[tx["submissionFeeRefund"]]
    return unhexlify("68" + listed(f"{sender}{_call(tx)}{ticket}{refunds}"))


def _submit_retryable(tx: JsonMapping) -> bytes:
    request = f"{QUANTITY[tx['chainId']]}{hashed(tx['requestId'])}"
    message = f"{request}{addressed(tx['from'])}{QUANTITY[tx['l1BaseFee']]}"
    paid = f"{QUANTITY[tx['depositValue']]}{QUANTITY[tx['gasPrice']]}{QUANTITY[tx['gas']]}"
    retry = f"{_address(tx.get('retryTo'))}{QUANTITY[tx['retryValue']]}"
    refunds = f"{addressed(tx['beneficiary'])}{QUANTITY[tx['maxSubmissionFee']]}{addressed(tx['refundTo'])}"
    return unhexlify("69" + listed(f"{message}{paid}{retry}{refunds}{data(tx['retryData'])}"))


def _internal(tx: JsonMapping) -> bytes:
    return unhexlify("6a" + listed(QUANTITY[tx["chainId"]] + data(tx["input"])))


def _of_deposit(tx: JsonMapping, receipt: JsonMapping | None) -> Mapping[str, str]:
    return {"nonce": "0x0", "gas": "0x0", "gasPrice": "0x0", "input": "0x"}


def _of_contract(tx: JsonMapping, receipt: JsonMapping | None) -> Mapping[str, str]:
    return {"nonce": "0x0"}


def _of_submit_retryable(tx: JsonMapping, receipt: JsonMapping | None) -> Mapping[str, str]:
    """Its call data is the call that would submit it, put together from its fields."""
    amounts = "".join(
        [
            tx[name][2:].rjust(64, "0")
            for name in ("l1BaseFee", "depositValue", "retryValue", "gasPrice", "gas", "maxSubmissionFee")
        ]
    )
    addresses = "".join(
        [(tx.get(name) or "0x")[2:].rjust(64, "0") for name in ("refundTo", "beneficiary", "retryTo")]
    )
    content = tx["retryData"][2:]
    # The content comes after ten words of arguments and the word that says so.
    tail = f"{11 * 32:064x}{len(content) // 2:064x}{content}{'0' * (-len(content) % 64)}"
    call = f"0x{_SUBMIT}{tx['requestId'][2:]}{amounts}{addresses}{tail}"
    return {"nonce": "0x0", "value": "0x0", "to": _RETRYABLES, "input": call}


def _of_internal(tx: JsonMapping, receipt: JsonMapping | None) -> Mapping[str, str]:
    return {
        "from": _SYSTEM,
        "to": _SYSTEM,
        "nonce": "0x0",
        "gas": "0x0",
        "gasPrice": "0x0",
        "value": "0x0",
    }


ARBITRUM = ChainProfile(
    name="arbitrum",
    about="Arbitrum One, Nova and other chains of Nitro: types 0x64 to 0x6a, without signatures; tips aren't paid",
    proves="the same as on Ethereum since Nitro, senders of all types included; what was paid per gas, and the "
    "addresses of contracts created by types 0x64 to 0x6a, are the node's word",
    chain_ids=frozenset({42161, 42170, 421614}),
    marks=frozenset({"sendRoot", "sendCount"}),
    types={
        "0x64": TransactionType("deposit", encode=_deposit, expected=_of_deposit),
        "0x65": TransactionType("unsigned", encode=_unsigned),
        "0x66": TransactionType("contract", encode=_contract, expected=_of_contract),
        "0x68": TransactionType("retry", encode=_retry),
        "0x69": TransactionType("submit retryable", encode=_submit_retryable, expected=_of_submit_retryable),
        "0x6a": TransactionType("internal", encode=_internal, expected=_of_internal),
        "0x78": TransactionType("from before Nitro"),
    },
    own_fees=True,
)
