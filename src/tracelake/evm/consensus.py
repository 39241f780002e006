"""Encodings that a chain hashes: headers, transactions, receipts and withdrawals of every fork (``forks``).

The input is JSON-RPC's, whose fields are hexadecimal text already. So RLP is put together as text, and turned
into bytes once per object, which keeps the proof of a block cheap. Foreign characters give no bytes
(``ValueError``), and so do hashes and addresses of a wrong length: a longer one could take over the beginning of
the number behind it, and the whole would still hash to the right value.

``HEAD_OF_LIST`` and ``HEAD_OF_BYTES`` give the RLP head for a length in bytes; a single byte below 0x80 is its own
encoding and has none. ``QUANTITY`` gives the whole encoding of an integer.
"""

from __future__ import annotations

from binascii import unhexlify
from collections.abc import Mapping
from typing import NamedTuple

from tracelake.evm.forks import LATER_FIELDS, JsonMapping
from tracelake.evm.hashing import BoundedCache, keccak256
from tracelake.evm.profiles.profile import ETHEREUM, TransactionType
from tracelake.evm.raw_block import UnknownTransactionType
from tracelake.evm.senders import SignedHash

# Every blob takes the same gas, which EIP-4844 fixes.
BLOB_GAS = 1 << 17
_TYPED = {"0x1": "01", "0x2": "02", "0x3": "03", "0x4": "04"}
_HASH, _ADDRESS = 66, 42  # with the prefix
_FIXED_HEADER_FIELDS = (
    *(
        (name, _HASH)
        for name in ("parentHash", "sha3Uncles", "stateRoot", "transactionsRoot", "receiptsRoot")
    ),
    *(("miner", _ADDRESS), ("logsBloom", 514)),
)
_FIXED_SEAL_FIELDS = (("mixHash", _HASH), ("nonce", 18))
HEAD_OF_BYTES: BoundedCache[int, str] = BoundedCache(lambda length: _head(0x80, length), 1 << 14)
HEAD_OF_LIST: BoundedCache[int, str] = BoundedCache(lambda length: _head(0xC0, length), 1 << 14)


def header_hash(block: JsonMapping) -> bytes:
    return keccak256(header_bytes(block))


def header_bytes(block: JsonMapping) -> bytes:
    _must_have_widths(block, _FIXED_SEAL_FIELDS)
    seal = f"a0{block['mixHash'][2:]}88{block['nonce'][2:]}"
    return unhexlify(listed(f"{header_start(block)}{seal}{header_end(block)}"))


def header_start(block: JsonMapping) -> str:
    """The encoding of a header's fields up to its seal, which not every chain has in Ethereum's form."""
    _must_have_widths(block, _FIXED_HEADER_FIELDS)
    return (
        f"a0{block['parentHash'][2:]}a0{block['sha3Uncles'][2:]}94{block['miner'][2:]}a0{block['stateRoot'][2:]}"
        f"a0{block['transactionsRoot'][2:]}a0{block['receiptsRoot'][2:]}b90100{block['logsBloom'][2:]}"
        f"{QUANTITY[block['difficulty']]}{QUANTITY[block['number']]}{QUANTITY[block['gasLimit']]}"
        f"{QUANTITY[block['gasUsed']]}{QUANTITY[block['timestamp']]}{data(block['extraData'])}"
    )


def header_end(block: JsonMapping) -> str:
    """The encoding of the fields that forks have appended behind the seal."""
    end = ""
    for name, is_quantity in LATER_FIELDS:
        # Forks only append fields: the first missing one ends the header.
        value = block.get(name)
        if value is None:
            break
        end += QUANTITY[value] if is_quantity else hashed(value)
    return end


def _must_have_widths(block: JsonMapping, widths: tuple[tuple[str, int], ...]) -> None:
    for name, length in widths:
        if len(block[name]) != length:
            raise ValueError(f"{name} has {len(block[name])} characters instead of {length}")


class TransactionParts(NamedTuple):
    """The encoding of a transaction in hexadecimal: the byte of its type, if it has one, its fields up to the
    signature, and the signature."""

    kind: str
    fields: str
    signature: str

    @property
    def encoded(self) -> bytes:
        """As it is hashed, and as it is in the trie."""
        return unhexlify(self.kind + listed(self.fields + self.signature))


def transaction_bytes(tx: JsonMapping) -> bytes:
    """A transaction as it is hashed and as it is in the trie: a typed one begins with its type."""
    return transaction_parts(tx).encoded


