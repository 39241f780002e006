"""Function environments: one sandbox runs one function's runtime, for one event after another, and is kept warm.

An environment serves another event only if the last one went well: the runtime is still there, kept to the
protocol, and left no more processes behind than it had when it first asked for work. Otherwise it is ended.

``EnvironmentPool`` keeps idle environments for a while, each for its own function only. Busy ones belong to their
callers. Idle ones are limited in number, the least recently used going first, and in time. One that has ended, or
in which something went wrong, never returns.

``FunctionOutput`` copies a function's output to the log of the attempt that it runs for. An environment has one
pipe for its whole life. Everything that was written before the function answered is in the pipe by then, so it
is read until it is empty before the next attempt's log is attached. Output between two attempts is dropped. A
slow log makes the function wait, never the invoker.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import struct
import termios
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tracelake.kernel import children_of
from tracelake.sandbox.layout import MIB, EndReason, SandboxExit
from tracelake.trees import remove_if_possible
from tracelake.worker.lambda_.function_program import FunctionIdentity
from tracelake.worker.lambda_.runtime_api import Result, RuntimeApi, RuntimeCall

IDLE_SECONDS = 60.0
_SETTLE_SECONDS = 2.0
_SOON_SECONDS = 0.1
"""About the time of a cold start: an environment that is nearly free is waited for that long."""
StillGood = Callable[[FunctionIdentity], Awaitable[bool]]
_CHUNK = 64 * 1024
_DRAIN_BYTES = 1024 * 1024
"""More than fits into a pipe: beyond it, a process goes on writing after the end."""
_PATIENT_TURNS = 100


class RunningSandbox(Protocol):
    pid: int

    async def wait(self) -> SandboxExit: ...

    async def kill(self) -> SandboxExit: ...


@dataclass(frozen=True, slots=True)
class EnvironmentParts:
    """The parts of an environment, which end with it. ``called`` is written by the gateway: the last part of each
    path that the function has called since it got its event."""

    folder: Path
    process: RunningSandbox
    api: RuntimeApi
    output: FunctionOutput
    close_gateway: Callable[[], Awaitable[None]]
    called: set[str]


class Environment:
    def __init__(self, function: FunctionIdentity, made_of: EnvironmentParts) -> None:
        self.function = function
        self.output = made_of.output
        self.was_warm = False
        self.called = made_of.called
        self._folder = made_of.folder
        self._process = made_of.process
        self._api = made_of.api
        self._close_gateway = made_of.close_gateway
        self._at_first: int | None = None
        self._closing: asyncio.Task[None] | None = None
        self.when_ended: Callable[[], None] | None = None
        self._api.on_ask = self._note_ask
        self._watch = asyncio.create_task(self._until_ended())

    @property
    def usable(self) -> bool:
        return self._api.healthy and self._closing is None and not self._watch.done()

    async def invoke(self, call: RuntimeCall) -> Result:
        """Run one event; ``called`` holds afterwards the calls that the function made itself."""
        self.called.clear()
        return await self._api.invoke(call)

    async def waits_for_event(self, seconds: float) -> bool:
        """Whether the runtime asks for more within that time, with nothing left running beside it."""
        asked = await self._api.until_asked(seconds)
        return asked and self.usable and self._at_first is not None and self._processes() <= self._at_first

    async def close(self) -> None:
        """End the environment. Nothing of it is left when this returns, also for concurrent and repeated calls."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        # A caller that stops waiting must not stop the end of the environment.
        await asyncio.shield(self._closing)

    def _note_ask(self) -> None:
        if self._at_first is None:
            self._at_first = self._processes()

    def _processes(self) -> int:
        found, waiting = 0, [self._process.pid]
        while waiting:
            below = children_of(waiting.pop())
            found += len(below)
            waiting += below
        return found

    async def _until_ended(self) -> None:
        self._api.end(describe_end(await self._process.wait(), self.function))
        if self.when_ended is not None:
            self.when_ended()

    async def _close(self) -> None:
        await self._process.kill()
        await self._watch
        await self._close_gateway()
        await self.output.detach()
        await self.output.close()
        await asyncio.to_thread(remove_if_possible, self._folder)


