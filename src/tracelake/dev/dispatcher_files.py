"""Which Dispatchers run on a home, and the one whose address stands in ``dispatcher.json``.

    dispatchers/PID.json   how to reach the Dispatcher with that process id
    dispatchers/PID.lock   locked while it lives; the kernel unlocks it, however it ends
    dispatcher.json        a copy of one that lives

Several may run on one home, and each comes and goes as it likes. ``dispatcher.json`` stays with the one that it
names for as long as that lives. When it ends, the address of another one takes its place: at once if it ended in
order, and at the others' next look if it was killed. With the last one the file goes.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tracelake.dev.handle import DISPATCHER_FILE, DispatcherHandle, read_handle, remove_handle, write_handle
from tracelake.domain.errors import Invalid, Unavailable

_FOLDER = "dispatchers"
_TURN_SECONDS = 1.0
_POLL = 0.01


def own_file(home: Path, pid: int) -> Path:
    return home / _FOLDER / f"{pid}.json"


class DispatcherFiles:
    """Those of this process, which ``publish`` writes and ``withdraw`` removes."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._own = own_file(home, os.getpid())
        self._lock = -1

    def publish(self, handle: DispatcherHandle) -> None:
        with _taking_turns(self._home):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                self._lock = os.open(_lock_of(self._own), flags, 0o600)
            except OSError as error:
                raise Unavailable("HandleUnwritable", f"can't write {self._own}: {error.strerror}") from None
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            write_handle(self._own, handle)
            _settle(self._home)

    def withdraw(self) -> None:
        if self._lock < 0:
            return
        with _taking_turns(self._home):
            remove_handle(self._own)
            remove_handle(_lock_of(self._own))
            os.close(self._lock)
            self._lock = -1
            _settle(self._home)


def settle(home: Path) -> None:
    """See to it that ``dispatcher.json`` names one that lives, or isn't there; what the dead left is removed."""
    if (home / _FOLDER).is_dir() or (home / DISPATCHER_FILE).exists():
        with _taking_turns(home):
            _settle(home)


def _settle(home: Path) -> None:
    living = {}
    for file in sorted((home / _FOLDER).glob("*.json")):
        if not _lives(file):
            remove_handle(file)
            remove_handle(_lock_of(file))
        elif handle := _read(file):
            living[handle.pid] = handle
    named = _read(home / DISPATCHER_FILE)
    if named is not None and living.get(named.pid) == named:
        return
    if living:
        write_handle(home / DISPATCHER_FILE, next(iter(living.values())))
    else:
        remove_handle(home / DISPATCHER_FILE)


def _read(file: Path) -> DispatcherHandle | None:
    """One that nobody could use is none."""
    try:
        return read_handle(file, DispatcherHandle)
    except Invalid:
        return None


def _lock_of(file: Path) -> Path:
    return file.with_suffix(".lock")


def _lives(file: Path) -> bool:
    try:
        lock = os.open(_lock_of(file), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared, so that two who look at once don't take each other for the living.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def _taking_turns(home: Path) -> Iterator[None]:
    """Two that come and go at once would each see the other halfway. One that stands still holds nobody up: what it
    was about to write is put right at the next look."""
    try:
        (home / _FOLDER).mkdir(mode=0o700, exist_ok=True)
        turn = os.open(home / _FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise Unavailable("HandleUnwritable", f"can't write in {home}: {error.strerror}") from None
    try:
        deadline = time.monotonic() + _TURN_SECONDS
        while not _is_locked(turn) and time.monotonic() < deadline:
            time.sleep(_POLL)
        yield
    finally:
        os.close(turn)


def _is_locked(turn: int) -> bool:
    try:
        fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