def transaction_parts(tx: JsonMapping) -> TransactionParts:
    kind, to = tx.get("type"), tx.get("to")
    recipient = "80" if to is None else addressed(to)
    call = f"{QUANTITY[tx['gas']]}{recipient}{QUANTITY[tx['value']]}{data(tx['input'])}"
    if kind == "0x2":
        fields = f"{_with_fees(tx)}{call}{_access_list(tx)}"
    elif kind is None or kind == "0x0":
        fields = f"{QUANTITY[tx['nonce']]}{QUANTITY[tx['gasPrice']]}{call}"
        return TransactionParts("", fields, f"{QUANTITY[tx['v']]}{word(tx['r'])}{word(tx['s'])}")
    elif kind == "0x1":
        start = f"{QUANTITY[tx['chainId']]}{QUANTITY[tx['nonce']]}{QUANTITY[tx['gasPrice']]}"
        fields = f"{start}{call}{_access_list(tx)}"
    elif kind == "0x3":
        blobs = QUANTITY[tx["maxFeePerBlobGas"]] + words(tx["blobVersionedHashes"])
        fields = f"{_with_fees(tx)}{call}{_access_list(tx)}{blobs}"
    elif kind == "0x4":
        authorizations = listed("".join([_authorization(one) for one in tx["authorizationList"]]))
        fields = f"{_with_fees(tx)}{call}{_access_list(tx)}{authorizations}"
    else:
        # Its fields aren't known here, so no hash of it can be computed.
        raise UnknownTransactionType(kind)
    return TransactionParts(_TYPED[kind], fields, _signature(tx))


def signed_hash(tx: JsonMapping, parts: TransactionParts) -> SignedHash:
    """What the sender signed, and the signature."""
    if parts.kind:
        given, more = tx.get("yParity"), ""
        parity = int(tx["v"] if given is None else given, 16)
    else:
        more, parity = _LEGACY_SIGNATURE[tx["v"]]
    digest = keccak256(unhexlify(parts.kind + listed(parts.fields + more)))
    return SignedHash(digest, unhexlify(tx["r"][2:].rjust(64, "0") + tx["s"][2:].rjust(64, "0")), parity)


def receipt_bytes(receipt: JsonMapping, types: Mapping[str, TransactionType] = ETHEREUM.types) -> bytes:
    """A receipt as it is in the trie. Before Byzantium it has the state's root in place of a status. ``types`` are
    those that the chain has besides Ethereum's."""
    kind, status = receipt.get("type"), receipt.get("status")
    prefix, tail = _TYPED.get(kind or "0x0", ""), ""
    if kind is not None and kind != "0x0" and not prefix:
        if (own := types.get(kind)) is None:
            raise UnknownTransactionType(kind)
        prefix = f"{int(kind, 16):02x}"
        tail = "" if own.receipt_tail is None else own.receipt_tail(receipt)
    outcome = hashed(receipt["root"]) if status is None else QUANTITY[status]
    logs = "".join([_log(log) for log in receipt["logs"]])
    gas, bloom = QUANTITY[receipt["cumulativeGasUsed"]], receipt["logsBloom"]
    payload = f"{outcome}{gas}b90100{bloom[2:]}{HEAD_OF_LIST[len(logs) // 2]}{logs}{tail}"
    return unhexlify(prefix + listed(payload))


def withdrawal_bytes(withdrawal: JsonMapping) -> bytes:
    return unhexlify(
        listed(
            f"{QUANTITY[withdrawal['index']]}{QUANTITY[withdrawal['validatorIndex']]}"
            f"{addressed(withdrawal['address'])}{QUANTITY[withdrawal['amount']]}"
        )
    )


def type_of(transaction_or_receipt: JsonMapping) -> str:
    """The type. Clients leave it out for legacy transactions, or did so before there were others."""
    kind: str | None = transaction_or_receipt.get("type")
    return "0x0" if kind is None else kind


def contract_address(sender: str, nonce: str) -> str:
    """The address of the contract that a transaction without a recipient creates."""
    return "0x" + keccak256(unhexlify(listed(f"94{sender[2:]}{QUANTITY[nonce]}")))[12:].hex()


