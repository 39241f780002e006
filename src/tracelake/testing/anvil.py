"""anvil, a real EVM node, as a process of the test: its own chain on a free loopback port, gone with the test.

Time is the chain's own: the first block's is fixed and each further block is a fixed step later, so a chain that
was built by the same calls is the same, hash for hash. Nothing is mined but by ``mine``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tracelake.domain.errors import Unavailable
from tracelake.embedded_postgres import parent_death

CHAIN_ID = 31_337
FIRST_TIME = 1_735_689_600
BLOCK_SECONDS = 12
BLOCK_GAS = 10**11

_ROOT = Path(__file__).parents[3]
_LISTENING = re.compile(rb"Listening on ([0-9.]+:[0-9]+)")
_TIMEOUT = 60.0


class AnvilError(Exception):
    """The node refused a call."""


class Anvil:
    """A running node, and what tests do to it."""

    def __init__(self, url: str, pid: int) -> None:
        self.url = url
        self.pid = pid
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, *params: Any) -> Any:
        return self.batch([(method, params)])[0]

    def batch(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[Any]:
        """The results in the order of the calls; the first error is raised."""
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
        """What is waiting goes into the first of them; the new head."""
        self.call("anvil_mine", hex(blocks))
        return self.head

    def send(self, transactions: Sequence[dict[str, Any]]) -> list[str]:
        """Their hashes; they are mined with the next block, in this order."""
        return self.batch([("eth_sendTransaction", [each]) for each in transactions])

    def reorg(self, depth: int, transactions: Sequence[tuple[dict[str, Any], int]] = ()) -> int:
        """Replace the last ``depth`` blocks by as many others, which hold ``transactions``, each with the number of
        the new block (from 0 on) that it goes into. The head, which is as high as before."""
        self.call("anvil_reorg", depth, [[each, offset] for each, offset in transactions])
        return self.head

    def rollback(self, depth: int) -> int:
        """The last ``depth`` blocks are gone; the new head."""
        self.call("anvil_rollback", depth)
        return self.head


def program() -> Path:
    """Where the program is: TRACELAKE_ANVIL, what scripts/install-anvil brought, or the PATH."""
    for place in (
        os.environ.get("TRACELAKE_ANVIL"),
        _ROOT / ".tools" / "anvil" / "anvil",
        shutil.which("anvil"),
    ):
        if place and os.access(place, os.X_OK):
            return Path(place)
    raise Unavailable("NoAnvil", "anvil isn't installed: run scripts/install-anvil --require")


@contextmanager
def running_anvil(*options: str) -> Iterator[Anvil]:
    """A node with a chain of its own. ``options`` are added to its command line, and win over the usual ones."""
    process = subprocess.Popen(
        [
            str(program()),
            *("--host", "127.0.0.1", "--port", "0", "--chain-id", str(CHAIN_ID)),
            *("--no-mining", "--order", "fifo", "--hardfork", "prague", "--slots-in-an-epoch", "1"),
            *("--timestamp", str(FIRST_TIME), "--gas-limit", str(BLOCK_GAS)),
            # The check counts in 128 bits, and would refuse the payment of more.
            "--disable-pool-balance-checks",
            "--disable-default-create2-deployer",
            *options,
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=parent_death.arm(),
    )
    drain = threading.Thread(target=lambda: None)
    try:
        address, said = _address(process)
        if address is None:
            raise Unavailable("AnvilFailed", f"anvil didn't start: {said}")
        # What it goes on to say is read and dropped: a full pipe would stop it.
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
    """Where it listens, once it does; or None and the last thing it said."""
    assert process.stdout is not None
    said = b""
    for line in process.stdout:
        if found := _LISTENING.search(line):
            return found[1].decode(), ""
        said = line.strip() or said
    return None, said.decode(errors="replace")


def _drop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    for _ in process.stdout:
        pass
