"""The zygote: one process with everything imported, of which each operator process is a copy.

It runs only our code and the libraries that we import: operators' own code is loaded by the processes that run
it. So it may keep the power to give each process namespaces, an identity and a folder of its own (``keeper``). It
has no threads, so a fork is safe; the libraries that it preloads must start none. Without namespaces it adopts
orphans and kills every child that it wasn't asked for. ``Gone`` is sent when nothing of a process is left.
Leftovers that multiply faster than they can be killed end the zygote, and so the whole view.

Preloaded are the built-in operators and their libraries. Configured sources and operators of installed packages
are imported by the processes that run them, since their import may do anything and the zygote is the template of
every process. For Spark, the Connect client is imported without opening a channel: gRPC's threads wouldn't
survive a fork.
"""

from __future__ import annotations

import errno
import gc
import importlib
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

from tracelake import kernel
from tracelake.domain.errors import Invalid
from tracelake.domain.operators.catalog import CATALOG
from tracelake.domain.operators.spec import Need
from tracelake.kernel import children_of, kill_children
from tracelake.operators.registry import BUILT_IN, Registry
from tracelake.worker.host import namespaces
from tracelake.worker.host.host_check import (
    CheckProcess,
    HostCheck,
    check_source,
    check_view,
    clear_environment,
    describe_view,
    needed_paths,
    operators_of,
    read_all,
    set_environment,
    viewed_by,
)
from tracelake.worker.host.keeper import FAILED, KeptProcess, PrivateView, keep
from tracelake.worker.host.protocol import (
    MAX_PACKET,
    FromHost,
    Gone,
    HostSetup,
    Kill,
    ProcessIdentity,
    Program,
    Spawn,
    Spawned,
    SpawnFailed,
    ToHost,
    Up,
    read_to_host,
    send_packet,
)
from tracelake.worker.operator.main import serve

_ORPHAN_SCAN_MS = 1000
_LEFTOVERS_SECONDS = 10.0
_NO_NAMESPACES = 71
_UNSEALED = (
    "user namespaces can't be forbidden to operators here (/proc/sys is read-only): each attempt gets a process"
    " of its own, and Spark code may keep write access to files that it wrote"
)
_SPARK = (
    "pandas",
    "pyarrow",
    "grpc",
    "pyspark.sql.connect.session",
    "pyspark.sql.connect.functions",
    "pyspark.sql.connect.dataframe",
    "tracelake.tables.spark_input",
    "tracelake.tables.spark_output",
    "tracelake.worker.spark.session",
)
_STDOUT, _STDERR = 1, 2


def run(setup: HostSetup, view: PrivateView, control: socket.socket) -> None:
    """Serve until the wrapper is gone."""
    if setup.namespaces:
        namespaces.mount_proc()
        # Without namespaces it must live on for a moment, to kill what the kernel wouldn't.
        kernel.die_with_parent()
    kernel.adopt_orphans()
    clear_environment()
    registry = preload(spark=setup.preload_spark)
    # Copies share this memory for as long as no collection writes to it.
    gc.collect()
    gc.freeze()
    zygote = Zygote(control, registry, view)
    warnings = []
    sealed = os.geteuid() == 0 or not setup.namespaces or namespaces.allow_no_more_users()
    if not sealed:
        warnings.append(_UNSEALED)
    checked = zygote.check_host(setup)
    if not setup.namespaces:
        # Leftovers of the first processes that didn't end with their keepers.
        kill_children()
    up = Up(
        view=describe_view(setup),
        warnings=[*warnings, *checked.warnings],
        operators=checked.operators,
        failed=checked.failed,
        sealed=sealed,
    )
    if len(msgspec.json.encode(up)) > MAX_PACKET:
        raise Invalid("OperatorHostRefused", "too many operators: their names don't fit one message")
    send_packet(control, up)
    try:
        zygote.serve()
    except BrokenPipeError:
        # The wrapper is gone, which is the usual end.
        pass
    finally:
        if not setup.namespaces:
            kill_children()


@dataclass(slots=True)
class _Child:
    """``status`` and the time of its end, once it has ended."""

    pid: int
    status: int | None = None
    ended_at: float = 0.0


