"""A random chain on a real node: tokens of both kinds, every transaction type, failures, empty blocks, reorgs.

The same seed and the same calls give the same chain, hash for hash. Blob transactions are left out unless asked
for: anvil makes a block's transactions root from them together with their blobs, which no other node does, so such
a block can't be proven.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from typing import Any

from tracelake.evm import rlp
from tracelake.evm.keccak import keccak256
from tracelake.testing.anvil import CHAIN_ID, Anvil
from tracelake.testing.evm_assembly import deployment
from tracelake.testing.evm_contracts import (
    ANONYMOUS,
    COIN,
    COLLECTION,
    FAILING,
    TRANSFER,
    UNINDEXED,
    Movement,
    movements,
)
from tracelake.testing.secp256k1 import address_of, key_of, sign

MOST = 2**256 - 1
_ZERO = "0x" + "00" * 20
_PRICE = 10**11
_GAS = 1_000_000
_HUGE_GAS = 5 * 10**9
_KINDS = ("legacy", "access", "dynamic", "authorization")
_NO_BLOB = "0xc0" + "00" * 47  # the commitment to, and the proof of, a blob of zeros
_BLOB_BYTES = 131_072

Transaction = dict[str, Any]


class AnvilChain:
    """Contracts are deployed and accounts filled by the first block; ``grow`` and ``reorg`` do the rest."""

    def __init__(self, anvil: Anvil, seed: int, *, blobs: bool = False, most_transactions: int = 6) -> None:
        self.anvil = anvil
        self._random = random.Random(seed)
        self._blobs = blobs
        self._most = most_transactions
        *self._accounts, self._rich = anvil.accounts()
        self._key = key_of(f"tracelake {seed}")
        self._signer = address_of(self._key)
        self._nonces: Counter[str] = Counter()
        self.coins, self.collections, self._odd = self._begin()

    def grow(self, blocks: int) -> int:
        """Mine so many blocks with random content; the new head."""
        self._read_nonces("latest")
        for _ in range(blocks):
            self._fill_block()
            self.anvil.mine()
        return self.anvil.head

    def reorg(self, depth: int) -> int:
        """Replace the last blocks by as many with other random content."""
        self._read_nonces(hex(self.anvil.head - depth))
        replacements = [
            (self._call(), offset) for offset in range(depth) for _ in range(self._random.randrange(3))
        ]
        return self.anvil.reorg(depth, replacements)

    def _begin(self) -> tuple[list[str], list[str], dict[str, str]]:
        for account, balance in ((self._signer, 10**24), (self._rich, MOST)):
            self.anvil.call("anvil_setBalance", account, hex(balance))
        codes = [COIN, COIN, COIN, COLLECTION, COLLECTION, ANONYMOUS, UNINDEXED, FAILING]
        deployed = self.anvil.send([self._creation(code) for code in codes])
        self.anvil.mine()
        receipts = self.anvil.batch([("eth_getTransactionReceipt", [each]) for each in deployed])
        places = [each["contractAddress"] for each in receipts]
        odd = dict(zip(("anonymous", "unindexed", "failing"), places[5:], strict=True))
        return places[:3], places[3:5], odd

    def _read_nonces(self, block: str) -> None:
        accounts = [*self._accounts, self._rich, self._signer]
        counts = self.anvil.batch([("eth_getTransactionCount", [each, block]) for each in accounts])
        self._nonces = Counter(
            {account: int(count, 16) for account, count in zip(accounts, counts, strict=True)}
        )

    def _fill_block(self) -> None:
        if self._random.randrange(5) == 0:
            return
        transactions = [self._call() for _ in range(self._random.randint(1, self._most))]
        if self._random.randrange(6) == 0:
            transactions.append(self._creation(self._random.choice((COIN, COLLECTION))))
        if self._nonces[self._rich] == 0:
            transactions.append(self._fortune())
        if self._blobs and self._random.randrange(2) == 0:
            transactions.append(self._blob())
        self.anvil.send(transactions)
        if self._random.randrange(4) == 0:
            self.anvil.call("eth_sendRawTransaction", self._unprotected())

    def _next(self, account: str) -> str:
        self._nonces[account] += 1
        return hex(self._nonces[account] - 1)

    def _creation(self, code: bytes) -> Transaction:
        sender = self._accounts[0]
        data = "0x" + deployment(code).hex()
        return {"from": sender, "nonce": self._next(sender), "gas": hex(_GAS), "input": data} | self._fees(
            "dynamic"
        )

    def _call(self) -> Transaction:
        """A call of some contract, or a payment, by a transaction of some type."""
        sender = self._random.choice(self._accounts[1:])
        to, data, gas = self._target()
        transaction = {"from": sender, "to": to, "nonce": self._next(sender), "gas": hex(gas), "input": data}
        if data == "0x":
            transaction["value"] = hex(self._random.getrandbits(50))
        return transaction | self._fees(self._random.choice(_KINDS))

    def _target(self) -> tuple[str, str, int]:
        choice = self._random
        match choice.randrange(12):
            case 0:
                return choice.choice(self._accounts), "0x", _HUGE_GAS
            case 1:
                return self._odd["failing"], "0x", _GAS
            case 2:
                return self._odd["anonymous"], "0x" + choice.randbytes(choice.randrange(200)).hex(), _GAS
            case 3:
                return self._odd["unindexed"], "0x" + (TRANSFER + choice.randbytes(96)).hex(), _GAS
            case 4 | 5 | 6:
                return choice.choice(self.collections), movements(self._movements(10_000)), _GAS
            case _:
                return choice.choice(self.coins), movements(self._movements(MOST)), _GAS

    def _movements(self, most: int) -> list[Movement]:
        """Some of them mint and some burn; some are as large as can be."""
        people = [*self._accounts, _ZERO]
        return [
            Movement(
                self._random.choice(people),
                self._random.choice(people),
                self._random.choice((most, most - 1, self._random.randrange(min(most, 2**64)))),
            )
            for _ in range(self._random.randint(1, 5))
        ]

    def _fees(self, kind: str) -> Transaction:
        match kind:
            case "legacy":
                return {"type": "0x0", "gasPrice": hex(_PRICE)}
            case "access":
                return {"type": "0x1", "gasPrice": hex(_PRICE), "accessList": self._access_list()}
            case "dynamic":
                return {"type": "0x2", **self._dynamic(), "accessList": self._access_list()}
            case _:
                return {"type": "0x4", **self._dynamic(), "authorizationList": [self._authorization()]}

    def _dynamic(self) -> Transaction:
        return {"maxFeePerGas": hex(_PRICE), "maxPriorityFeePerGas": hex(self._random.randrange(10**9))}

    def _access_list(self) -> list[Transaction]:
        return [
            {
                "address": self._random.choice(self._accounts),
                "storageKeys": ["0x" + self._random.randbytes(32).hex()],
            }
            for _ in range(self._random.randrange(3))
        ]

    def _authorization(self) -> Transaction:
        """Signed by nobody in particular: a node skips it, and the transaction stands."""
        return {
            "chainId": hex(CHAIN_ID),
            "address": self._random.choice(self._accounts),
            "nonce": hex(self._random.randrange(1000)),
            "yParity": hex(self._random.randrange(2)),
            "r": hex(self._random.getrandbits(255) | 1),
            "s": hex(self._random.getrandbits(254) | 1),
        }

    def _fortune(self) -> Transaction:
        """A payment of nearly everything that there can be."""
        value, receiver = MOST - 2**128, "0x" + self._random.randbytes(20).hex()
        nonce = self._next(self._rich)
        fields = {"from": self._rich, "to": receiver, "nonce": nonce, "gas": hex(21_000), "value": hex(value)}
        return fields | self._fees("legacy")

    def _blob(self) -> Transaction:
        sender = self._accounts[1]
        digest = hashlib.sha256(bytes.fromhex(_NO_BLOB[2:])).digest()
        return {
            "type": "0x3",
            "from": sender,
            "to": self._random.choice(self.coins),
            "nonce": self._next(sender),
            "gas": hex(_GAS),
            "input": movements(self._movements(MOST)),
            "maxFeePerBlobGas": hex(1000),
            "blobVersionedHashes": ["0x01" + digest[1:].hex()],
            "blobs": ["0x" + "00" * _BLOB_BYTES],
            "commitments": [_NO_BLOB],
            "proofs": [_NO_BLOB],
        } | self._dynamic()

    def _unprotected(self) -> str:
        """A legacy transaction without a chain id, which a node accepts but doesn't sign."""
        nonce = int(self._next(self._signer), 16)
        fields: list[rlp.Item] = [nonce, _PRICE, _GAS, bytes.fromhex(self.coins[0][2:]), 0, b""]
        signature = sign(self._key, keccak256(rlp.encode(fields)))
        return "0x" + rlp.encode([*fields, 27 + signature.parity, signature.r, signature.s]).hex()


def build_random_chain(anvil: Anvil, seed: int, blocks: int, *, blobs: bool = False) -> AnvilChain:
    """A node at block 0 gets a random chain of ``blocks`` blocks."""
    chain = AnvilChain(anvil, seed, blobs=blobs)
    chain.grow(blocks - 1)
    return chain
