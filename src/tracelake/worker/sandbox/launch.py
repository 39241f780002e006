"""The worker's end of a launcher: start one in advance, give it its order, or do without it.

A launcher stands in a cgroup of its own from the beginning, with no limits yet; they are set when it is known what
it is to run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass

from tracelake.domain.errors import Unavailable
from tracelake.worker.sandbox import launcher, orphans
from tracelake.worker.sandbox.cgroups import Cgroup, CgroupParent, empty_and_remove

_LONGEST_REASON = 4096
_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Launcher:
    process: Process
    control: socket.socket
    cgroup: Cgroup | None

    async def order(
        self, order: bytes, descriptors: list[int], ports: int
    ) -> tuple[int, tuple[socket.socket, ...]]:
        """The sandbox's first process, which waits for our word, and a listening socket for each port."""
        socket.send_fds(self.control, [len(order).to_bytes(4, "big")], descriptors)
        await asyncio.get_running_loop().sock_sendall(self.control, order)
        said, received = await self._receive(1 + ports)
        if said[:1] == launcher.READY and len(received) == 1 + ports:
            return received[0], tuple(socket.socket(fileno=descriptor) for descriptor in received[1:])
        for descriptor in received:
            os.close(descriptor)
        reason = said[1:].decode(errors="replace") or "bubblewrap gave up"
        raise Unavailable("SandboxFailed", f"the sandbox could not be set up: {reason}")

    async def _receive(self, count: int) -> tuple[bytes, list[int]]:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self.control, readable.set)
        try:
            while True:
                await readable.wait()
                with contextlib.suppress(BlockingIOError):
                    said, received, _, _ = socket.recv_fds(self.control, _LONGEST_REASON, count)
                    return said, received
                readable.clear()
        finally:
            loop.remove_reader(self.control)

    async def discard(self) -> None:
        """Whatever has become of it, with all that it has started."""
        self.control.close()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await asyncio.to_thread(orphans.reap_group, self.process.pid)
        if self.cgroup is not None:
            await empty_and_remove(self.cgroup)


async def start_launcher(parent: CgroupParent | None) -> Launcher:
    cgroup = None if parent is None else parent.make(f"{os.getpid()}-{next(_numbers)}")
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    entrances = [] if cgroup is None else cgroup.entrances()
    try:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                _interpreter(),
                *("-I", "-S", "-B", launcher.__file__, str(theirs.fileno()), *entrances),
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=DEVNULL,
                env={},
                cwd="/",
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        if cgroup is not None:
            await empty_and_remove(cgroup)
        raise
    return Launcher(process, ours, cgroup)


def _interpreter() -> str:
    """The one beneath a virtual environment, which would cost some milliseconds to find its way."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)
