"""The keeper of one process that the host starts: the init of its namespaces, and the hand that shows it objects.

A keeper is a fork of the host and keeps the host's power; the process is a fork of the keeper that has dropped all
of it. The two are alone in their namespaces. So a process can neither see, signal nor trace that of another job,
nor the Spark server; and when it ends, the keeper does, and with it whatever it left behind.

The process sees a machine that it can't write to, a folder of its own, and an empty object root. What an attempt
may read or write of the objects is mounted there by its keeper, when the wrapper says so, and taken away
afterwards:

    Grant      a folder below the object root appears, read-only unless it is the attempt's own
    Withdraw   what could be written becomes read-only, also for whoever has a folder open there, which the kernel
               refuses as long as a file is open or mapped for writing; then it is out of sight

Without namespaces all that is left of this is the end of everything together with its keeper.
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

from tracelake.accounts import Account, group_text, passwd_text
from tracelake.worker.host import kernel, namespaces
from tracelake.worker.host.identity import become
from tracelake.worker.host.private_view import Step
from tracelake.worker.host.process_tree import kill_children
from tracelake.worker.host.protocol import (
    Born,
    Done,
    Ended,
    FromKeeper,
    Grant,
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
class View:
    """What is the same for all processes. ``own`` are the steps that are taken for each of them."""

    namespaces: bool
    object_root: Path
    work_folder: Path
    own: Sequence[Step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One process: whom it runs as, in which folder, and what it does. ``start`` may use ``descriptors``."""

    account: Account | None
    folder: Path
    descriptors: Sequence[int]
    start: Callable[[], None]
    sees_datasets: bool = False


def keep(view: View, kept: Kept, line: socket.socket, parent: int) -> NoReturn:
    """For a process that the host has just forked, the first one of a new process namespace if there are any."""
    gc.disable()
    # Of signals that have no handler the kernel lets none through to an init; Python has one for this.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel.die_with_parent()
    if not view.namespaces and os.getppid() != parent:
        os._exit(FAILED)
    objects: Objects | None = None
    if view.namespaces:
        namespaces.enter_own()
        namespaces.mount_proc()
        objects = _arrange(view, kept)
    kernel.adopt_orphans()
    pid = os.fork()
    if pid == 0:
        _become(kept, line)
    for descriptor in kept.descriptors:
        os.close(descriptor)
    _Keeper(pid, line, objects).serve()
    if not view.namespaces:
        kill_children()
    os._exit(0)


def _become(kept: Kept, line: socket.socket) -> NoReturn:
    """Nothing of the keeper's is left: no descriptor, no power."""
    try:
        parent = os.getppid()
        line.detach()
        _close_all_but(kept.descriptors)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        become(kept.account)
        kernel.die_with_parent()
        if os.getppid() != parent:
            os._exit(FAILED)
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
    def __init__(self, pid: int, line: socket.socket, objects: Objects | None) -> None:
        self._pid = pid
        self._line = line
        self._objects = objects
        self._status: int | None = None

    def serve(self) -> None:
        """Until the process has ended, or nobody wants it any more."""
        handle = os.pidfd_open(self._pid)
        self._say(Born(), [handle])
        ready = select.poll()
        ready.register(handle, select.POLLIN)
        ready.register(self._line, select.POLLIN)
        while self._status is None:
            events = dict(ready.poll(_REAP_MS))
            if self._line.fileno() in events:
                order = read_to_keeper(self._line)
                if order is None:
                    return
                self._say(self._obey(order))
            self._reap()
        self._say(Ended(self._status))

    def _obey(self, order: ToKeeper) -> Done:
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
        """Also who was left to us by those that have ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._pid:
                self._status = os.waitstatus_to_exitcode(status)

    def _say(self, message: FromKeeper, descriptors: Sequence[int] = ()) -> None:
        with suppress(OSError, msgspec.MsgspecError):
            send_packet(self._line, message, descriptors)


class Objects:
    """The object root as one process sees it: empty, but for what it is shown.

    Four mounts lie there one upon another: the objects, to be written to; the same, to be read; the folders that
    lead to what is shown, to be written to; and these, to be read, which is all that the process ever sees. The
    others are reached by descriptors that only the keeper has.
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
        """False when something there is open for writing."""
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
        """Makes the folders on the way, unless they are part of something that is shown."""
        try:
            os.close(_open_below(self._seen, parts))
            return
        except FileNotFoundError:
            pass
        for depth in range(1, len(parts) + 1):
            with suppress(FileExistsError):
                os.mkdir("/".join(parts[:depth]), 0o755, dir_fd=self._leading)


def _arrange(view: View, kept: Kept) -> Objects:
    try:
        if kept.account is not None:
            _name(kept.account)
        folder = os.open(kept.folder, _FOLDER)
        namespaces.arrange(view.own, scratch=kept.folder / TEMPORARY)
        objects = Objects(view.object_root)
        if kept.sees_datasets:
            objects.show_datasets()
        _show_only(folder, kept.folder, view.work_folder)
        os.close(folder)
        return objects
    except OSError as error:
        raise namespaces.NoNamespaces(error) from None


def _show_only(folder: int, path: Path, within: Path) -> None:
    """Of the folders that processes have, this one."""
    kernel.mount("tmpfs", str(within), "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    path.mkdir()
    namespaces.bind(folder, str(path))
    namespaces.remount(str(path), read_only=False)
    namespaces.remount(str(within), read_only=True)


def _name(account: Account) -> None:
    """Programs that look up whom they run as find a name; of the machine's other accounts they see none."""
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
    kernel.unmount(str(memory))


def _parts(place: str) -> list[str]:
    parts = place.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise OSError(errno.EINVAL, f"not a place below the object root: {place!r}")
    return parts


def _open_below(root: int, parts: Sequence[str]) -> int:
    """Through no link."""
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
