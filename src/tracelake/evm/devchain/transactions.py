"""Transactions and logs of a dev chain, of every type and shape, as a node's JSON.

Type and purpose of a transaction rotate by height and position, with periods that have no common divisor, so a
short chain has every combination. A transaction doesn't depend on the block that contains it: after a reorg
many of the old ones are in the new blocks too, under the same hash, as on a real chain. Its sender has signed it;
nonces rise with the height and leave gaps. Before their fork, types are replaced by legacy transactions.

Logs are token traffic for the most part, and cases that trip decoders: the two kinds of ``Transfer`` that
differ only in their number of topics, the same topic with other indexed arguments, amounts up to 2^256 − 1,
logs without topics, without data, and with a lot of it. Shapes rotate too, so any ``len(SHAPES)`` logs in a row
have every one of them. Since Amsterdam a payment of ether makes one as well, from the system address (EIP-7708).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tracelake.domain import event_abi
from tracelake.evm.consensus import contract_address, signed_hash, transaction_bytes, transaction_parts
from tracelake.evm.devchain.accounts import ChainAccounts, SeededRandom, accounts_of, sign
from tracelake.evm.devchain.profile import DevChainProfile
from tracelake.evm.forks import FORKS, Fork
from tracelake.evm.hashing import keccak256

GIANT_GAS = 5_000_000_000
# Has no divisor in common with the numbers of kinds and of purposes, so every combination comes up.
_SPREAD = 13
_SLOTS = 4_096
# Blobs beyond the target would raise the next block's price, so only a few transactions carry one.
_MOST_BLOBS = 6
_KINDS = ("dynamic", "legacy", "dynamic", "access", "blob", "dynamic", "authorization", "frontier")
_BLOB_PLACES = _MOST_BLOBS * len(_KINDS)
_TYPES = {"frontier": 0, "legacy": 0, "access": 1, "dynamic": 2, "blob": 3, "authorization": 4}
MOST_UINT256 = 2**256 - 1
HUGE_DATA = 24 * 1024
_ZERO = "0x" + "00" * 32
SYSTEM_ADDRESS = "0x" + event_abi.SYSTEM_ADDRESS.hex()
_NEWEST_TYPE = {
    rules.fork: max(each.transaction_type or 0 for each in FORKS[: rules.fork + 1]) for rules in FORKS
}


class TransactionPurpose(Enum):
    CALL = "call"
    PAY = "pay"
    CREATE = "create"
    FAIL = "fail"
    GIANT = "giant"


_PURPOSES = (
    TransactionPurpose.CALL,
    TransactionPurpose.CALL,
    TransactionPurpose.PAY,
    TransactionPurpose.CALL,
    TransactionPurpose.FAIL,
    TransactionPurpose.CALL,
    TransactionPurpose.CREATE,
    TransactionPurpose.CALL,
    TransactionPurpose.GIANT,
    TransactionPurpose.CALL,
    TransactionPurpose.CALL,
)


@dataclass(frozen=True, slots=True)
class SignedTransaction:
    """``fields`` lack only those that depend on the block. ``encoded`` is the value in the transactions trie."""

    purpose: TransactionPurpose
    fields: dict[str, Any]
    encoded: bytes
    hash: str
    creates: str | None
    priority: int
    fee_cap: int


def transaction_at(profile: DevChainProfile, branch: int, height: int, position: int) -> SignedTransaction:
    turn = height * _SPREAD + position
    rng = SeededRandom(profile.seed, "transaction", branch, height, position)
    accounts = accounts_of(profile.seed)
    fork = profile.fork_at(height)
    kind = "frontier" if fork is Fork.FRONTIER else _KINDS[turn % len(_KINDS)]
    if _TYPES[kind] > _NEWEST_TYPE[fork]:
        kind = "legacy"
    if kind == "blob" and position >= _BLOB_PLACES:
        kind = "dynamic"
    purpose = _PURPOSES[turn % len(_PURPOSES)]
    # Transactions with blobs or authorizations must have a recipient (EIP-4844, EIP-7702).
    if purpose is TransactionPurpose.CREATE and kind in ("blob", "authorization"):
        purpose = TransactionPurpose.CALL
    fields = _core(purpose, height, position, rng, accounts)
    fields["type"] = hex(_TYPES[kind])
    priority, fee_cap = _fees(kind, fields, rng)
    _extras(kind, fields, profile.chain_id, rng, accounts)
    _sign(kind, fields, profile.chain_id, accounts)
    encoded = transaction_bytes(fields)
    fields["hash"] = "0x" + keccak256(encoded).hex()
    creates = contract_address(fields["from"], fields["nonce"]) if fields["to"] is None else None
    return SignedTransaction(purpose, fields, encoded, fields["hash"], creates, priority, fee_cap)


def _core(
    purpose: TransactionPurpose, height: int, position: int, rng: SeededRandom, accounts: ChainAccounts
) -> dict[str, Any]:
    match purpose:
        case TransactionPurpose.CREATE:
            to, value, data, gas = None, 0, rng.hex(rng.between(32, 200)), 3_000_000
        case TransactionPurpose.PAY:
            # The largest value that fits comes up often enough to be met in a short chain.
            amount = MOST_UINT256 - rng.below(2) if rng.below(4) == 0 else rng.bits(rng.between(1, 80))
            to, value, data, gas = accounts.account(rng), amount, "0x", 21_000
        case _:
            coin = accounts.coins[rng.below(len(accounts.coins))]
            gas = GIANT_GAS * 2 if purpose is TransactionPurpose.GIANT else rng.between(100_000, 5_000_000)
            to, value, data = coin, 0, "0xa9059cbb" + rng.bytes(64).hex()
    return {
        "from": accounts.account(rng),
        "to": to,
        "nonce": hex(height * _SLOTS + position),
        "gas": hex(gas),
        "value": hex(value),
        "input": data,
    }


def _fees(kind: str, fields: dict[str, Any], rng: SeededRandom) -> tuple[int, int]:
    """The sender's priority fee and fee cap per gas. The base fee is always below the cap."""
    priority = rng.below(3_000_000_000)
    cap = 100_000_000_000 + rng.below(1_000_000_000)
    if kind in ("frontier", "legacy", "access"):
        fields["gasPrice"] = hex(cap)
        return cap, cap
    fields["maxPriorityFeePerGas"] = hex(priority)
    fields["maxFeePerGas"] = hex(cap)
    return priority, cap


