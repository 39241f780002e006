"""Handle files: the addresses and secrets of a running stack, for its users and for its own processes.

``dev.json`` belongs to the whole stack and exists only while all of it runs; ``dispatcher.json`` belongs to a
Dispatcher. Both hold secrets, so only their owner may read them, and they are replaced atomically: a process that
waits for one may read it as soon as it exists. A ready file holds the id of a process for as long as it takes
work.

Several Dispatchers may run on one home:

    dispatchers/PID.json   the handle of the Dispatcher with that process id
    dispatchers/PID.lock   locked while it lives; the kernel unlocks it, however it ends
    dispatcher.json        a copy of a living one's handle

``dispatcher.json`` keeps naming the same Dispatcher for as long as that lives. When it ends, another one's handle
takes its place: at once after an orderly end, at the others' next check after a kill. The last one removes the
file.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.durable_files import replace_private
from tracelake.stack_connection import DISPATCHER_FILE, read_handle

_FOLDER = "dispatchers"
_TURN_SECONDS = 1.0
_POLL = 0.01


class DispatcherHandle(msgspec.Struct, frozen=True):
    user_url: str
    internal_url: str
    user_token: str
    worker_token: str
    pid: int

    def __repr__(self) -> str:
        return f"DispatcherHandle({self.user_url}, {self.internal_url}, …)"


class DevHandle(msgspec.Struct, frozen=True, kw_only=True):
    """``query_url`` is the Query Service's, for tasks and for people. ``queue_dsn`` and ``data_write_dsn`` are for
    workers, ``data_read_dsn`` is for the Query Service and for people who look at hot tables; each logs in with a
    role that can do that and nothing else. ``operators`` are the sources that its own workers load, so that a
    worker started by hand can run the same tasks; ``rpc_pools`` is the file with the RPC pools if it isn't the
    home's. ``metrics`` has the address of each part's metrics for Prometheus."""

    user_url: str
    internal_url: str
    query_url: str
    worker_token: str
    user_token: str
    state_dsn: str
    data_owner_dsn: str = msgspec.field(name="data_dsn")
    queue_dsn: str
    data_write_dsn: str
    data_read_dsn: str
    object_root: str
    operators: tuple[str, ...] = ()
    rpc_pools: str | None = None
    pids: dict[str, int]
    metrics: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"DevHandle({self.user_url}, {self.internal_url}, …)"


class QueryHandle(msgspec.Struct, frozen=True):
    """The address of a Query Service; it holds no secrets."""

    url: str
    pid: int


class PrometheusTargets(msgspec.Struct, frozen=True):
    """An entry of a file for Prometheus's ``file_sd_configs``."""

    targets: list[str]
    labels: dict[str, str]


def write_targets(path: Path, metrics: Mapping[str, str]) -> None:
    """Write where Prometheus finds the parts' metrics; it reads the file again when it changes."""
    found = [PrometheusTargets([urlsplit(url).netloc], {"part": part}) for part, url in metrics.items()]
    replace_private(path, msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")


def write_handle(path: Path, handle: DispatcherHandle | DevHandle | QueryHandle) -> None:
    try:
        replace_private(path, msgspec.json.format(msgspec.json.encode(handle), indent=2) + b"\n")
    except OSError as error:
        raise Unavailable("HandleUnwritable", f"can't write {path}: {error.strerror}") from None


def remove_handle(path: Path) -> None:
    path.unlink(missing_ok=True)


def write_ready(file: Path | None) -> None:
    if file is not None:
        # Made anew: a link in its place must not be written through.
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as opened:
            opened.write(f"{os.getpid()}\n")


def is_ready(file: Path, pid: int) -> bool:
    """Whether this process, and not an earlier one, has written its id there."""
    try:
        return file.read_text().strip() == str(pid)
    except FileNotFoundError:
        return False


def own_file(home: Path, pid: int) -> Path:
    return home / _FOLDER / f"{pid}.json"


class DispatcherFiles:
    """The files of this process's Dispatcher: ``publish`` writes and ``withdraw`` removes them."""

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
            # Locked before the handle exists: a check in between would remove it as a dead one's.
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
    """Make ``dispatcher.json`` name a living Dispatcher, or remove it; files of dead ones are removed as well."""
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
    # The whole handle is compared, since the kernel gives process ids out again.
    if named is not None and living.get(named.pid) == named:
        return
    if living:
        write_handle(home / DISPATCHER_FILE, next(iter(living.values())))
    else:
        remove_handle(home / DISPATCHER_FILE)


def _read(file: Path) -> DispatcherHandle | None:
    """A damaged handle counts as none."""
    try:
        return read_handle(file, DispatcherHandle)
    except Invalid:
        return None


def _lock_of(file: Path) -> Path:
    return file.with_suffix(".lock")


def _lives(file: Path) -> bool:
    try:
        # flock belongs to the opened file, not to the process, so the check works for our own as well.
        lock = os.open(_lock_of(file), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # A shared lock: two processes that check at once must not mistake each other for the owner.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


@contextmanager
def _taking_turns(home: Path) -> Iterator[None]:
    """Let one process change the files at a time. The wait is bounded: if the holder is stopped, the files are put
    right at the next check."""
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