def describe_end(ended: SandboxExit, function: FunctionIdentity) -> str:
    match ended.reason:
        case EndReason.OUT_OF_MEMORY:
            return f"out of memory: the function used more than {function.memory_bytes // MIB} MiB"
        case EndReason.OUT_OF_CPU_TIME:
            return "the function used up its CPU time"
        case EndReason.KILLED:
            return "the function was killed"
        case EndReason.SIGNALED:
            return f"the function's process was ended by signal {ended.returncode - 128}"
        case EndReason.EXITED:
            return f"the function's process ended by itself (exit code {ended.returncode})"


Start = Callable[[FunctionIdentity, int], Awaitable[Environment]]


class EnvironmentPool:
    """``start`` makes a new environment whose output goes to a descriptor; ``still_good`` checks that a
    function's bundle is unchanged."""

    def __init__(
        self, start: Start, still_good: StillGood, *, max_idle: int, idle_seconds: float = IDLE_SECONDS
    ) -> None:
        self._start = start
        self._still_good = still_good
        self._max_idle = max_idle
        self._idle_seconds = idle_seconds
        self._idle: list[tuple[float, Environment]] = []
        self._settling: dict[Environment, asyncio.Task[None]] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._reaper = asyncio.create_task(self._reap())

    async def take(self, function: FunctionIdentity, log_fd: int) -> Environment:
        """A warm environment, the most recently used first, or a new one; its output goes to ``log_fd``."""
        settling = [task for environment, task in self._settling.items() if environment.function == function]
        if settling and not self._has_idle(function):
            await asyncio.wait(settling, timeout=_SOON_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        while self._has_idle(function):
            environment = self._pop_idle(function)
            if environment.usable and await self._still_good(function):
                environment.output.attach(log_fd)
                return environment
            self._discard(environment)
        return await self._start(function, log_fd)

    def give_back(self, environment: Environment) -> None:
        """Return an environment. It is idle once its runtime has asked for the next event and left nothing
        behind."""
        environment.was_warm = True
        task = self._settling[environment] = self._do(self._settle(environment))
        task.add_done_callback(lambda _: self._settling.pop(environment, None))

    async def close(self) -> None:
        self._reaper.cancel()
        await asyncio.gather(self._reaper, return_exceptions=True)
        self._max_idle = 0
        # Environments that settle may still become idle, so it goes on until none does.
        while self._work or self._idle:
            for _, environment in self._idle:
                self._discard(environment)
            self._idle = []
            await asyncio.gather(*self._work, return_exceptions=True)

    def _has_idle(self, function: FunctionIdentity) -> bool:
        return any(environment.function == function for _, environment in self._idle)

    def _pop_idle(self, function: FunctionIdentity) -> Environment:
        index = max(n for n, (_, environment) in enumerate(self._idle) if environment.function == function)
        return self._idle.pop(index)[1]

    async def _settle(self, environment: Environment) -> None:
        if not await environment.waits_for_event(_SETTLE_SECONDS):
            await environment.close()
            return
        self._idle.append((asyncio.get_running_loop().time(), environment))
        environment.when_ended = lambda: self._ended(environment)
        while len(self._idle) > self._max_idle:
            self._discard(self._idle.pop(0)[1])

    def _ended(self, environment: Environment) -> None:
        """Clean up an idle environment that ended by itself."""
        if any(entry is environment for _, entry in self._idle):
            self._idle = [pair for pair in self._idle if pair[1] is not environment]
            self._discard(environment)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(self._idle_seconds / 4)
            oldest = asyncio.get_running_loop().time() - self._idle_seconds
            stale = [environment for since, environment in self._idle if since < oldest]
            self._idle = [(since, environment) for since, environment in self._idle if since >= oldest]
            for environment in stale:
                self._discard(environment)

    def _discard(self, environment: Environment) -> None:
        self._do(environment.close())

    def _do(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task


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
        """Send output to ``sink`` from now on, a descriptor that its owner closes."""
        os.set_blocking(sink, False)
        self._sink = sink

    async def detach(self) -> None:
        """Wait until everything written so far has been passed on."""
        limit = self._taken + _DRAIN_BYTES
        while self._taken < limit and not self._pump.done() and (_unread(self._reader) or self._passing):
            self._changed.clear()
            await self._changed.wait()
        # The log is read in this event loop too: the wrapper's next note must come after the function's output.
        for _ in range(_PATIENT_TURNS):
            if self._sink is None or not _unread(self._sink):
                break
            await asyncio.sleep(0)
        self._sink = None

    def started(self) -> None:
        """Close our copy of the pipe once the process has its own; otherwise its end wouldn't be seen."""
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
                # The log is closed: the rest has no reader.
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