def _extras(
    kind: str, fields: dict[str, Any], chain_id: int, rng: SeededRandom, accounts: ChainAccounts
) -> None:
    if kind != "frontier":
        fields["chainId"] = hex(chain_id)
    if _TYPES[kind] >= 1:
        fields["accessList"] = [
            {
                "address": accounts.account(rng),
                "storageKeys": [rng.hex(32) for _ in range(rng.below(3))],
            }
            for _ in range(rng.below(3))
        ]
    if kind == "blob":
        fields["maxFeePerBlobGas"] = hex(rng.bits(34))
        fields["blobVersionedHashes"] = ["0x01" + rng.bytes(31).hex()]
    if kind == "authorization":
        fields["authorizationList"] = [
            {
                "chainId": hex(chain_id if rng.below(2) else 0),
                "address": accounts.others[rng.below(len(accounts.others))],
                "nonce": hex(rng.below(1000)),
                "yParity": hex(rng.below(2)),
                "r": hex(rng.bits(255)),
                "s": hex(rng.bits(254)),
            }
            for _ in range(rng.between(1, 2))
        ]


def _sign(kind: str, fields: dict[str, Any], chain_id: int, accounts: ChainAccounts) -> None:
    first = {"frontier": 27, "legacy": chain_id * 2 + 35}.get(kind, 0)
    # The signature's place in the encoding must be filled to get the part before it, which is signed.
    fields |= {"v": hex(first), "r": "0x1", "s": "0x1"}
    digest = signed_hash(fields, transaction_parts(fields)).digest
    r, s, parity = sign(accounts.keys[fields["from"]], digest)
    fields |= {"v": hex(first + parity), "r": r, "s": s}
    if _TYPES[kind]:
        fields["yParity"] = fields["v"]


def topic0(signature: str) -> str:
    return "0x" + keccak256(signature.encode()).hex()


TRANSFER = topic0("Transfer(address,address,uint256)")
APPROVAL = topic0("Approval(address,address,uint256)")
APPROVAL_FOR_ALL = topic0("ApprovalForAll(address,address,bool)")
SWAP = topic0("Swap(address,uint256,uint256,uint256,uint256,address)")
MESSAGE = topic0("Message(bytes)")
PAUSED = topic0("Paused()")


@dataclass(frozen=True, slots=True)
class Log:
    """A log without its place in a block, which the block adds."""

    address: str
    topics: tuple[str, ...]
    data: str


LogShape = Callable[[SeededRandom, ChainAccounts], Log]


def uint256_word(value: int) -> str:
    """One ABI word as hex digits, without a prefix."""
    return f"{value:064x}"


def address_word(address: str) -> str:
    """An address as a topic."""
    return "0x" + "00" * 12 + address[2:]


def _amount(rng: SeededRandom) -> int:
    return rng.bits(rng.between(1, 90))


def _coin_event(
    topic: str, first: str, second: str, amount: int, rng: SeededRandom, accounts: ChainAccounts
) -> Log:
    return Log(
        accounts.coins[rng.below(len(accounts.coins))], (topic, first, second), "0x" + uint256_word(amount)
    )


