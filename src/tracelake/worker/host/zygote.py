"""The zygote: one process with everything imported, of which each operator process is a copy.

It runs under the operators' identity and holds no secret. It has no threads, so a fork is safe; what it preloads
must start none. Every child runs in a session of its own and is killed with everything that it left behind:
operator processes adopt their orphans, the zygote adopts theirs when they end, and whatever child of the zygote
isn't one of those it was asked for is killed. ``Gone`` is said when nothing is left. Leftovers that multiply
faster than they can be killed take the zygote with them, and so the whole view.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from tracelake.operators.registry import Registry
from tracelake.worker.host import kernel, namespaces, preload
from tracelake.worker.host.hosted_start import become_operator, become_program
from tracelake.worker.host.identity import Account, become
from tracelake.worker.host.operator_environment import describe, needed_paths, set_environment, verify
from tracelake.worker.host.process_tree import children_of, kill_children
from tracelake.worker.host.protocol import (
    Failed,
    FromHost,
    Gone,
    Inspect,
    Inspected,
    Kill,
    Program,
    Setup,
    Spawn,
    Spawned,
    ToHost,
    Up,
    read_to_host,
    send_packet,
)

_ORPHAN_SCAN_MS = 1000
_LEFTOVERS_SECONDS = 10.0


def run(setup: Setup, account: Account | None, control: socket.socket) -> None:
    """Until the wrapper is gone."""
    if setup.namespaces:
        namespaces.mount_proc()
    # Whoever can't reach a path can't even tell that it exists.
    needed = needed_paths(setup)
    become(account)
    if setup.namespaces:
        # Otherwise it must live on for a moment, to kill what the kernel wouldn't.
        kernel.die_with_parent()
    kernel.adopt_orphans()
    warnings = verify(setup, account, needed)
    set_environment(setup)
    registry = preload.preload(setup.operators, spark=setup.preload_spark)
    gc.collect()
    gc.freeze()
    uid = None if account is None else account.uid
    view = describe(setup, account)
    send_packet(control, Up(view=view, warnings=warnings, uid=uid, operators=registry.names))
    try:
        Zygote(control, registry).serve()
    except BrokenPipeError:
        pass
    finally:
        if not setup.namespaces:
            kill_children()


@dataclass(slots=True)
class _Child:
    pid: int
    is_program: bool
    status: int | None = None
    ended_at: float = 0.0


class Zygote:
    def __init__(self, control: socket.socket, registry: Registry) -> None:
        self._control = control
        self._registry = registry
        self._children: dict[int, _Child] = {}
        self._wake, wake_end = socket.socketpair()
        for end in (self._wake, wake_end):
            end.setblocking(False)
        self._wake_end = wake_end
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_end.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        ready = select.poll()
        ready.register(self._control, select.POLLIN)
        ready.register(self._wake, select.POLLIN)
        while True:
            events = dict(ready.poll(self._patience()))
            if self._wake.fileno() in events or not events:
                with suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._bury()
            if self._control.fileno() in events:
                received = read_to_host(self._control)
                if received is None:
                    return
                self._obey(*received)

    def _patience(self) -> int | None:
        """Orphans of a program that lives on come to us without a signal; those of an operator go to it."""
        unburied = any(child.status is not None for child in self._children.values())
        programs = any(child.is_program for child in self._children.values())
        return _ORPHAN_SCAN_MS if unburied or programs else None

    def _obey(self, order: ToHost, descriptors: list[int]) -> None:
        try:
            match order:
                case Spawn(key):
                    self._fork(key, order, descriptors[0])
                case Program(key):
                    self._fork(key, order, descriptors[0])
                case Kill(key):
                    if (child := self._children.get(key)) is not None and child.status is None:
                        _kill_group(child.pid)
                case Inspect(key):
                    known = self._children.get(key)
                    count = 0 if known is None or known.status is not None else len(children_of(known.pid))
                    self._say(Inspected(key, count))
                case Setup():
                    raise ValueError("set up twice")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, key: int, order: Spawn | Program, descriptor: int) -> None:
        try:
            parent = os.getpid()
            pid = os.fork()
        except OSError as error:
            self._say(Failed(key, f"can't fork: {error.strerror}"))
            return
        if pid == 0:
            self._become(order, descriptor, parent)
        self._children[key] = _Child(pid, isinstance(order, Program))
        handle = os.pidfd_open(pid)
        try:
            self._say(Spawned(key), [handle])
        finally:
            os.close(handle)

    def _become(self, order: Spawn | Program, descriptor: int, parent: int) -> None:
        """Never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in (self._control, self._wake, self._wake_end):
                own.close()
            if isinstance(order, Spawn):
                become_operator(order, descriptor, parent, self._registry)
            else:
                become_program(order, descriptor, parent)
        except BaseException as error:
            sys.stderr.write(f"a process of the operator host failed: {type(error).__name__}: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(70)

    def _bury(self) -> None:
        self._reap()
        known = {child.pid for child in self._children.values() if child.status is None}
        strangers = [pid for pid in children_of(os.getpid()) if pid not in known]
        for pid in strangers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if strangers:
            self._reap()
        ended = [key for key, child in self._children.items() if child.status is not None]
        if strangers and any(self._overdue(key) for key in ended):
            raise RuntimeError("what an operator left behind can't be killed one by one")
        if not strangers:
            for key in ended:
                status = self._children.pop(key).status
                self._say(Gone(key, -1 if status is None else status))

    def _overdue(self, key: int) -> bool:
        return time.monotonic() - self._children[key].ended_at > _LEFTOVERS_SECONDS

    def _reap(self) -> None:
        by_pid = {child.pid: child for child in self._children.values() if child.status is None}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (child := by_pid.get(pid)) is not None:
                child.status = os.waitstatus_to_exitcode(status)
                child.ended_at = time.monotonic()

    def _say(self, message: FromHost, descriptors: list[int] | None = None) -> None:
        send_packet(self._control, message, descriptors or ())


def _kill_group(pid: int) -> None:
    """The group may not exist yet, when the process was forked a moment ago."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
