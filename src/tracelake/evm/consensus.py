"""The bytes that a chain hashes: headers, transactions, receipts and withdrawals of every fork up to Prague.

The input is JSON-RPC's, whose fields are hexadecimal text already. So everything is put together as text, and
turned into bytes once per object: on the way of every block, this is what keeps proving it cheap. Text of a
wrong length or with foreign characters gives bytes that hash to something else, or none at all
(``ValueError``).
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Mapping
from typing import Any

from tracelake.evm.block_errors import UnknownTransactionType
from tracelake.evm.hex_rlp import HEAD_OF_LIST, QUANTITY, data, listed, word, words
from tracelake.evm.keccak import keccak256

Json = Mapping[str, Any]

_TYPED = {"0x1": "01", "0x2": "02", "0x3": "03", "0x4": "04"}
_LATER_HEADER_FIELDS = (  # in the order in which the forks appended them
    ("baseFeePerGas", True),
    ("withdrawalsRoot", False),
    ("blobGasUsed", True),
    ("excessBlobGas", True),
    ("parentBeaconBlockRoot", False),
    ("requestsHash", False),
)


def header_hash(block: Json) -> bytes:
    return keccak256(header_bytes(block))


def header_bytes(block: Json) -> bytes:
    payload = (
        f"a0{block['parentHash'][2:]}a0{block['sha3Uncles'][2:]}94{block['miner'][2:]}a0{block['stateRoot'][2:]}"
        f"a0{block['transactionsRoot'][2:]}a0{block['receiptsRoot'][2:]}b90100{block['logsBloom'][2:]}"
        f"{QUANTITY[block['difficulty']]}{QUANTITY[block['number']]}{QUANTITY[block['gasLimit']]}"
        f"{QUANTITY[block['gasUsed']]}{QUANTITY[block['timestamp']]}{data(block['extraData'])}"
        f"a0{block['mixHash'][2:]}88{block['nonce'][2:]}"
    )
    for name, is_quantity in _LATER_HEADER_FIELDS:
        value = block.get(name)
        if value is None:
            break
        payload += QUANTITY[value] if is_quantity else f"a0{value[2:]}"
    return unhexlify(listed(payload))


def transaction_bytes(tx: Json) -> bytes:
    """As it is hashed, and as it stands in the trie: a typed transaction begins with its type."""
    kind, to = tx.get("type"), tx.get("to")
    recipient = "80" if to is None else "94" + to[2:]
    call = f"{QUANTITY[tx['gas']]}{recipient}{QUANTITY[tx['value']]}{data(tx['input'])}"
    if kind == "0x2":
        payload = f"{_with_fees(tx)}{call}{_access_list(tx)}{_signature(tx)}"
    elif kind is None or kind == "0x0":
        price, signature = QUANTITY[tx["gasPrice"]], f"{QUANTITY[tx['v']]}{word(tx['r'])}{word(tx['s'])}"
        return unhexlify(listed(f"{QUANTITY[tx['nonce']]}{price}{call}{signature}"))
    elif kind == "0x1":
        start = f"{QUANTITY[tx['chainId']]}{QUANTITY[tx['nonce']]}{QUANTITY[tx['gasPrice']]}"
        payload = f"{start}{call}{_access_list(tx)}{_signature(tx)}"
    elif kind == "0x3":
        blobs = QUANTITY[tx["maxFeePerBlobGas"]] + words(tx["blobVersionedHashes"])
        payload = f"{_with_fees(tx)}{call}{_access_list(tx)}{blobs}{_signature(tx)}"
    elif kind == "0x4":
        authorizations = listed("".join([_authorization(one) for one in tx["authorizationList"]]))
        payload = f"{_with_fees(tx)}{call}{_access_list(tx)}{authorizations}{_signature(tx)}"
    else:
        raise UnknownTransactionType(kind)
    return unhexlify(_TYPED[kind] + HEAD_OF_LIST[len(payload) // 2] + payload)


def receipt_bytes(receipt: Json) -> bytes:
    """As it stands in the trie. Before Byzantium a receipt has the state's root in the place of a status."""
    kind, status = receipt.get("type"), receipt.get("status")
    if kind is not None and kind != "0x0" and kind not in _TYPED:
        raise UnknownTransactionType(kind)
    outcome = f"a0{receipt['root'][2:]}" if status is None else QUANTITY[status]
    logs = "".join([_log(log) for log in receipt["logs"]])
    gas, bloom = QUANTITY[receipt["cumulativeGasUsed"]], receipt["logsBloom"]
    payload = f"{outcome}{gas}b90100{bloom[2:]}{HEAD_OF_LIST[len(logs) // 2]}{logs}"
    return unhexlify(_TYPED.get(kind or "0x0", "") + listed(payload))


def withdrawal_bytes(withdrawal: Json) -> bytes:
    return unhexlify(
        listed(
            f"{QUANTITY[withdrawal['index']]}{QUANTITY[withdrawal['validatorIndex']]}"
            f"94{withdrawal['address'][2:]}{QUANTITY[withdrawal['amount']]}"
        )
    )


def type_of(transaction_or_receipt: Json) -> str:
    """Clients leave the type of legacy transactions out, or did so before there were others."""
    kind: str | None = transaction_or_receipt.get("type")
    return "0x0" if kind is None else kind


def contract_address(sender: str, nonce: str) -> str:
    """Where a transaction without a recipient puts its contract."""
    return "0x" + keccak256(unhexlify(listed(f"94{sender[2:]}{QUANTITY[nonce]}")))[12:].hex()


def _with_fees(tx: Json) -> str:
    fees = QUANTITY[tx["maxPriorityFeePerGas"]] + QUANTITY[tx["maxFeePerGas"]]
    return f"{QUANTITY[tx['chainId']]}{QUANTITY[tx['nonce']]}{fees}"


def _signature(signed: Json) -> str:
    """Of a typed transaction or an authorization; ``v`` is what older clients call the parity."""
    parity = signed.get("yParity")
    return f"{QUANTITY[signed['v'] if parity is None else parity]}{word(signed['r'])}{word(signed['s'])}"


def _access_list(tx: Json) -> str:
    entries = tx.get("accessList")
    if not entries:
        return "c0"
    return listed(
        "".join([listed(f"94{entry['address'][2:]}{words(entry['storageKeys'])}") for entry in entries])
    )


def _authorization(entry: Json) -> str:
    account = f"94{entry['address'][2:]}{QUANTITY[entry['nonce']]}"
    return listed(f"{QUANTITY[entry['chainId']]}{account}{_signature(entry)}")


def _log(log: Json) -> str:
    topics = "".join(log["topics"]).replace("0x", "a0")
    payload = f"94{log['address'][2:]}{HEAD_OF_LIST[len(topics) // 2]}{topics}{data(log['data'])}"
    return HEAD_OF_LIST[len(payload) // 2] + payload
