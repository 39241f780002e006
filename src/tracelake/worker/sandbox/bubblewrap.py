"""Start a program in bubblewrap, with the limits that this machine can hold.

One launcher waits in advance, so that a cold start doesn't pay for an interpreter. Sandboxes end with the worker,
and with the thread that started them: start them in the main thread. Whether a sandbox holds here is proved by
``check``, and ``Sandbox`` is the way to have both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path

from tracelake.accounts import HeldAccount, hold_account
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.worker.sandbox import launcher, layout, limits, orphans, seccomp
from tracelake.worker.sandbox.cgroups import CgroupParent
from tracelake.worker.sandbox.launch import Launcher, start_launcher
from tracelake.worker.sandbox.process import SandboxedProcess
from tracelake.worker.sandbox.spec import SandboxSpec

_START_SECONDS = 30.0


class Bubblewrap:
    """Starts sandboxes by one program with one kind of limits. Proves nothing: that's ``Sandbox``'s part."""

    def __init__(self, program: Path, parent: CgroupParent | None) -> None:
        self._program = program
        self._parent = parent
        counted = parent is not None and "memory" in parent.folders
        self._memory_is_counted = counted
        self._filter = seccomp.build_filter(seccomp.machine(), memory_is_counted=counted)
        self._as_root = os.geteuid() == 0
        self._spare: asyncio.Task[Launcher] | None = None
        self._closed = False
        self._running: set[SandboxedProcess] = set()
        self._accounts: list[HeldAccount] = []
        orphans.take_orphans()

    async def start(self, spec: SandboxSpec) -> SandboxedProcess:
        layout.check_spec(spec)
        try:
            sources = layout.sources(spec)
        except OSError as error:
            raise Invalid(
                "SandboxSpecInvalid", f"what a sandbox should show is not there: {error}"
            ) from error
        hidden = layout.unreadable(sources) if self._as_root else None
        if hidden is not None:
            raise Invalid("SandboxSpecInvalid", f"{hidden} can't be read by the sandbox's user (chmod o+rX)")
        slot = await self._take_account() if self._as_root else None
        try:
            return await self._launch(spec, sources, slot)
        except BaseException as error:
            if slot is not None:
                self._accounts.append(slot)
            if isinstance(error, OSError):
                raise Unavailable("SandboxFailed", f"the sandbox could not be set up: {error}") from error
            raise

    async def _take_account(self) -> HeldAccount:
        """A user for each sandbox, shared neither with another one nor with anything else of the machine: signals,
        quotas and file permissions keep them apart even where a namespace would not. One whose sandbox has ended
        is given again: to look for another takes longer than to start a sandbox."""
        return self._accounts.pop() if self._accounts else await asyncio.to_thread(hold_account, "function")

    async def _launch(
        self, spec: SandboxSpec, sources: list[Path], slot: HeldAccount | None
    ) -> SandboxedProcess:
        order = json.dumps(self._order(spec, sources, slot)).encode()
        starter = await self._take_launcher()
        with contextlib.ExitStack() as descriptors:
            status_read, status_write = _pipe(descriptors)
            block_read, block_write = _pipe(descriptors)
            nothing = _closing(descriptors, os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
            program = _closing(descriptors, _memory_file(self._filter))
            out = nothing if spec.stdout is None else spec.stdout
            err = nothing if spec.stderr is None else spec.stderr
            passed = [out, err, program, status_write, block_read]
            try:
                if starter.cgroup is not None:
                    starter.cgroup.limit(spec.limits)
                given = starter.order(order, passed, len(spec.listen))
                init, listeners = await asyncio.wait_for(given, _START_SECONDS)
                started = self._adopt(starter, init, listeners, os.dup(status_read), slot)
                os.write(block_write, b"x")
            except BaseException:
                # While the pipe is still open: what waits on it would take its end for the word to go on.
                await starter.discard()
                raise
        starter.control.close()
        self.prepare()
        return started

    def prepare(self) -> None:
        """Have a launcher ready for the next start."""
        if self._spare is None and not self._closed:
            self._spare = asyncio.ensure_future(start_launcher(self._parent))

    def _adopt(
        self,
        starter: Launcher,
        init: int,
        listeners: tuple[socket.socket, ...],
        status: int,
        slot: HeldAccount | None,
    ) -> SandboxedProcess:
        def released() -> None:
            self._running.discard(started)
            if slot is not None:
                self._accounts.append(slot)

        started = SandboxedProcess(starter.process, init, listeners, status, starter.cgroup, released)
        self._running.add(started)
        return started

    def _order(self, spec: SandboxSpec, sources: list[Path], slot: HeldAccount | None) -> dict[str, object]:
        staged = [f"{launcher.STAGE}/{number}" for number in range(len(sources))]
        places = staged if slot is not None else [str(source) for source in sources]
        return {
            "program": str(self._program),
            "uid": None if slot is None else slot.uid,
            "sources": [str(source) for source in sources],
            "rlimits": limits.rlimits(spec.limits, memory_is_counted=self._memory_is_counted),
            "processes": limits.process_limit(spec.limits, own_user=slot is not None),
            "arguments": layout.arguments(spec, places),
            "files": list(layout.FILES.values()),
            "argv": list(spec.argv),
            "listen": list(spec.listen),
        }

    async def _take_launcher(self) -> Launcher:
        spare, self._spare = self._spare, None
        starter = await (spare if spare is not None else start_launcher(self._parent))
        if starter.process.returncode is None:
            return starter
        await starter.discard()
        return await start_launcher(self._parent)

    async def close(self) -> None:
        """End everything that still runs."""
        if self._closed:
            return
        self._closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(OSError):
                await (await spare).discard()
        await asyncio.gather(*(process.kill() for process in tuple(self._running)))
        while self._accounts:
            self._accounts.pop().release()
        orphans.leave_orphans()


def _pipe(stack: contextlib.ExitStack) -> tuple[int, int]:
    read, write = os.pipe()
    return _closing(stack, read), _closing(stack, write)


def _closing(stack: contextlib.ExitStack, descriptor: int) -> int:
    stack.callback(os.close, descriptor)
    return descriptor


def _memory_file(content: bytes) -> int:
    descriptor = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
