"""Starts a program in bubblewrap, with the limits that this machine supports, and waits for its end or kills it.

One launcher waits in advance, so that a cold start doesn't pay for an interpreter. It is in a cgroup of its own
from the beginning, whose limits are set once the program is known. Sandboxes end with the worker, and with the
thread that started them: start them in the main thread. ``Sandbox`` proves that a sandbox holds here; this module
doesn't.

Nothing of a sandbox is left when ``wait`` or ``kill`` returns. Its first process is the init of a PID namespace.
The kernel ends the namespace's other processes before that one, so its pidfd shows when the last of them is gone,
daemons included.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tracelake import kernel
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.sandbox import launcher, layout, limits, seccomp
from tracelake.sandbox.accounts import HeldAccount, hold_account
from tracelake.sandbox.layout import EndReason, SandboxExit, SandboxSpec
from tracelake.sandbox.limits import Cgroup, CgroupParent, empty_and_remove

_START_SECONDS = 30.0
_LONGEST_REASON = 4096
_numbers = itertools.count(1)


class Bubblewrap:
    """Starts sandboxes with one program and one kind of limits. ``Sandbox`` proves that they hold."""

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
        kernel.take_orphans()

    async def start(self, spec: SandboxSpec) -> SandboxedProcess:
        layout.check_spec(spec)
        try:
            sources = layout.sources(spec)
        except OSError as error:
            raise Invalid(
                "SandboxSpecInvalid", f"a path to bind into the sandbox does not exist: {error}"
            ) from error
        hidden = layout.unreadable(sources) if self._as_root else None
        if hidden is not None:
            raise Invalid("SandboxSpecInvalid", f"{hidden} can't be read by the sandbox's user (chmod o+rX)")
        slot = await self._take_account() if self._as_root else None
        try:
            return await self._launch(spec, sources, slot)
        except BaseException as error:
            # Also after a cancellation: an account that isn't returned stays held until this process ends.
            if slot is not None:
                self._accounts.append(slot)
            if isinstance(error, OSError):
                raise Unavailable("SandboxFailed", f"the sandbox could not be set up: {error}") from error
            raise

    async def _take_account(self) -> HeldAccount:
        """A user for each sandbox, shared with no other sandbox or program: signals, quotas and file permissions
        keep them apart even where a namespace would not. It is reused after its sandbox has ended: finding
        another takes longer than starting a sandbox."""
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
                # Before the order: the launcher is in the group already,
                # so nothing that it starts runs without limits.
                if starter.cgroup is not None:
                    starter.cgroup.limit(spec.limits)
                given = starter.order(order, passed, len(spec.listen))
                init, listeners = await asyncio.wait_for(given, _START_SECONDS)
                # A copy of the descriptor: the stack closes its own.
                started = self._adopt(starter, init, listeners, os.dup(status_read), slot)
                # The program begins only now that its process is watched.
                os.write(block_write, b"x")
            except BaseException:
                # While the pipe is still open: a process that waits on it would take its end for the order to go
                # on.
                await starter.discard()
                raise
        starter.control.close()
        self.prepare()
        return started

    def prepare(self) -> None:
        """Start a launcher for the next sandbox."""
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
        # A launcher that waited may have been killed meanwhile.
        if starter.process.returncode is None:
            return starter
        await starter.discard()
        return await start_launcher(self._parent)

    async def close(self) -> None:
        """End all sandboxes that still run."""
        if self._closed:
            return
        self._closed = True
        spare, self._spare = self._spare, None
        if spare is not None:
            # A launcher that couldn't be started has left nothing to end.
            with contextlib.suppress(OSError):
                await (await spare).discard()
        await asyncio.gather(*(process.kill() for process in tuple(self._running)))
        # After the kills, which return accounts to the list.
        while self._accounts:
            self._accounts.pop().release()
        kernel.leave_orphans()


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


@dataclass(frozen=True, slots=True)
class Launcher:
    process: Process
    control: socket.socket
    cgroup: Cgroup | None

    async def order(
        self, order: bytes, descriptors: list[int], ports: int
    ) -> tuple[int, tuple[socket.socket, ...]]:
        """The pidfd of the sandbox's first process, which waits for our order to go on, and a listening socket
        for each port."""
        # The descriptors go with the length: the order itself may be larger than the socket's buffer.
        socket.send_fds(self.control, [len(order).to_bytes(4, "big")], descriptors)
        await asyncio.get_running_loop().sock_sendall(self.control, order)
        answer, received = await self._receive(1 + ports)
        if answer[:1] == launcher.READY and len(received) == 1 + ports:
            return received[0], tuple(socket.socket(fileno=descriptor) for descriptor in received[1:])
        for descriptor in received:
            os.close(descriptor)
        reason = answer[1:].decode(errors="replace") or "bubblewrap gave up"
        raise Unavailable("SandboxFailed", f"the sandbox could not be set up: {reason}")

    async def _receive(self, count: int) -> tuple[bytes, list[int]]:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self.control, readable.set)
        try:
            while True:
                await readable.wait()
                with contextlib.suppress(BlockingIOError):
                    answer, received, _, _ = socket.recv_fds(self.control, _LONGEST_REASON, count)
                    return answer, received
                readable.clear()
        finally:
            loop.remove_reader(self.control)

    async def discard(self) -> None:
        """End the launcher in any state, with everything that it has started."""
        self.control.close()
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                # The launcher leads a group of its own (start_new_session), and its helper is in it.
                os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()
        await asyncio.to_thread(kernel.reap_group, self.process.pid)
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
    """The interpreter of the virtual environment's base, which starts some milliseconds faster."""
    return str(getattr(sys, "_base_executable", None) or sys.executable)


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
        self._init_number = kernel.pid_of(init)
        self._status = status
        self._cgroup = cgroup
        self._released = released
        self._killed = False
        self._ended = asyncio.ensure_future(self._watch())

    async def wait(self) -> SandboxExit:
        # A waiter that is cancelled must not end the watch, which cleans up.
        return await asyncio.shield(self._ended)

    async def kill(self) -> SandboxExit:
        """Kill without grace: untrusted code gets no time for a graceful end."""
        if not self._ended.done():
            self._killed = True
            # Init first: the kernel ends everything else inside with it.
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
            # bubblewrap may have been killed itself; its init must not outlive it.
            self._kill_init()
            await _until_readable(self._init)
            if not kernel.reap_sandbox(self._init_number, self.pid):
                # On a busy machine a short program ends before the helper that set up its namespaces.
                await asyncio.to_thread(kernel.reap_group, self.pid)
            return self._how_it_ended(returncode)
        finally:
            if self._cgroup is not None:
                await empty_and_remove(self._cgroup)
            for listener in self.listeners:
                listener.close()
            os.close(self._init)
            os.close(self._status)
            # Last: from here on the account may be given to the next sandbox.
            self._released()

    def _how_it_ended(self, returncode: int) -> SandboxExit:
        """bubblewrap's own report comes before its exit code, which is missing when it was killed itself."""
        reported = _read_status(self._status)
        code = reported if reported is not None else returncode if returncode >= 0 else 128 - returncode
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
    """The pipe holds at most two short lines, and no process inside can write to it."""
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