class Zygote:
    def __init__(self, control: socket.socket, registry: Registry, view: PrivateView) -> None:
        self._control = control
        self._registry = registry
        self._view = view
        self._children: dict[int, _Child] = {}
        self._wake, self._wake_end = socket.socketpair()
        for end in (self._wake, self._wake_end):
            end.setblocking(False)
        # A process namespace has one first process, so each fork makes a new one; this leads back to our own.
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC) if view.namespaces else -1

    def check_host(self, setup: HostSetup) -> HostCheck:
        """Prove the view and load the sources, in processes like those of operators, all at the same time."""
        # A process that can't reach a path can't even find out that it exists.
        needed = needed_paths(setup)
        started: list[CheckProcess] = []
        try:
            view = self._start_check(
                None,
                ProcessIdentity(setup.folder, setup.account),
                partial(check_view, setup, needed),
                started,
            )
            for source, place in zip(setup.operators, setup.provers, strict=True):
                self._start_check(source, place, partial(check_source, source, place.folder), started)
            read_all(started)
        except OSError as error:
            raise namespaces.NoNamespaces(error) from None
        finally:
            statuses = [self._end_check(check) for check in started]
        if _NO_NAMESPACES in statuses:
            raise namespaces.NoNamespaces(OSError(errno.EPERM, "one within another isn't allowed"))
        viewed = viewed_by(view)
        if viewed is None:
            # Its standard error says why.
            raise SystemExit(FAILED)
        if viewed.refused is not None:
            raise Invalid("OperatorHostRefused", viewed.refused)
        operators, failed = operators_of(self._registry.origins, started[1:])
        return HostCheck(warnings=viewed.warnings, operators=operators, failed=failed)

    def _start_check(
        self,
        source: str | None,
        place: ProcessIdentity,
        run: Callable[[int], NoReturn],
        started: list[CheckProcess],
    ) -> CheckProcess:
        """Adds itself to ``started``; only the zygote may hold those ends of the pipes."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        kept = KeptProcess(
            account=place.account,
            folder=Path(place.folder),
            descriptors=[write],
            start=lambda: run(write),
        )
        before = [read, ours.fileno(), *(each for check in started for each in check.descriptors)]
        try:
            pid = self._fork(kept, theirs, before=before)
        finally:
            os.close(write)
        check = CheckProcess(source, pid, read, ours)
        started.append(check)
        return check

    def _end_check(self, check: CheckProcess) -> int:
        """End a check with all its leftovers; the result is its exit status, unless it ended by our kill."""
        check.close()
        with suppress(ProcessLookupError):
            os.kill(check.pid, signal.SIGKILL)
        _, status = os.waitpid(check.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def serve(self) -> None:
        signal.set_wakeup_fd(self._wake_end.fileno())
        # Only a handler in Python makes a signal show at the wakeup descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        ready = select.poll()
        for sock in (self._control, self._wake):
            ready.register(sock, select.POLLIN)
        while True:
            events = dict(ready.poll(self._patience()))
            if self._wake.fileno() in events or not events:
                with suppress(BlockingIOError):
                    self._wake.recv(4096)
                self._reap_leftovers()
            if self._control.fileno() in events:
                received = read_to_host(self._control)
                if received is None:
                    return
                self._handle(*received)

    def _patience(self) -> int | None:
        unburied = any(child.status is not None for child in self._children.values())
        return _ORPHAN_SCAN_MS if unburied else None

    def _handle(self, order: ToHost, descriptors: list[int]) -> None:
        try:
            match order:
                case Spawn() | Program():
                    self._start(order, *descriptors)
                case Kill(key):
                    # Once it is reaped, its number may belong to another process.
                    if (child := self._children.get(key)) is not None and child.status is None:
                        with suppress(ProcessLookupError):
                            os.kill(child.pid, signal.SIGKILL)
                case HostSetup():
                    raise ValueError("set up twice")
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _start(self, order: Spawn | Program, descriptor: int, line: int) -> None:
        match order:
            case Spawn():
                kept = KeptProcess(
                    account=order.account,
                    folder=Path(order.folder),
                    descriptors=[descriptor],
                    start=lambda: become_operator(order, descriptor, self._registry),
                )
            case Program():
                kept = KeptProcess(
                    account=order.account,
                    folder=Path(order.folder),
                    descriptors=[descriptor],
                    start=lambda: become_program(order, descriptor),
                    sees_datasets=True,
                )
        try:
            # A copy: `_handle` closes the one that it received.
            pid = self._fork(kept, socket.socket(fileno=os.dup(line)))
        except OSError as error:
            self._send(SpawnFailed(order.key, f"can't fork: {error.strerror}"))
            return
        self._children[order.key] = _Child(pid)
        handle = os.pidfd_open(pid)
        try:
            self._send(Spawned(order.key), [handle])
        finally:
            os.close(handle)

    def _fork(self, kept: KeptProcess, line: socket.socket, before: Sequence[int] = ()) -> int:
        """Fork a keeper, which needs neither ``before`` nor anything of the zygote's."""
        parent = os.getpid()
        if self._own >= 0:
            kernel.unshare(kernel.CLONE_NEWPID)
        pid = -1
        try:
            pid = os.fork()
        finally:
            # Also after a failed fork: the next child must not begin in an abandoned namespace.
            if pid != 0 and self._own >= 0:
                kernel.enter_namespace(self._own, kernel.CLONE_NEWPID)
        if pid == 0:
            self._become(kept, line, parent, before)
        line.close()
        return pid

    def _become(self, kept: KeptProcess, line: socket.socket, parent: int, before: Sequence[int]) -> None:
        """Never returns."""
        try:
            # A signal to the copy must not wake the zygote.
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

    def _reap_leftovers(self) -> None:
        self._reap()
        known = {child.pid for child in self._children.values() if child.status is None}
        leftovers = [pid for pid in children_of(os.getpid()) if pid not in known]
        for pid in leftovers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if leftovers:
            self._reap()
        ended = [key for key, child in self._children.items() if child.status is not None]
        if leftovers and any(self._overdue(key) for key in ended):
            raise RuntimeError(
                f"leftover processes of an operator could not be killed within {_LEFTOVERS_SECONDS:g} s"
            )
        if not leftovers:
            for key in ended:
                status = self._children.pop(key).status
                self._send(Gone(key, -1 if status is None else status))

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

    def _send(self, message: FromHost, descriptors: list[int] | None = None) -> None:
        send_packet(self._control, message, descriptors or ())


