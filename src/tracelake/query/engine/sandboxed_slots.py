"""Slots in bubblewrap: a user, a file system, a network without a way out, and limits of their own.

Inside are the interpreter, its packages and this one, read-only; no file of anybody's data has a name there. What
spills goes to the sandbox's private ``/tmp``, which is memory and counts as such: the limit is the sum.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from tracelake.query.engine.limits import MIB, MOST_DESCRIPTORS, OTHER_DESCRIPTORS, OWN_BYTES, SlotLimits
from tracelake.query.engine.slot_process import (
    PACKAGE,
    PROGRAM,
    SlotProcess,
    arguments,
    library_folders,
)
from tracelake.worker.sandbox import (
    EndReason,
    ReadOnlyBind,
    Sandbox,
    SandboxedProcess,
    SandboxLimits,
    SandboxSpec,
)
from tracelake.worker.sandbox.layout import python_runtime

_CODE = "/opt/tracelake"
_FOLDER = "/tmp"
_PROCESSES = 64
_THREADS_OF_EACH = 8


class SandboxedSlots:
    confined = True

    def __init__(self, sandbox: Sandbox, limits: SlotLimits, program: str = PROGRAM) -> None:
        self._program = program
        self._sandbox = sandbox
        self._limits = limits
        self.description = f"sandbox: {sandbox.report}"

    async def start(self, stderr: int) -> SlotProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await self._sandbox.start(self._spec(theirs.fileno(), stderr))
        except BaseException:
            ours.close()
            raise
        return _Sandboxed(process, ours)

    async def close(self) -> None:
        await self._sandbox.close()

    def _spec(self, channel: int, stderr: int) -> SandboxSpec:
        python = python_runtime()
        libraries = {f"/opt/packages/{number}": folder for number, folder in enumerate(library_folders())}
        limits = self._limits
        setup = {"limits": limits, "folder": _FOLDER, "libraries": ["/opt"], "parent": 0}
        return SandboxSpec(
            argv=[
                python.executable,
                *arguments(self._program, msgspec.json.encode(setup), [_CODE, *libraries]),
            ],
            env=python.env,
            code=PACKAGE / "query" / "engine",
            runtime=[
                *python.binds,
                ReadOnlyBind(PACKAGE, f"{_CODE}/tracelake"),
                *(ReadOnlyBind(folder, target) for target, folder in libraries.items()),
            ],
            cwd="/",
            limits=SandboxLimits(
                memory_bytes=limits.memory_bytes + limits.spill_bytes + OWN_BYTES,
                processes=_PROCESSES + _THREADS_OF_EACH * limits.threads,
                open_files=MOST_DESCRIPTORS + OTHER_DESCRIPTORS,
                file_bytes=max(limits.spill_bytes, MIB),
                tmp_bytes=max(limits.spill_bytes, MIB),
            ),
            stdout=channel,
            stderr=stderr,
        )


class _Sandboxed:
    def __init__(self, process: SandboxedProcess, channel: socket.socket) -> None:
        self.channel = channel
        self._process = process
        self._killing: asyncio.Task[object] | None = None
        self.ended: asyncio.Future[EndReason] = asyncio.ensure_future(self._watch())

    def kill(self) -> None:
        if self._killing is None and not self.ended.done():
            self._killing = asyncio.ensure_future(self._process.kill())

    async def _watch(self) -> EndReason:
        return (await self._process.wait()).reason
