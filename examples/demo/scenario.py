"""The demo's scenario: a dev chain that keeps growing, a whole stack that reads it, and the steps of the demo."""

from __future__ import annotations

import io
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import resources
from pathlib import Path

import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from examples.demo import check
from examples.demo.receiver import AlertReceiver
from tracelake.client import Client
from tracelake.dev.handle import DevHandle
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.evm.devchain.chain import DevChain
from tracelake.stack_connection import DEV_FILE, read_handle

_STOP_SECONDS = 20
CHUNKS = 12
FINALITY = 16
RANGE = 25
REORG_DEPTH = 8
LARGE = 10**18
"""Amounts on the dev chain are of every size; many are larger than this."""
DEADLINE_SECONDS = 600.0
_LAGS = 9
IN_SANDBOX = """runtime: lambda
    udf: { bundle: "BUNDLE", entrypoint: watch.handler }"""
IN_PYTHON = """runtime: ecs_python
    operator: demo_watch"""


@contextmanager
def growing(chain: DevChain, block_seconds: float) -> Iterator[None]:
    """Mine a block at every interval, until the ``with`` block ends."""
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
def stack(folder: Path, chain_url: str, receiver: AlertReceiver) -> Iterator[DevHandle]:
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
        str(Path(__file__).with_name("watch_operator.py")),
    ]
    environment = {**os.environ, **receiver.environment}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            output = []
            for line in process.stdout:
                output.append(line)
                if line.strip() == "ready":
                    break
            else:
                raise SystemExit("tracelake dev did not start:\n" + "".join(output))
            yield handle_of(folder)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=_STOP_SECONDS)


def handle_of(folder: Path) -> DevHandle:
    """The current handle: a restarted part has another process id."""
    handle = read_handle(folder / "home" / DEV_FILE, DevHandle)
    assert handle is not None
    return handle


class Scenario:
    """``past`` is the number of blocks before the start; a multiple of the chunks and of the ranges."""

    def __init__(
        self,
        console: Console,
        client: Client,
        chain: DevChain,
        folder: Path,
        past: int,
        receiver: AlertReceiver,
    ) -> None:
        self.receiver = receiver
        self.past = past
        self.chunk = past // CHUNKS
        self.console = console
        self.client = client
        self.chain = chain
        self.folder = folder
        self.began = time.monotonic()
        self._deadline = time.monotonic() + DEADLINE_SECONDS
        self._done = 0
        self.history_seconds = 0.0
        self.lag_seconds = 0.0
        self.replaced = (0, 0)

    @property
    def data_owner_dsn(self) -> str:
        return handle_of(self.folder).data_owner_dsn

    def deploy(self, *, sandbox: bool) -> None:
        if not sandbox:
            self.console.print(
                "no sandbox here (tracelake doctor says why): a trusted operator raises the alerts"
            )
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("watch.py", _text("watch.py"))
        archive.seek(0)
        bundle, _ = self.client.push_bundle(archive)
        yaml = _text("dag.yaml").replace("WATCHED_BY", IN_SANDBOX if sandbox else IN_PYTHON)
        for name, value in {
            "BUNDLE": bundle.bundle,
            "CHAIN_ID": str(self.chain.chain_id),
            "CHUNK_SIZE": str(self.chunk),
            "START_BLOCK": str(self.past),
            "FINALITY": str(FINALITY),
            "RANGE_SIZE": str(RANGE),
            "LARGE": f"{LARGE:.1e}",
        }.items():
            yaml = yaml.replace(name, value)
        self.client.deploy(yaml.encode())
        self.client.trigger("demo", "request", start=0, end=self.past - 1)
        self.console.print(
            f"deployed [bold]demo[/bold]: blocks 0 to {self.past - 1:,} are asked for, later ones are followed\n"
        )
        self.began = time.monotonic()

    def watch_the_past(self) -> None:
        """Show progress until all chunks are committed; meanwhile a worker and the Dispatcher are killed."""
        to_kill = [("worker-ecs_spark", CHUNKS // 4), ("dispatcher", CHUNKS // 2)]
        columns = (
            TextColumn("{task.description:>10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            bar = progress.add_task("history", total=self.past)

            def all_done() -> bool:
                done = self._chunks_done()
                progress.update(bar, completed=done * self.chunk)
                if to_kill and done >= to_kill[0][1]:
                    part, _ = to_kill.pop(0)
                    os.kill(handle_of(self.folder).pids[part], signal.SIGKILL)
                    progress.console.print(f"  killed {part} (SIGKILL); it is started again by itself")
                return done == CHUNKS

            self._wait(all_done)
        self.history_seconds = time.monotonic() - self.began

    def measure_the_lag(self) -> None:
        """Measure the time from mined to stored, several times."""
        self._wait(self._is_followed)
        lags = []
        for _ in range(_LAGS):
            head, seen = self.chain.head, time.monotonic()
            while self.chain.head == head:
                time.sleep(0.005)
                seen = time.monotonic()
            self._wait(self._is_followed, pause=0.005)
            lags.append(time.monotonic() - seen)
        self.lag_seconds = statistics.median(lags)

    def change_the_present(self) -> None:
        """Make a reorg that removes blocks with alerts, once there are some and they were delivered."""
        self._wait(lambda: self._is_followed() and self._alerts_stand() and self._are_delivered())
        head = self.chain.reorg(REORG_DEPTH)
        self.replaced = (head - REORG_DEPTH + 1, head)
        self.console.print(f"  the chain replaced its blocks {self.replaced[0]:,} to {head:,} by others")

    def settle(self) -> None:
        """Stop the chain and wait until everything downstream is done."""
        self._wait(
            lambda: (
                self._is_followed()
                and self._is_compacted()
                and self._alerts_stand()
                and self._are_delivered()
            )
        )

    def _wait(self, is_so: Callable[[], bool], pause: float = 0.2) -> None:
        """Wait, with one deadline for all waits together; the report names conditions that never held."""
        while not is_so() and time.monotonic() < self._deadline:
            time.sleep(pause)

    def _chunks_done(self) -> int:
        """The number of finished chunks, as the Dispatcher last reported it."""
        with suppress(Unavailable):
            self._done = len(
                self.client.tasks(dag="demo", job="history", status="Completed", limit=1000).tasks
            )
        return self._done

    def _is_followed(self) -> bool:
        try:
            [last] = check.hot_hashes(self.client, self.data_owner_dsn, "live_blocks")[-1:]
        except (ValueError, TracelakeError, psycopg.Error):
            return False
        return last == self.chain.blocks(self.chain.head, self.chain.head)[0].hash

    def _is_compacted(self) -> bool:
        final = (self.chain.head - FINALITY + 1) // RANGE * RANGE
        try:
            held = self.client.partitions("blocks", limit=1000).partitions
        except TracelakeError:
            return False
        return [(each.start, each.end) for each in held] == [
            (start, start + RANGE - 1) for start in range(self.past, final, RANGE)
        ]

    def _alerts_stand(self) -> bool:
        try:
            return check.standing_alerts(self.client) == check.large_transfers(
                self.chain, self.past, self.chain.head, LARGE
            )
        except TracelakeError:
            return False

    def _are_delivered(self) -> bool:
        try:
            return self.receiver.alerts() == check.standing_alerts(self.client)
        except TracelakeError:
            return False


def _text(name: str) -> str:
    return resources.files("examples.demo").joinpath(name).read_text(encoding="utf-8")