def _collection_event(topic: str, first: str, second: str, rng: SeededRandom, accounts: ChainAccounts) -> Log:
    token_id = "0x" + uint256_word(rng.below(10_000))
    return Log(
        accounts.collections[rng.below(len(accounts.collections))], (topic, first, second, token_id), "0x"
    )


def _someone(rng: SeededRandom, accounts: ChainAccounts) -> str:
    return address_word(accounts.account(rng))


def coin_transfer(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return _coin_event(
        TRANSFER, _someone(rng, accounts), _someone(rng, accounts), _amount(rng), rng, accounts
    )


def payment(fields: dict[str, Any]) -> Log:
    """The log of a transaction that moves ether, since Amsterdam."""
    sender, recipient = ("0x" + "00" * 12 + fields[name][2:] for name in ("from", "to"))
    return Log(SYSTEM_ADDRESS, (TRANSFER, sender, recipient), "0x" + uint256_word(int(fields["value"], 16)))


def coin_mint(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return _coin_event(TRANSFER, _ZERO, _someone(rng, accounts), _amount(rng), rng, accounts)


def coin_burn(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return _coin_event(TRANSFER, _someone(rng, accounts), _ZERO, _amount(rng), rng, accounts)


def largest_transfer(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return _coin_event(
        TRANSFER, _someone(rng, accounts), _someone(rng, accounts), MOST_UINT256, rng, accounts
    )


def huge_transfer(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    amount = MOST_UINT256 - rng.below(1000)
    return _coin_event(TRANSFER, _someone(rng, accounts), _someone(rng, accounts), amount, rng, accounts)


def coin_approval(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    amount = MOST_UINT256 if rng.below(2) else _amount(rng)
    return _coin_event(APPROVAL, _someone(rng, accounts), _someone(rng, accounts), amount, rng, accounts)


def collection_transfer(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return _collection_event(TRANSFER, _someone(rng, accounts), _someone(rng, accounts), rng, accounts)


def collection_mint(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return _collection_event(TRANSFER, _ZERO, _someone(rng, accounts), rng, accounts)


def collection_burn(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return _collection_event(TRANSFER, _someone(rng, accounts), _ZERO, rng, accounts)


def collection_approval(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return _collection_event(APPROVAL, _someone(rng, accounts), _someone(rng, accounts), rng, accounts)


def approval_for_all(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    topics = (APPROVAL_FOR_ALL, _someone(rng, accounts), _someone(rng, accounts))
    return Log(
        accounts.collections[rng.below(len(accounts.collections))], topics, "0x" + uint256_word(rng.below(2))
    )


def swap(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    amounts = "".join(uint256_word(_amount(rng)) for _ in range(4))
    return Log(accounts.others[0], (SWAP, _someone(rng, accounts), _someone(rng, accounts)), "0x" + amounts)


def unindexed_transfer(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    """Tokens from before ``indexed`` was usual: the topic of a transfer, and all its arguments in the data."""
    arguments = _someone(rng, accounts)[2:] + _someone(rng, accounts)[2:] + uint256_word(_amount(rng))
    return Log(accounts.others[1], (TRANSFER,), "0x" + arguments)


def half_indexed_transfer(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    arguments = _someone(rng, accounts)[2:] + uint256_word(_amount(rng))
    return Log(accounts.others[1], (TRANSFER, _someone(rng, accounts)), "0x" + arguments)


def anonymous(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return Log(accounts.others[2], (), rng.hex(rng.below(97)))


def signal(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    return Log(accounts.others[3], (PAUSED,), "0x")


def message(rng: SeededRandom, accounts: ChainAccounts) -> Log:
    """Some are as large as a log gets in practice."""
    size = HUGE_DATA if rng.below(64) == 0 else rng.below(200)
    text = rng.bytes(size).hex()
    return Log(
        accounts.others[4],
        (MESSAGE,),
        "0x" + uint256_word(32) + uint256_word(size) + text + "00" * (-size % 32),
    )


SHAPES: tuple[LogShape, ...] = (
    coin_transfer,
    coin_transfer,
    collection_transfer,
    coin_transfer,
    coin_mint,
    anonymous,
    coin_transfer,
    coin_approval,
    largest_transfer,
    coin_transfer,
    collection_mint,
    unindexed_transfer,
    coin_transfer,
    swap,
    coin_transfer,
    signal,
    collection_approval,
    coin_transfer,
    coin_burn,
    half_indexed_transfer,
    coin_transfer,
    huge_transfer,
    collection_transfer,
    coin_transfer,
    message,
    coin_transfer,
    collection_burn,
    approval_for_all,
    coin_transfer,
)


def log_of(height: int, position: int, rng: SeededRandom, accounts: ChainAccounts) -> Log:
    """The log at ``position`` in the block at ``height``."""
    return SHAPES[(height * 5 + position) % len(SHAPES)](rng, accounts)