def _with_fees(tx: JsonMapping) -> str:
    fees = QUANTITY[tx["maxPriorityFeePerGas"]] + QUANTITY[tx["maxFeePerGas"]]
    return f"{QUANTITY[tx['chainId']]}{QUANTITY[tx['nonce']]}{fees}"


def _signature(signed: JsonMapping) -> str:
    """The signature of a typed transaction or an authorization. Older clients call the parity ``v``."""
    parity = signed.get("yParity")
    return f"{QUANTITY[signed['v'] if parity is None else parity]}{word(signed['r'])}{word(signed['s'])}"


def _access_list(tx: JsonMapping) -> str:
    entries = tx.get("accessList")
    if not entries:
        return "c0"
    return listed(
        "".join([listed(f"94{entry['address'][2:]}{words(entry['storageKeys'])}") for entry in entries])
    )


def _authorization(entry: JsonMapping) -> str:
    account = f"94{entry['address'][2:]}{QUANTITY[entry['nonce']]}"
    return listed(f"{QUANTITY[entry['chainId']]}{account}{_signature(entry)}")


def _log(log: JsonMapping) -> str:
    # a0 is the RLP head of 32 bytes.
    topics = "".join(log["topics"]).replace("0x", "a0")
    if len(topics) != _HASH * len(log["topics"]):
        raise ValueError(f"{topics[:70]!r} aren't topics of 32 bytes")
    payload = f"94{log['address'][2:]}{HEAD_OF_LIST[len(topics) // 2]}{topics}{data(log['data'])}"
    return HEAD_OF_LIST[len(payload) // 2] + payload


def _head(base: int, length: int) -> str:
    if length < 56:
        return f"{base + length:02x}"
    size = f"{length:x}"
    size = "0" + size if len(size) % 2 else size
    return f"{base + 55 + len(size) // 2:02x}{size}"


def _quantity(value: str) -> str:
    if len(value) < 3 or value[:2] != "0x":
        raise ValueError(f"{value[:20]!r} isn't a number")
    # RLP has integers without leading zeros, and zero as the empty string.
    digits = value[2:].lstrip("0")
    if len(digits) % 2:
        digits = "0" + digits
    if len(digits) == 2 and digits < "80":
        return digits
    return HEAD_OF_BYTES[len(digits) // 2] + digits


# Gas, fees, nonces and chain ids repeat from block to block.
QUANTITY = BoundedCache(_quantity, 1 << 15)


def signed_chain(v: int) -> int | None:
    """The chain that a legacy signature is for: EIP-155 has 35 + 2 * chain + parity; before it, 27 + parity."""
    return (v - 35) // 2 if v >= 35 else None


def _legacy_signature(v: str) -> tuple[str, int]:
    """What a legacy transaction signs after its fields, and the parity; no parity is -1."""
    number = int(v, 16)
    chain = signed_chain(number)
    if chain is not None:
        return f"{QUANTITY[hex(chain)]}8080", (number - 35) % 2
    return "", number - 27 if number in (27, 28) else -1


# A chain has four of them.
_LEGACY_SIGNATURE = BoundedCache(_legacy_signature, 1 << 10)


def word(value: str) -> str:
    """Half of a signature: an integer that mostly takes all 32 bytes. It never repeats, so it isn't remembered."""
    if len(value) == 66 and value[2] != "0":
        return "a0" + value[2:]
    return _quantity(value)


def hashed(value: str) -> str:
    """Encode a value of 32 bytes."""
    if len(value) != _HASH:
        raise ValueError(f"{value[:70]!r} isn't 32 bytes")
    return "a0" + value[2:]


def addressed(value: str) -> str:
    if len(value) != _ADDRESS:
        raise ValueError(f"{value[:50]!r} isn't an address")
    return "94" + value[2:]


def data(value: str) -> str:
    length = len(value) // 2 - 1
    if length == 1 and value[2] < "8":
        return value[2:]
    return HEAD_OF_BYTES[length] + value[2:]


def listed(payload: str) -> str:
    """Encode a list whose items are encoded and joined already."""
    return HEAD_OF_LIST[len(payload) // 2] + payload


def words(values: list[str]) -> str:
    """Encode a list of values of 32 bytes. Only a prefix has an x, so each "0x" can become the head of its
    value."""
    joined = "".join(values)
    # Two values in one text would encode as two.
    if len(joined) != _HASH * len(values):
        raise ValueError(f"{joined[:70]!r} isn't a list of values of 32 bytes")
    return listed(joined.replace("0x", "a0"))
