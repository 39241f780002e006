"""The replay server, a process of its own, so that what it costs isn't counted with whoever is measured."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop

from tracelake.domain.errors import Unavailable
from tracelake.embedded_postgres import parent_death
from tracelake.evm.devchain.server import LOOPBACK, listen, url_of
from tracelake.testing.chain_replay.methods import ReplayMethods
from tracelake.testing.chain_replay.recording import Recording

READY = "ready "


@contextmanager
def replaying(path: Path) -> Iterator[str]:
    """A server for the recording at ``path``, on a free loopback port; what is given is its URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tracelake.testing.chain_replay", "serve", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=parent_death.arm(),
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said.startswith(READY):
            raise Unavailable("ReplayFailed", f"the replay server of {path.name} didn't start")
        yield said[len(READY) :].strip()
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def serve(path: Path, port: int, on_ready: Callable[[str], None]) -> None:
    """Until SIGINT or SIGTERM."""
    recording = Recording(path)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(ReplayMethods(recording), port, on_ready))


async def _serve(methods: ReplayMethods, port: int, on_ready: Callable[[str], None]) -> None:
    told = asyncio.Event()
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, told.set)
    server = await listen(methods, LOOPBACK, port)
    on_ready(url_of(server))
    await told.wait()
    server.close()
