"""What the demo runs on: a dev chain that keeps growing, and a whole stack that reads it."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tracelake.dev.handle import DEV_FILE, DevHandle, read_handle
from tracelake.evm.devchain.chain import DevChain

_STOP_SECONDS = 20


@contextmanager
def growing(chain: DevChain, block_seconds: float) -> Iterator[None]:
    """A new block every so often, for as long as the block lasts."""
    enough = threading.Event()

    def mine() -> None:
        while not enough.wait(block_seconds):
            chain.mine()

    miner = threading.Thread(target=mine, name="miner")
    miner.start()
    try:
        yield
    finally:
        enough.set()
        miner.join()


@contextmanager
def stack(folder: Path, chain_url: str) -> Iterator[DevHandle]:
    home, pools = folder / "home", folder / "rpc.toml"
    pools.write_text(f'[pools.main]\n[[pools.main.endpoints]]\nname = "devchain"\nurl = "{chain_url}"\n')
    pools.chmod(0o600)
    command = [sys.executable, "-P", "-m", "tracelake", "dev", "--home", str(home), "--rpc-pools", str(pools)]
    command += [
        "--user-port",
        "0",
        "--internal-port",
        "0",
        "--operators",
        "tracelake.dev.demo.watch_operator",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.strip() == "ready":
                    break
            else:
                raise SystemExit("tracelake dev did not start:\n" + "".join(said))
            yield handle_of(folder)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=_STOP_SECONDS)


def handle_of(folder: Path) -> DevHandle:
    """As it is now: what was started again has another process id."""
    handle = read_handle(folder / "home" / DEV_FILE, DevHandle)
    assert handle is not None
    return handle
