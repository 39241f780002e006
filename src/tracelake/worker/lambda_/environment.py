"""A function environment: one sandbox that runs one function's runtime, for one event after the other.

It is good for another event only if all went well with the last: the runtime is still there, kept to the protocol,
and left no more processes behind than it had when it first asked for work. Whatever else happened, it is ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tracelake.trees import remove_if_possible
from tracelake.worker.host.process_tree import children_of
from tracelake.worker.lambda_.function_output import FunctionOutput
from tracelake.worker.lambda_.function_program import FunctionIdentity
from tracelake.worker.lambda_.runtime_api import Result, RuntimeApi, RuntimeCall
from tracelake.worker.sandbox.spec import MIB, EndReason, SandboxExit


class RunningSandbox(Protocol):
    pid: int

    async def wait(self) -> SandboxExit: ...

    async def kill(self) -> SandboxExit: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What an environment is made of and takes with it when it ends. ``spoke`` is written to by the gateway: the
    last word of each path that the function has called since it got its event."""

    folder: Path
    process: RunningSandbox
    api: RuntimeApi
    output: FunctionOutput
    close_gateway: Callable[[], Awaitable[None]]
    spoke: set[str]


class Environment:
    def __init__(self, function: FunctionIdentity, made_of: Surroundings) -> None:
        self.function = function
        self.output = made_of.output
        self.was_warm = False
        self.spoke = made_of.spoke
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
        """What came of it; ``spoke`` tells afterwards what the function has said by itself."""
        self.spoke.clear()
        return await self._api.invoke(call)

    async def waits_for_event(self, seconds: float) -> bool:
        """Whether the runtime comes back for more within that time, with nothing left running beside it."""
        asked = await self._api.until_asked(seconds)
        return asked and self.usable and self._at_first is not None and self._processes() <= self._at_first

    async def close(self) -> None:
        """Nothing of it is left when this returns, whoever called first and however often."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
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
        self._api.end(describe(await self._process.wait(), self.function))
        if self.when_ended is not None:
            self.when_ended()

    async def _close(self) -> None:
        await self._process.kill()
        await self._watch
        await self._close_gateway()
        await self.output.detach()
        await self.output.close()
        await asyncio.to_thread(remove_if_possible, self._folder)


def describe(ended: SandboxExit, function: FunctionIdentity) -> str:
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
