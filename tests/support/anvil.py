"""anvil, a real EVM node, as a process of a test with a chain of its own, and random chains on it.

Time is the chain's own: the first block's is fixed and each further block is a fixed step later, so the same calls
build the same chain, hash for hash. Blocks are mined only by ``mine``.

``AnvilChain`` fills a chain at random: tokens of both kinds, every transaction type, failures, empty blocks,
reorgs. The same seed and the same calls give the same chain. Blob transactions are left out by default: anvil
computes a block's transactions root from them together with their blobs, which no other node does, so such a
block can't be proven.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from coincurve import PrivateKey
from tiny_keccak import keccak256

from tests.support.evm_contracts import (
    ANONYMOUS,
    COIN,
    COLLECTION,
    FAILING,
    TRANSFER,
    UNINDEXED,
    Movement,
    deployment,
    movements,
)
from tests.support.evm_encoding import encode
from tracelake.domain.errors import Unavailable
from tracelake.kernel import parent_death_hook

CHAIN_ID = 31_337
FIRST_TIME = 1_735_689_600
BLOCK_SECONDS = 12
BLOCK_GAS = 10**11
_ROOT = Path(__file__).parents[2]
_LISTENING = re.compile(rb"Listening on ([0-9.]+:[0-9]+)")
_TIMEOUT = 60.0
MOST = 2**256 - 1
_ZERO = "0x" + "00" * 20
_PRICE = 10**11
_GAS = 1_000_000
_HUGE_GAS = 5 * 10**9
_KINDS = ("legacy", "access", "dynamic", "authorization")
_NO_BLOB = "0xc0" + "00" * 47  # the commitment to, and the proof of, a blob of zeros
_BLOB_BYTES = 131_072
Transaction = dict[str, Any]


class AnvilError(Exception):
    """The node refused a call."""


class Anvil:
    """A running node, and the calls that tests make."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, *params: Any) -> Any:
        return self.batch([(method, params)])[0]

    def batch(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """Return the results in the order of the calls, or raise the first error."""
        body = [
            {"jsonrpc": "2.0", "id": number, "method": method, "params": params}
            for number, (method, params) in enumerate(calls)
        ]
        response = self._http.post(
            self.url, content=orjson.dumps(body), headers={"content-type": "application/json"}
        )
        answers = {each["id"]: each for each in orjson.loads(response.raise_for_status().content)}
        for number, (method, _) in enumerate(calls):
            if "error" in answers[number]:
                raise AnvilError(f"{method}: {answers[number]['error']}")
        return [answers[number]["result"] for number in range(len(calls))]

    @property
    def head(self) -> int:
        return int(self.call("eth_blockNumber"), 16)

    def block(self, number: int) -> dict[str, Any] | None:
        block: dict[str, Any] | None = self.call("eth_getBlockByNumber", hex(number), True)
        return block

    def accounts(self) -> list[str]:
        accounts: list[str] = self.call("eth_accounts")
        return accounts

    def mine(self, blocks: int = 1) -> int:
        """Mine blocks, with pending transactions in the first of them; return the new head."""
        self.call("anvil_mine", hex(blocks))
        return self.head

    def send(self, transactions: Sequence[dict[str, Any]]) -> list[str]:
        """Send transactions for the next block, in this order; return their hashes."""
        return self.batch([("eth_sendTransaction", [each]) for each in transactions])

    def reorg(self, depth: int, transactions: Sequence[tuple[dict[str, Any], int]] = ()) -> int:
        """Replace the last ``depth`` blocks by as many others. Each of ``transactions`` comes with the number
        of its new block, from 0 on. Return the head, which is as high as before."""
        self.call("anvil_reorg", depth, [[each, offset] for each, offset in transactions])
        return self.head

    def rollback(self, depth: int) -> int:
        """Remove the last ``depth`` blocks; return the new head."""
        self.call("anvil_rollback", depth)
        return self.head


def program() -> Path:
    """The path of the program: TRACELAKE_ANVIL, the one from scripts/install-anvil, or the PATH."""
    for place in (
        os.environ.get("TRACELAKE_ANVIL"),
        _ROOT / ".tools" / "anvil" / "anvil",
        shutil.which("anvil"),
    ):
        if place and os.access(place, os.X_OK):
            return Path(place)
    raise Unavailable("NoAnvil", "anvil isn't installed: run scripts/install-anvil --require")


@contextmanager
def running_anvil(*options: str, fork: str = "osaka") -> Iterator[Anvil]:
    """Run a node with a chain of its own, by the rules of the newest fork that it implements."""
    process = subprocess.Popen(
        [
            str(program()),
            *("--host", "127.0.0.1", "--port", "0", "--chain-id", str(CHAIN_ID)),
            *("--no-mining", "--order", "fifo", "--hardfork", fork, "--slots-in-an-epoch", "1"),
            *("--timestamp", str(FIRST_TIME), "--gas-limit", str(BLOCK_GAS)),
            # The check counts in 128 bits, and would refuse larger payments.
            "--disable-pool-balance-checks",
            "--disable-default-create2-deployer",
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=parent_death_hook(signal.SIGINT),
    )
    drain = threading.Thread(target=lambda: None)
    try:
        address, last_line = _address(process)
        if address is None:
            raise Unavailable("AnvilFailed", f"anvil didn't start: {last_line}")
        # Further output is read and dropped: a full pipe would stop the node.
        drain = threading.Thread(target=_drop, args=(process,), daemon=True)
        drain.start()
        anvil = Anvil(f"http://{address}", process.pid)
        try:
            anvil.call("anvil_setBlockTimestampInterval", BLOCK_SECONDS)
            yield anvil
        finally:
            anvil.close()
    finally:
        process.kill()
        process.wait()
        if drain.ident is not None:
            drain.join()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture
def anvil() -> Iterator[Anvil]:
    """A node of the test's own, at block 0."""
    with running_anvil() as node:
        yield node


def _address(process: subprocess.Popen[bytes]) -> tuple[str | None, str]:
    """The address once the node listens; or None and the last line of its output."""
    assert process.stdout is not None
    last_line = b""
    for line in process.stdout:
        if found := _LISTENING.search(line):
            return found[1].decode(), ""
        last_line = line.strip() or last_line
    return None, last_line.decode(errors="replace")


def _drop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    for _ in process.stdout:
        pass


class AnvilChain:
    """A random chain. The first block deploys contracts and fills accounts; ``grow`` and ``reorg`` do the rest."""

    def __init__(self, anvil: Anvil, seed: int, *, blobs: bool = False, most_transactions: int = 6) -> None:
        self.anvil = anvil
        self._random = random.Random(seed)
        self._blobs = blobs
        self._most = most_transactions
        *self._accounts, self._rich = anvil.accounts()
        self._key = PrivateKey(hashlib.sha256(f"tracelake {seed}".encode()).digest())
        self._signer = _address_of(self._key)
        self._nonces: Counter[str] = Counter()
        self.coins, self.collections, self._odd = self._begin()

    def grow(self, blocks: int) -> int:
        """Mine blocks with random content; return the new head."""
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
        """Random transfers: some mint, some burn, some have the largest amount."""
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
        """A random authorization without a valid signature: a node skips it, and the transaction stands."""
        return {
            "chainId": hex(CHAIN_ID),
            "address": self._random.choice(self._accounts),
            "nonce": hex(self._random.randrange(1000)),
            "yParity": hex(self._random.randrange(2)),
            "r": hex(self._random.getrandbits(255) | 1),
            "s": hex(self._random.getrandbits(254) | 1),
        }

    def _fortune(self) -> Transaction:
        """A payment of nearly the largest amount."""
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
        fields = [nonce, _PRICE, _GAS, bytes.fromhex(self.coins[0][2:]), 0, b""]
        signature = self._key.sign_recoverable(keccak256(encode(fields)), hasher=None)
        r, s, parity = int.from_bytes(signature[:32]), int.from_bytes(signature[32:64]), signature[64]
        return "0x" + encode([*fields, 27 + parity, r, s]).hex()


def _address_of(key: PrivateKey) -> str:
    return "0x" + keccak256(key.public_key.format(compressed=False)[1:])[12:].hex()


def build_random_chain(anvil: Anvil, seed: int, blocks: int, *, blobs: bool = False) -> AnvilChain:
    """Build a random chain of ``blocks`` blocks on a node at block 0."""
    chain = AnvilChain(anvil, seed, blobs=blobs)
    chain.grow(blocks - 1)
    return chain
