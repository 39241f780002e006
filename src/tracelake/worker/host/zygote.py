"""The zygote: one process with everything imported, of which each operator process is a copy.

It runs no code of anybody but ours and of the libraries that we import: what operators bring is loaded by the
processes that run it. So it may keep the power that it takes to give each of them namespaces, an identity and a
folder of their own (``keeper``). It has no threads, so a fork is safe; what it preloads must start none. Without
namespaces it adopts what processes leave behind, and kills whatever child isn't one that it was asked for. ``Gone``
is said when nothing is left. Leftovers that multiply faster than they can be killed take the zygote with them, and
so the whole view.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from tracelake.domain.errors import Invalid
from tracelake.operators.registry import Registry
from tracelake.worker.host import kernel, namespaces, preload
from tracelake.worker.host.hosted_start import become_operator, become_program
from tracelake.worker.host.keeper import FAILED, Kept, View, keep
from tracelake.worker.host.operator_environment import clear_environment, describe, needed_paths
from tracelake.worker.host.process_tree import children_of, kill_children
from tracelake.worker.host.protocol import (
    MAX_PACKET,
    Failed,
    FromHost,
    Gone,
    Kill,
    Place,
    Program,
    Setup,
    Spawn,
    Spawned,
    ToHost,
    Up,
    read_to_host,
    send_packet,
)
from tracelake.worker.host.provers import (
    Proof,
    Prover,
    hear_all,
    operators_of,
    prove_source,
    prove_view,
    viewed_by,
)

_ORPHAN_SCAN_MS = 1000
_LEFTOVERS_SECONDS = 10.0
_NO_NAMESPACES = 71
_UNSEALED = (
    "user namespaces can't be forbidden to operators here (/proc/sys is read-only): each attempt gets a process"
    " of its own, and what runs on Spark could keep a way to write to files that it has written"
)


def run(setup: Setup, view: View, control: socket.socket) -> None:
    """Until the wrapper is gone."""
    if setup.namespaces:
        namespaces.mount_proc()
        # Otherwise it must live on for a moment, to kill what the kernel wouldn't.
        kernel.die_with_parent()
    kernel.adopt_orphans()
    clear_environment()
    registry = preload.preload(spark=setup.preload_spark)
    gc.collect()
    gc.freeze()
    zygote = Zygote(control, registry, view)
    warnings = []
    sealed = os.geteuid() == 0 or not setup.namespaces or namespaces.allow_no_more_users()
    if not sealed:
        warnings.append(_UNSEALED)
    proof = zygote.prove(setup)
    if not setup.namespaces:
        # What the first processes have left, and no keeper's end has ended.
        kill_children()
    up = Up(
        view=describe(setup),
        warnings=[*warnings, *proof.warnings],
        operators=proof.operators,
        failed=proof.failed,
        sealed=sealed,
    )
    if len(msgspec.json.encode(up)) > MAX_PACKET:
        raise Invalid("OperatorHostRefused", "there are more operators than a host can tell of")
    send_packet(control, up)
    try:
        zygote.serve()
    except BrokenPipeError:
        pass
    finally:
        if not setup.namespaces:
            kill_children()


@dataclass(slots=True)
class _Child:
    """``status`` once it has ended, and when that was."""

    pid: int
    status: int | None = None
    ended_at: float = 0.0


class Zygote:
    def __init__(self, control: socket.socket, registry: Registry, view: View) -> None:
        self._control = control
        self._registry = registry
        self._view = view
        self._children: dict[int, _Child] = {}
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            end.setblocking(False)
        # By the kernel's word: it makes one process the first of a new namespace, and then none more.
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if view.namespaces else -1

    def prove(self, setup: Setup) -> Proof:
        """By processes like those of the operators, all at once: one for the view, one for each source."""
        # Whoever can't reach a path can't even tell that it exists.
        needed = needed_paths(setup)
        started: list[Prover] = []
        try:
            view = self._prover(
                None, Place(setup.folder, setup.account), partial(prove_view, setup, needed), started
            )
            for source, place in zip(setup.operators, setup.provers, strict=True):
                self._prover(source, place, partial(prove_source, source, place.folder), started)
            hear_all(started)
        except OSError as error:
            raise namespaces.NoNamespaces(error) from None
        finally:
            statuses = [self._end_prover(prover) for prover in started]
        if _NO_NAMESPACES in statuses:
            raise namespaces.NoNamespaces(OSError(errno.EPERM, "one within another isn't allowed"))
        viewed = viewed_by(view)
        if viewed is None:
            # What it said to standard error says why.
            raise SystemExit(FAILED)
        if viewed.refused is not None:
            raise Invalid("OperatorHostRefused", viewed.refused)
        operators, failed = operators_of(self._registry.origins, started[1:])
        return Proof(warnings=viewed.warnings, operators=operators, failed=failed)

    def _prover(
        self, source: str | None, place: Place, prove: Callable[[int], NoReturn], started: list[Prover]
    ) -> Prover:
        """Adds itself to ``started``, whose ends of the pipes are for nobody but us."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        kept = Kept(
            account=place.account,
            folder=Path(place.folder),
            descriptors=[write],
            start=lambda: prove(write),
        )
        before = [read, ours.fileno(), *(each for prover in started for each in prover.descriptors)]
        try:
            pid = self._fork(kept, theirs, before=before)
        finally:
            os.close(write)
        prover = Prover(source, pid, read, ours)
        started.append(prover)
        return prover

    def _end_prover(self, prover: Prover) -> int:
        """With all that it has left, whether it is done or not. How it ended, unless it was by us."""
        prover.close()
        with suppress(ProcessLookupError):
            os.kill(prover.pid, signal.SIGKILL)
        _, status = os.waitpid(prover.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake_end.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ready = select.poll()
        for sock in (self._control, self._wake):
            ready.register(sock, select.POLLIN)
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
        unburied = any(child.status is not None for child in self._children.values())
        return _ORPHAN_SCAN_MS if unburied else None

    def _obey(self, order: ToHost, descriptors: list[int]) -> None:
        try:
            match order:
                case Spawn() | Program():
                    self._start(order, *descriptors)
                case Kill(key):
                    if (child := self._children.get(key)) is not None and child.status is None:
                        with suppress(ProcessLookupError):
                            os.kill(child.pid, signal.SIGKILL)
                case Setup():
                    raise ValueError("set up twice")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, order: Spawn | Program, descriptor: int, line: int) -> None:
        match order:
            case Spawn():
                kept = Kept(
                    account=order.account,
                    folder=Path(order.folder),
                    descriptors=[descriptor],
                    start=lambda: become_operator(order, descriptor, self._registry),
                )
            case Program():
                kept = Kept(
                    account=order.account,
                    folder=Path(order.folder),
                    descriptors=[descriptor],
                    start=lambda: become_program(order, descriptor),
                    sees_datasets=True,
                )
        try:
            pid = self._fork(kept, socket.socket(fileno=os.dup(line)))
        except OSError as error:
            self._say(Failed(order.key, f"can't fork: {error.strerror}"))
            return
        self._children[order.key] = _Child(pid)
        handle = os.pidfd_open(pid)
        try:
            self._say(Spawned(order.key), [handle])
        finally:
            os.close(handle)

    def _fork(self, kept: Kept, line: socket.socket, before: Sequence[int] = ()) -> int:
        """The child becomes the keeper, which needs neither ``before`` nor anything of ours."""
        parent = os.getpid()
        if self._own >= 0:
            kernel.unshare(kernel.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0 and self._own >= 0:
                kernel.enter_namespace(self._own, kernel.CLONE_NEWPID)
        if pid == 0:
            self._become(kept, line, parent, before)
        line.close()
        return pid

    def _become(self, kept: Kept, line: socket.socket, parent: int, before: Sequence[int]) -> None:
        """Never returns."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for own in (self._control, self._wake, self._wake_end):
                own.close()
            for descriptor in (*before, *([self._own] if self._own >= 0 else [])):
                os.close(descriptor)
            keep(self._view, kept, line, parent)
        except namespaces.NoNamespaces as error:
            sys.stderr.write(f"{error.message}\n")
            sys.stderr.flush()
            os._exit(_NO_NAMESPACES)
        except BaseException as error:
            sys.stderr.write(f"a process of the operator host failed: {type(error).__name__}: {error}\n")
            sys.stderr.flush()
        finally:
            os._exit(FAILED)

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
