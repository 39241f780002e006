"""The keeper of one process that the host starts: the init of its namespaces, which also mounts objects for it.

A keeper is a fork of the host and keeps the host's power; the process is a fork of the keeper that has dropped
all of it. The two are alone in their namespaces. So a process can neither see, signal nor trace a process of
another job or the Spark server; and when it ends, the keeper ends, and with it everything that the process left
behind.

The process sees a read-only machine, a folder of its own, and an empty object root. The keeper mounts there the
objects that an attempt may read or write, when the wrapper orders it, and unmounts them afterwards:

    Grant      a folder below the object root appears, read-only unless it is the attempt's own
    Withdraw   writable mounts become read-only, also for a process with a folder open there; the kernel refuses
               while a file is open or mapped for writing; then the folder disappears

Without namespaces only one promise is left: a process and its leftovers end together with its keeper.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, assert_never

import msgspec

from tracelake import kernel
from tracelake.kernel import kill_children
from tracelake.sandbox.accounts import Account, group_text, passwd_text
from tracelake.worker.host import namespaces
from tracelake.worker.host.identity import become
from tracelake.worker.host.private_view import Step
from tracelake.worker.host.protocol import (
    Done,
    FromKeeper,
    Grant,
    ProcessEnded,
    ProcessStarted,
    ToKeeper,
    Withdraw,
    read_to_keeper,
    send_packet,
)

FAILED = 70
TEMPORARY = "tmp"
_DATASETS = "dataset"
_REAP_MS = 1000
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class PrivateView:
    """The view that all processes share. ``own`` are the steps that are repeated for each of them."""

    namespaces: bool
    object_root: Path
    work_folder: Path
    own: Sequence[Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptProcess:
    """One process: its account, its folder and its work. ``start`` may use ``descriptors``."""

    account: Account | None
    folder: Path
    descriptors: Sequence[int]
    start: Callable[[], None]
    sees_datasets: bool = False


def keep(view: PrivateView, kept: KeptProcess, line: socket.socket, parent: int) -> NoReturn:
    """Become the keeper; for a process that the host has just forked, the first of a new process namespace if
    there are any."""
    # A collection would write to, and so copy, memory that is shared with the host.
    gc.disable()
    # The kernel doesn't deliver signals without a handler to an init, but Python installs one for SIGINT.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The first process of a process namespace has a parent outside, whose number it can't see.
    kernel.die_with_parent(None if view.namespaces else parent, exit_code=FAILED)
    objects: VisibleObjects | None = None
    if view.namespaces:
        namespaces.enter_own()
        namespaces.mount_proc()
        objects = _arrange(view, kept)
    kernel.adopt_orphans()
    pid = os.fork()
    if pid == 0:
        _become(kept, line)
    # The process alone holds them from here on, so that their end shows its own.
    for descriptor in kept.descriptors:
        os.close(descriptor)
    _Keeper(pid, line, objects).serve()
    if not view.namespaces:
        kill_children()
    os._exit(0)


def _become(kept: KeptProcess, line: socket.socket) -> NoReturn:
    """Become the kept process: keep no descriptor and no power of the keeper's."""
    try:
        parent = os.getppid()
        # Closed below with all others; a second close by the object could hit a number that is in use again.
        line.detach()
        _close_all_but(kept.descriptors)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        become(kept.account)
        kernel.die_with_parent(parent, exit_code=FAILED)
        gc.enable()
        kept.start()
    except BaseException as error:
        sys.stderr.write(f"a process of the operator host failed: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
    finally:
        os._exit(FAILED)


def _close_all_but(descriptors: Sequence[int]) -> None:
    begin = 3
    for descriptor in sorted(descriptors):
        os.closerange(begin, descriptor)
        begin = descriptor + 1
    os.closerange(begin, os.sysconf("SC_OPEN_MAX"))


class _Keeper:
    def __init__(self, pid: int, line: socket.socket, objects: VisibleObjects | None) -> None:
        self._pid = pid
        self._line = line
        self._objects = objects
        self._status: int | None = None

    def serve(self) -> None:
        """Serve orders until the process has ended or the wrapper has closed the line."""
        handle = os.pidfd_open(self._pid)
        self._send(ProcessStarted(), [handle])
        ready = select.poll()
        ready.register(handle, select.POLLIN)
        ready.register(self._line, select.POLLIN)
        while self._status is None:
            # No event announces an orphan that ends, so there is a look every second.
            events = dict(ready.poll(_REAP_MS))
            if self._line.fileno() in events:
                order = read_to_keeper(self._line)
                if order is None:
                    return
                self._send(self._handle(order))
            self._reap()
        self._send(ProcessEnded(self._status))

    def _handle(self, order: ToKeeper) -> Done:
        if self._objects is None:
            return Done(number=order.number)
        try:
            match order:
                case Grant(number, reads, writes):
                    for place in reads:
                        self._objects.show(place, writable=False)
                    for place in writes:
                        self._objects.show(place, writable=True)
                    return Done(number=number)
                case Withdraw(number, places, force):
                    busy = [place for place in places if not self._objects.hide(place, force=force)]
                    return Done(number=number, busy=busy)
                case _:
                    assert_never(order)
        except OSError as error:
            return Done(number=order.number, problem=str(error))

    def _reap(self) -> None:
        """Reap children, adopted ones included."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)

    def _send(self, message: FromKeeper, descriptors: Sequence[int] = ()) -> None:
        # The wrapper may be gone, which the line's end shows to `serve`.
        with suppress(OSError, msgspec.MsgspecError):
            send_packet(self._line, message, descriptors)


class VisibleObjects:
    """The object root as one process sees it: empty except for granted folders.

    Four mounts lie there on top of each other: the objects, writable; the objects, read-only; the folders that
    lead to granted ones, writable; and the same read-only, which is all that the process ever sees. The others
    are reached by descriptors that only the keeper has.
    """

    def __init__(self, root: Path) -> None:
        place = str(root)
        self._writable = os.open(place, _FOLDER)
        namespaces.bind(self._writable, place)
        namespaces.remount(place, read_only=True)
        self._readable = os.open(place, _FOLDER)
        kernel.mount("tmpfs", place, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=4m")
        self._leading = os.open(place, _FOLDER)
        namespaces.bind(self._leading, place)
        namespaces.remount(place, read_only=True)
        self._seen = os.open(place, _FOLDER)
        self._shown: dict[str, int] = {}

    def show(self, place: str, *, writable: bool) -> None:
        if place in self._shown:
            return
        parts = _parts(place)
        source = _open_below(self._writable if writable else self._readable, parts)
        parent = target = -1
        try:
            self._lead_to(parts)
            parent = _open_below(self._seen, parts[:-1])
            target = os.open(parts[-1], _FOLDER, dir_fd=parent)
            namespaces.bind(source, f"/proc/self/fd/{target}")
            # Opened anew: the first descriptor is of the folder below the mount.
            shown = os.open(parts[-1], _FOLDER, dir_fd=parent)
            if _identity(shown) != _identity(source):
                os.close(shown)
                raise OSError(errno.ESTALE, f"{place} was mounted elsewhere")
            self._shown[place] = shown
        finally:
            for descriptor in (source, parent, target):
                if descriptor >= 0:
                    os.close(descriptor)

    def hide(self, place: str, *, force: bool) -> bool:
        """Withdraw a folder; False when a file there is open for writing."""
        shown = self._shown.get(place)
        if shown is None:
            return True
        path = f"/proc/self/fd/{shown}"
        try:
            namespaces.remount(path, read_only=True)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            if not force:
                return False
        kernel.unmount(path)
        os.close(self._shown.pop(place))
        return True

    def show_datasets(self) -> None:
        with suppress(FileExistsError):
            os.mkdir(_DATASETS, 0o755, dir_fd=self._writable)
        self.show(_DATASETS, writable=False)

    def _lead_to(self, parts: Sequence[str]) -> None:
        """Make the parent folders, except for those inside a granted folder."""
        try:
            os.close(_open_below(self._seen, parts))
            return
        except FileNotFoundError:
            pass
        for depth in range(1, len(parts) + 1):
            with suppress(FileExistsError):
                os.mkdir("/".join(parts[:depth]), 0o755, dir_fd=self._leading)


def _arrange(view: PrivateView, kept: KeptProcess) -> VisibleObjects:
    try:
        if kept.account is not None:
            _name(kept.account)
        # Opened before a cover hides it.
        folder = os.open(kept.folder, _FOLDER)
        namespaces.arrange(view.own, scratch=kept.folder / TEMPORARY)
        objects = VisibleObjects(view.object_root)
        if kept.sees_datasets:
            objects.show_datasets()
        _show_only(folder, kept.folder, view.work_folder)
        os.close(folder)
        return objects
    except OSError as error:
        raise namespaces.NoNamespaces(error) from None


def _show_only(folder: int, path: Path, within: Path) -> None:
    """Hide the folders of other processes: below ``within`` only this one is visible."""
    kernel.mount("tmpfs", str(within), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    path.mkdir()
    namespaces.bind(folder, str(path))
    namespaces.remount(str(path), read_only=False)
    namespaces.remount(str(within), read_only=True)


def _name(account: Account) -> None:
    """Give the account a name for programs that look it up; other accounts of the machine aren't listed."""
    memory = namespaces.SHARED_MEMORY
    if not memory.is_dir():
        return
    kernel.mount("tmpfs", str(memory), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for path, text in (("/etc/passwd", passwd_text([account])), ("/etc/group", group_text([account]))):
        if os.path.isfile(path):
            file = memory / os.path.basename(path)
            file.write_text(text, encoding="ascii")
            file.chmod(0o444)
            kernel.mount(str(file), path, None, kernel.MS_BIND)
            namespaces.remount(path, read_only=True)
    # The two files stay mounted, and stay in memory, without the place that they were made in.
    kernel.unmount(str(memory))


def _parts(place: str) -> list[str]:
    parts = place.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise OSError(errno.EINVAL, f"not a place below the object root: {place!r}")
    return parts


def _open_below(root: int, parts: Sequence[str]) -> int:
    """Open a folder without following any link."""
    opened = os.dup(root)
    for part in parts:
        try:
            following = os.open(part, _FOLDER, dir_fd=opened)
        finally:
            os.close(opened)
        opened = following
    return opened


def _identity(descriptor: int) -> tuple[int, int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino, stat.S_IFMT(found.st_mode)
