"""A process that the operator host runs for us, and its end.

The handle is a descriptor of the process itself, so that killing it never hits another one that got its number.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

HOST_GONE = -int(signal.SIGKILL)
"""The status of what ended together with its host."""


class Hosted:
    """``gone`` gets the exit status once the process and everything that it left behind has ended."""

    def __init__(self, key: int, handle: int, order_kill: Callable[[int], None]) -> None:
        self.key = key
        self.pid = _number(handle)
        self.gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._handle = handle
        self._order_kill = order_kill

    async def kill(self) -> None:
        """Idempotent. Once begun it is carried through, also when the caller doesn't wait for it."""
        if not self.gone.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            self._order_kill(self.key)
        await asyncio.shield(self.gone)

    async def over(self) -> None:
        """The process itself has ended, whether somebody says so or not."""
        loop = asyncio.get_running_loop()
        seen = asyncio.Event()
        loop.add_reader(self._handle, seen.set)
        try:
            await seen.wait()
        finally:
            loop.remove_reader(self._handle)

    def ended(self, status: int) -> None:
        if not self.gone.done():
            os.close(self._handle)
            self.gone.set_result(status)


class HostedProgram:
    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted

    @property
    def pid(self) -> int:
        return self._hosted.pid

    async def kill(self) -> None:
        await self._hosted.kill()

    async def wait(self) -> int:
        """The exit code, negative for a signal."""
        return await asyncio.shield(self._hosted.gone)


def _number(handle: int) -> int:
    """The process's number here, which isn't the one that it has in its own namespace; 0 if nobody tells."""
    try:
        with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as file:
            told = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return 0
    return max(0, int(told.get("Pid", "0")))
