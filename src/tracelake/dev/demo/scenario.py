"""What happens in the demo, step by step; what came of it is for the report."""

from __future__ import annotations

import io
import os
import signal
import statistics
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib import resources
from pathlib import Path

import psycopg
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tracelake.client import Client
from tracelake.dev.demo import check
from tracelake.dev.demo.surroundings import handle_of
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.evm.devchain.chain import DevChain

CHUNKS = 12
FINALITY = 16
RANGE = 25
REORG_DEPTH = 8
LARGE = 10**18
"""The dev chain moves amounts of every size; a good part of them are larger."""
DEADLINE_SECONDS = 600.0
_LAGS = 9
IN_SANDBOX = """runtime: lambda
    udf: { bundle: "BUNDLE", entrypoint: watch.handler }"""
IN_PYTHON = """runtime: ecs_python
    operator: demo_watch"""


class Scenario:
    """``past`` is how many blocks are history when it begins; a multiple of the chunks and of the ranges."""

    def __init__(self, console: Console, client: Client, chain: DevChain, folder: Path, past: int) -> None:
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
    def data_dsn(self) -> str:
        return handle_of(self.folder).data_dsn

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
        """Progress until all chunks are there; on the way a worker and the Dispatcher get killed."""
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
        """From mined to stored, some times over."""
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
        """A reorg that takes alerts with it, once there are some to take."""
        self._wait(lambda: self._is_followed() and self._alerts_stand())
        head = self.chain.reorg(REORG_DEPTH)
        self.replaced = (head - REORG_DEPTH + 1, head)
        self.console.print(f"  the chain replaced its blocks {self.replaced[0]:,} to {head:,} by others")

    def settle(self) -> None:
        """The chain stands still; everything that follows from it comes to its end."""
        self._wait(lambda: self._is_followed() and self._is_compacted() and self._alerts_stand())

    def _wait(self, is_so: Callable[[], bool], pause: float = 0.2) -> None:
        """What never comes is for the report to say; all waits together have one deadline."""
        while not is_so() and time.monotonic() < self._deadline:
            time.sleep(pause)

    def _chunks_done(self) -> int:
        """As many as were done when the Dispatcher was last there."""
        with suppress(Unavailable):
            self._done = len(
                self.client.tasks(dag="demo", job="history", status="Completed", limit=1000).tasks
            )
        return self._done

    def _is_followed(self) -> bool:
        try:
            [last] = check.hot_hashes(self.client, self.data_dsn, "live_blocks")[-1:]
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


def _text(name: str) -> str:
    return resources.files("tracelake.dev.demo").joinpath(name).read_text(encoding="utf-8")
