"""A sandbox that runs: wait for it, or end it. Either way nothing of it is left when the call returns.

The first process inside is the init of a PID namespace. The kernel ends the namespace's other processes before it
lets go of that one, so its descriptor says when the last of them is gone, the ones that were forked away included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import Callable

from tracelake.worker.sandbox import orphans
from tracelake.worker.sandbox.cgroups import Cgroup, empty_and_remove
from tracelake.worker.sandbox.spec import EndReason, SandboxExit


class SandboxedProcess:
    def __init__(
        self,
        bwrap: Process,
        init: int,
        listeners: tuple[socket.socket, ...],
        status: int,
        cgroup: Cgroup | None,
        released: Callable[[], None],
    ) -> None:
        self.pid = bwrap.pid
        self.listeners = listeners
        self._bwrap = bwrap
        self._init = init
        self._init_number = orphans.number_of(init)
        self._status = status
        self._cgroup = cgroup
        self._released = released
        self._killed = False
        self._ended = asyncio.ensure_future(self._watch())

    async def wait(self) -> SandboxExit:
        return await asyncio.shield(self._ended)

    async def kill(self) -> SandboxExit:
        """No grace: what a sandbox runs is not to be trusted with a last word."""
        if not self._ended.done():
            self._killed = True
            self._kill_init()
            with contextlib.suppress(ProcessLookupError):
                self._bwrap.kill()
        return await self.wait()

    def _kill_init(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if sys.platform == "linux":
                signal.pidfd_send_signal(self._init, signal.SIGKILL)

    async def _watch(self) -> SandboxExit:
        try:
            returncode = await self._bwrap.wait()
            self._kill_init()
            await _until_readable(self._init)
            orphans.reap(self._init_number, self.pid)
            return self._how_it_ended(returncode)
        finally:
            if self._cgroup is not None:
                await empty_and_remove(self._cgroup)
            for listener in self.listeners:
                listener.close()
            os.close(self._init)
            os.close(self._status)
            self._released()

    def _how_it_ended(self, returncode: int) -> SandboxExit:
        """bubblewrap's own report is preferred to its exit code, which is missing when it was killed itself."""
        told = _read_status(self._status)
        code = told if told is not None else returncode if returncode >= 0 else 128 - returncode
        if code != 0 and self._cgroup is not None and self._cgroup.out_of_memory():
            return SandboxExit(code, EndReason.OUT_OF_MEMORY)
        if self._killed:
            return SandboxExit(code, EndReason.KILLED)
        if code == 128 + signal.SIGXCPU:
            return SandboxExit(code, EndReason.OUT_OF_CPU_TIME)
        return SandboxExit(code, EndReason.SIGNALED if code > 128 else EndReason.EXITED)

    def __repr__(self) -> str:
        return f"SandboxedProcess({self.pid})"


def _read_status(descriptor: int) -> int | None:
    """The pipe holds two short lines at most and nobody inside can write to it."""
    os.set_blocking(descriptor, False)
    try:
        lines = os.read(descriptor, 65536).splitlines()
    except BlockingIOError:
        return None
    for line in lines:
        code = json.loads(line).get("exit-code")
        if isinstance(code, int):
            return code
    return None


async def _until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