def preload(*, spark: bool) -> Registry:
    # Libraries that would start a thread per core when imported; the threads wouldn't run in the copies.
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    os.environ.update(single)
    try:
        if spark:
            _import_spark()
        registry = Registry.standard()
        for name in BUILT_IN:
            if spark or Need.SPARK not in CATALOG[name].needs:
                registry.get(name)
    finally:
        for name in single:
            os.environ.pop(name, None)
    return registry


def _import_spark() -> None:
    try:
        for name in _SPARK:
            importlib.import_module(name)
    except ImportError as error:
        raise Invalid(
            "SparkMissing",
            f"the Spark client can't be imported ({error}); install it: pip install 'tracelake[spark]'"
            f" for {sys.executable}",
        ) from None


def become_operator(order: Spawn, channel: int, registry: Registry) -> None:
    """Serve until the wrapper closes the channel. Orphans become this process's children, so that they are found.

    The operator's source is loaded here and not before: it could change any state of its process. So no other
    source's operators run in it, nor the built-in ones.
    """
    set_environment(order.folder)
    kernel.adopt_orphans()
    _reseed()
    if order.source is not None:
        registry = Registry.of(order.source)
    serve(socket.socket(fileno=channel), registry, work_folder=Path(order.folder), spark=order.spark)
    os._exit(0)


def become_program(program: Program, log: int) -> None:
    """Execute a program. One that can't be executed logs that and exits with 127, as in a shell."""
    os.dup2(log, _STDOUT)
    os.dup2(log, _STDERR)
    try:
        os.chdir(program.folder)
        os.execvpe(program.argv[0], program.argv, program.env)
    except OSError as error:
        os.write(_STDERR, f"can't execute {program.argv[0]}: {error.strerror}\n".encode())
        os._exit(127)


def _reseed() -> None:
    """Copies of one process must not draw the same random numbers; Python's own generator reseeds itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
