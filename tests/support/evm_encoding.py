"""Reference encodings of a chain's objects, to check ours: headers, transactions, receipts, tries and bloom
filters.

RLP is the ``rlp`` library's, and everything above it follows the specifications without any shortcut: fields
are parsed to numbers and bytes first, a trie is split key by key, and a bloom filter is set bit by bit. No
encoder of ``tracelake.evm`` is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import rlp
from tiny_keccak import keccak256

Json = Mapping[str, Any]
_HEX = "0123456789abcdef"
_BLOOM_BITS = 2048
_HEADER = (
    *("parentHash", "sha3Uncles", "miner", "stateRoot", "transactionsRoot", "receiptsRoot", "logsBloom"),
    *("difficulty", "number", "gasLimit", "gasUsed", "timestamp", "extraData", "mixHash", "nonce"),
    *(
        "baseFeePerGas",
        "withdrawalsRoot",
        "blobGasUsed",
        "excessBlobGas",
        "parentBeaconBlockRoot",
        "requestsHash",
        "blockAccessListHash",
        "slotNumber",
    ),
)
_NUMBERS = frozenset(
    {
        *("difficulty", "number", "gasLimit", "gasUsed", "timestamp"),
        *("baseFeePerGas", "blobGasUsed", "excessBlobGas", "slotNumber"),
    }
)


def encode(item: Any) -> bytes:
    return bytes(rlp.encode(item))


def header(block: Json) -> bytes:
    """The fields of all forks up to Amsterdam; a block without the later ones is of an earlier fork."""
    given = [name for name in _HEADER if block.get(name) is not None]
    return encode([_number(block[name]) if name in _NUMBERS else _bytes(block[name]) for name in given])


def transaction(tx: Json) -> bytes:
    kind, fields = _unsigned(tx)
    if kind == 0:
        return encode([*fields, _number(tx["v"]), *_r_and_s(tx)])
    return bytes([kind]) + encode([*fields, _number(tx["yParity"]), *_r_and_s(tx)])


def signed_digest(tx: Json, chain_id: int | None) -> bytes:
    """What the sender signs: a legacy transaction with the chain, or without it before EIP-155."""
    kind, fields = _unsigned(tx)
    if kind == 0:
        return keccak256(encode(fields if chain_id is None else [*fields, chain_id, 0, 0]))
    return keccak256(bytes([kind]) + encode(fields))


def _unsigned(tx: Json) -> tuple[int, list[Any]]:
    kind = _number(tx.get("type") or "0x0")
    to = b"" if tx["to"] is None else _bytes(tx["to"])
    call = [_number(tx["gas"]), to, _number(tx["value"]), _bytes(tx["input"])]
    nonce = _number(tx["nonce"])
    if kind == 0:
        return kind, [nonce, _number(tx["gasPrice"]), *call]
    fees = ("gasPrice",) if kind == 1 else ("maxPriorityFeePerGas", "maxFeePerGas")
    access = [[_bytes(each["address"]), list(map(_bytes, each["storageKeys"]))] for each in tx["accessList"]]
    fields: list[Any] = [_number(tx["chainId"]), nonce, *(_number(tx[fee]) for fee in fees), *call, access]
    if kind == 3:
        fields += [_number(tx["maxFeePerBlobGas"]), list(map(_bytes, tx["blobVersionedHashes"]))]
    if kind == 4:
        fields.append([_authorization(each) for each in tx["authorizationList"]])
    return kind, fields


def receipt(given: Json) -> bytes:
    kind = _number(given.get("type") or "0x0")
    status = given.get("status")
    logs = [
        [_bytes(log["address"]), list(map(_bytes, log["topics"])), _bytes(log["data"])]
        for log in given["logs"]
    ]
    fields = [
        _bytes(given["root"]) if status is None else _number(status),
        _number(given["cumulativeGasUsed"]),
        _bytes(given["logsBloom"]),
        logs,
    ]
    return (bytes([kind]) if kind else b"") + encode(fields)


def withdrawal(given: Json) -> bytes:
    numbers = (_number(given["index"]), _number(given["validatorIndex"]))
    return encode([*numbers, _bytes(given["address"]), _number(given["amount"])])


def created_address(sender: str, nonce: str) -> str:
    """The address of the contract that a sender creates with this nonce."""
    return "0x" + keccak256(encode([_bytes(sender), _number(nonce)]))[12:].hex()


def trie_root(values: Sequence[bytes]) -> bytes:
    """The root of the trie from the RLP of each index to its value."""
    if not values:
        return keccak256(encode(b""))
    return keccak256(encode(_node({encode(index).hex(): value for index, value in enumerate(values)})))


def logs_bloom(logs: Iterable[Json]) -> bytes:
    bloom = bytearray(_BLOOM_BITS // 8)
    for log in logs:
        for value in (log["address"], *log["topics"]):
            digest = keccak256(_bytes(value))
            for pair in (0, 2, 4):
                bit = int.from_bytes(digest[pair : pair + 2], "big") % _BLOOM_BITS
                bloom[-1 - bit // 8] |= 1 << bit % 8
    return bytes(bloom)


def _node(tree: dict[str, bytes]) -> list[Any]:
    """The node of a tree from nibbles to values; no path is a prefix of another."""
    if len(tree) == 1:
        [(path, value)] = tree.items()
        return [_hex_prefix(path, leaf=True), value]
    shared = 0
    while len({path[: shared + 1] for path in tree}) == 1:
        shared += 1
    if shared:
        [start] = {path[:shared] for path in tree}
        below = _node({path[shared:]: value for path, value in tree.items()})
        return [_hex_prefix(start, leaf=False), _reference(below)]
    branches = [{path[1:]: value for path, value in tree.items() if path[0] == nibble} for nibble in _HEX]
    return [*(_reference(_node(one)) if one else b"" for one in branches), b""]


def _reference(node: list[Any]) -> Any:
    encoded = encode(node)
    return node if len(encoded) < 32 else keccak256(encoded)


def _hex_prefix(path: str, *, leaf: bool) -> bytes:
    flag = 2 if leaf else 0
    return bytes.fromhex(f"{flag + 1:x}{path}" if len(path) % 2 else f"{flag:x}0{path}")


def _authorization(given: Json) -> list[Any]:
    account = [_number(given["chainId"]), _bytes(given["address"]), _number(given["nonce"])]
    return [*account, _number(given["yParity"]), *_r_and_s(given)]


def _r_and_s(signed: Json) -> tuple[int, int]:
    return _number(signed["r"]), _number(signed["s"])


def _number(text: str) -> int:
    return int(text, 16)


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text[2:])
