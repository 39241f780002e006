"""What a function prints, brought to the log of the attempt that it runs for.

An environment has one pipe for its whole life, and serves one attempt after the other. Everything that was
written before the function answered is in the pipe by then; so when it has answered, the pipe is read until it is
empty, and only then does the next attempt's log take over. Between two attempts what comes is dropped. A log that
is slow to take it makes the pipe full and the function wait, never the invoker.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios

_CHUNK = 64 * 1024
_DRAIN_BYTES = 1024 * 1024
"""More than fits into a pipe: beyond it, somebody goes on writing after the end."""
_PATIENT_TURNS = 100


class FunctionOutput:
    def __init__(self) -> None:
        self._reader, self.write_fd = os.pipe()
        os.set_blocking(self._reader, False)
        self._sink: int | None = None
        self._changed = asyncio.Event()
        self._taken = 0
        self._passing = False
        self._pump = asyncio.create_task(self._run())

    def attach(self, sink: int) -> None:
        """From now on to ``sink``, a descriptor that stays its owner's to close."""
        os.set_blocking(sink, False)
        self._sink = sink

    async def detach(self) -> None:
        """Returns when all that was written so far has been passed on."""
        limit = self._taken + _DRAIN_BYTES
        while self._taken < limit and not self._pump.done() and (_unread(self._reader) or self._passing):
            self._changed.clear()
            await self._changed.wait()
        # The log's owner reads in this event loop too; what it says next must come after what was printed.
        for _ in range(_PATIENT_TURNS):
            if self._sink is None or not _unread(self._sink):
                break
            await asyncio.sleep(0)
        self._sink = None

    def started(self) -> None:
        """The process has its copy of the pipe; without ours, its end is seen."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    async def close(self) -> None:
        self.started()
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        os.close(self._reader)

    async def _run(self) -> None:
        try:
            while True:
                self._passing = False
                self._changed.set()
                await _until(self._reader, write=False)
                self._passing = True
                data = os.read(self._reader, _CHUNK)
                if not data:
                    return
                self._taken += len(data)
                await self._pass_on(data)
        finally:
            self._changed.set()

    async def _pass_on(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and self._sink is not None:
            try:
                rest = rest[os.write(self._sink, rest) :]
            except BlockingIOError:
                await _until(self._sink, write=True)
            except OSError:
                return


def _unread(pipe: int) -> bool:
    waiting: int = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0]
    return waiting > 0


async def _until(descriptor: int, *, write: bool) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if write else (loop.add_reader, loop.remove_reader)

    def is_ready() -> None:
        if not ready.done():
            ready.set_result(None)

    add(descriptor, is_ready)
    try:
        await ready
    finally:
        remove(descriptor)
