"""``Cluster``: one Postgres server with its own folder, for as long as this process lives.

    with Cluster(home / "state", name="state") as cluster:
        cluster.ensure_database("tracelake")
        connect(cluster.dsn("tracelake"))

A ``private`` cluster has no port: it listens on a socket in its data folder, which only its own account and the
user who started it can enter.

Commits survive a crash of the server, of this process and of the machine. No client gets in without a password,
and none from another machine. A restart keeps the DSN while the port is free. A folder has one launcher at a time:
a second one is refused (``ClusterInUse``) rather than attached, since stopping a shared server would stop it for
both. If this process is killed, the server shuts down.

Configuration files are written anew at every start and are the only place for settings (``ALTER SYSTEM`` is off),
so a cluster runs with the settings of this module: durable, loopback or a unix socket, SCRAM passwords, sized for
a laptop with two cores.

A start first clears what a crashed launcher or server left. Every Postgres process has its data folder as its
working folder, so the kernel knows who uses it; a pid file only shows who once did. With the folder's lock held no
launcher is alive, which leaves three cases:

- a server that is still shutting down because its launcher died: it is waited for, never signalled, since it may
  also be one that a person runs by hand;
- processes whose server was killed: they serve no client, hold its shared memory and forbid a new start (one in
  a long query for as long as that runs), so they are ended;
- a pid file whose pid is gone, or belongs to another program by now: it is removed.

Without ``/proc``, only Postgres' own checks of the pid file apply.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from tracelake.domain.errors import Conflict, Invalid, NotFound, Unavailable
from tracelake.durable_files import replace_private
from tracelake.embedded.postgres import server as binaries
from tracelake.embedded.postgres.account import Account, ServerAccount, server_account
from tracelake.embedded.postgres.folder import (
    ClusterFolder,
    initialize,
    make_private,
    transfer_data,
    unusable,
)
from tracelake.embedded.postgres.server import ServerProcess
from tracelake.postgres.dsn import with_login
from tracelake.program_log import CappedLog

SUPERUSER = "postgres"
_POLL = 0.01
_DRAIN_SECONDS = 2.0
_OUTPUT_CHARACTERS = 4096
_PORT_TRIES = 5
# A socket address has 108 bytes for the path on Linux, with a zero at the end.
_SOCKET_PATH_BYTES = 107
LOOPBACK = "127.0.0.1"
HBA = f"""\
# Written by Tracelake at every start.
host all all {LOOPBACK}/32 scram-sha-256
local all all scram-sha-256
"""
SOCKET_PORT = 5432
"""The name of a unix socket contains a port, in any folder."""
_ON_A_PORT = {"listen_addresses": LOOPBACK, "unix_socket_directories": ""}
# The server's working folder is its data folder, which only its own account may enter.
_ON_A_SOCKET = {"listen_addresses": "", "unix_socket_directories": ".", "unix_socket_permissions": "0700"}
_FIXED = {
    "password_encryption": "scram-sha-256",
    # Otherwise postgresql.auto.conf would win over the file that is written here.
    "allow_alter_system": "off",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "log_destination": "stderr",
    "logging_collector": "off",
}
_DEFAULTS = {
    # The port relay uses most of them, and never the last: see ``port_relay.CONNECTIONS``.
    "max_connections": "240",
    # A client that connects and sends nothing is disconnected soon.
    "authentication_timeout": "10s",
    # One attempt's locks on its staging tables leave room for those of others.
    "max_locks_per_transaction": "256",
    "reserved_connections": "8",
    "shared_buffers": "128MB",
    "min_wal_size": "128MB",
    "max_wal_size": "1GB",
    "checkpoint_timeout": "10min",
    "random_page_cost": "1.1",
    "io_method": "sync",
    "jit": "off",
    "deadlock_timeout": "200ms",
    "autovacuum_naptime": "10s",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    "log_checkpoints": "off",
    # A statement may be of any length: errors are logged without it.
    "log_min_error_statement": "panic",
    "log_parameter_max_length": "0",
    "log_parameter_max_length_on_error": "0",
}
# A throwaway cluster may lose everything in a power cut. Commits still wait for the (unsynced) write, so
# that what a test sees after a crash of the server alone is what production would show.
_THROWAWAY = {"fsync": "off", "full_page_writes": "off"}
_PROC = Path("/proc")
_LEFTOVERS_POLL = 0.02
_QUIT_PATIENCE = 2.0


_SOCKET_NAME = f".s.PGSQL.{SOCKET_PORT}"


_entrances: dict[Path, int] = {}


class _PortTakenError(Exception):
    """Another process took the port between our choice and the server's bind."""


class Cluster:
    """``port=0`` keeps the remembered port, or picks a free one.

    ``throwaway`` gives up durability for speed, and is for tests alone.
    """

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        port: int = 0,
        private: bool = False,
        settings: Mapping[str, str] | None = None,
        throwaway: bool = False,
        start_timeout: float = 60.0,
    ) -> None:
        self.name = name
        self._folder = ClusterFolder(folder)
        self._private = private
        self._wanted_port = SOCKET_PORT if private else port
        self._port = 0
        self._settings = overrides(settings or {})
        self._throwaway = throwaway
        self._start_timeout = start_timeout
        self._server: ServerProcess | None = None
        self._log: CappedLog | None = None
        self._account: ServerAccount | None = None

    def start(self) -> None:
        """Initialize when new, recover when crashed, and return once connections are accepted."""
        if self._server is not None:
            raise Conflict("ClusterInUse", f"the Postgres in {self._folder.path} was already started here")
        self._folder.acquire()
        try:
            self._prepare_and_launch()
        except OSError as error:
            self.stop()
            raise unusable(self._folder.path, error) from error
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout: float = 10.0) -> None:
        """Fast shutdown, an immediate one after ``timeout`` seconds; no process is left. Repeatable."""
        server, self._server = self._server, None
        if server is not None:
            server.stop(timeout)
            # A server that had to be killed leaves its subprocesses behind.
            end_orphans(self._folder.pgdata)
        if self._log is not None:
            # The log file is complete when this returns.
            self._log.drained(_DRAIN_SECONDS)
            self._log = None
        if self._account is not None:
            self._account.release()
            self._account = None
        # Last: the next launcher may begin only when no process of this one is left.
        self._folder.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._server.pid if self._server is not None and self._server.running else None

    @property
    def port(self) -> int:
        return self._port

    @property
    def log_file(self) -> Path:
        return self._folder.log

    def dsn(self, database: str = "postgres", user: str = SUPERUSER) -> str:
        """Carries the password: not for logs. Loopback needs no TLS, and a client that tried it would look for
        key files in a home that it may not be able to read."""
        password = self._folder.password(user)
        if password is None:
            raise NotFound("RoleUnknown", f"the cluster {self.name} has no password for a role {user!r}")
        address = (
            private_dsn(self._folder.path, database) if self._private else port_dsn(self._port, database)
        )
        return with_login(address, user, password)

    def ensure_role(self, role: str) -> None:
        """Create a login without rights, with a password of its own that ``dsn(user=role)`` contains."""
        from tracelake.embedded.postgres import provision

        # On disk before the role has it: after a crash in between, the next call sets it.
        provision.ensure_role(self.dsn(), role, self._folder.ensure_password(role))

    def ensure_database(self, database: str, owner: str | None = None) -> None:
        """Create a database that only its owner may connect to by default."""
        from tracelake.embedded.postgres import provision

        provision.ensure_database(self.dsn(), database, owner or SUPERUSER)

    def _prepare_and_launch(self) -> None:
        folder = self._folder
        # First: what follows may change the data, which needs a folder without a server.
        clear_leftovers(folder.pgdata, self._start_timeout)
        version = folder.version()
        if version is not None and version != str(binaries.MAJOR_VERSION):
            raise Invalid(
                "ClusterVersionMismatch",
                f"{folder.pgdata} was made by Postgres {version}, this is {binaries.MAJOR_VERSION}: "
                f"dump it with {version} and load it into a new folder",
            )
        # A new password wouldn't help: the data has the old one.
        if version is not None and folder.password(SUPERUSER) is None:
            raise Invalid("ClusterPasswordsLost", f"{folder.path} has data, but its passwords.json is gone")
        self._account = server_account(folder.path, folder.pgdata, lasting=not self._throwaway)
        account = self._account.account if self._account else None
        programs = binaries.binaries_executable_by(account)
        if version is None:
            initialize(folder, programs, self._account, superuser=SUPERUSER, throwaway=self._throwaway)
        if self._account is not None and self._account.takes_over:
            transfer_data(folder, self._account.account)
        if self._private:
            self._port = self._wanted_port
            self._launch(programs, account)
            return
        for _ in range(_PORT_TRIES):
            self._port = self._choose_port()
            try:
                self._launch(programs, account)
            except _PortTakenError:
                continue
            # Only a port that the server has bound is worth remembering.
            folder.remember_port(self._port)
            return
        raise self._port_conflict()

    def _choose_port(self) -> int:
        if self._wanted_port:
            if not _is_free(self._wanted_port):
                raise self._port_conflict()
            return self._wanted_port
        remembered = self._folder.remembered_port()
        return remembered if remembered and _is_free(remembered) else _free_port()

    def _port_conflict(self) -> Conflict:
        port = self._wanted_port or self._port
        return Conflict("PortInUse", f"port {port} of {LOOPBACK} is taken; give another one, or 0")

    def _launch(self, programs: binaries.Binaries, account: Account | None) -> None:
        folder = self._folder
        text = configuration(
            name=self.name,
            port=self._port,
            private=self._private,
            throwaway=self._throwaway,
            extra=self._settings,
        )
        owner = (account.uid, account.gid) if account is not None else None
        replace_private(folder.pgdata / "postgresql.conf", text.encode(), owner=owner)
        replace_private(folder.pgdata / "pg_hba.conf", HBA.encode(), owner=owner)
        log = self._log = folder.open_log()
        try:
            self._server = ServerProcess(programs, folder.pgdata, account, log.write_fd)
            self._server.start()
        finally:
            log.handed_on()
        self._await_ready(self._server, log)

    def _await_ready(self, server: ServerProcess, log: CappedLog) -> None:
        deadline = time.monotonic() + self._start_timeout
        while not _is_ready(self._folder.pgdata, server.pid):
            ended = server.wait(_POLL)
            if not ended and time.monotonic() < deadline:
                continue
            if ended:
                # The reason may still be in the pipe.
                log.drained(_DRAIN_SECONDS)
            output = log.tail().strip()[-_OUTPUT_CHARACTERS:]
            if ended and "could not bind" in output:
                raise _PortTakenError
            what = "ended" if ended else f"wasn't ready after {self._start_timeout:g} s"
            raise Unavailable("ClusterStartFailed", f"the Postgres in {self._folder.path} {what}: {output}")


def port_dsn(port: int, database: str) -> str:
    """A DSN without credentials."""
    return f"postgresql://{LOOPBACK}:{port}/{quote(database, '')}?sslmode=disable"


def private_dsn(folder: Path, database: str) -> str:
    """A DSN of the private cluster in ``folder`` for this process and its children; without credentials."""
    return f"postgresql:///{quote(database, '')}?host={quote(socket_folder(folder), '')}&port={SOCKET_PORT}"


def socket_folder(folder: Path) -> str:
    """The folder of a private cluster's socket, by a path that fits into a socket address: a path that is too long
    goes through a descriptor of this process, which stays open."""
    pgdata = ClusterFolder(folder).pgdata
    if len(os.fsencode(pgdata / _SOCKET_NAME)) < _SOCKET_PATH_BYTES:
        return str(pgdata)
    descriptor = _entrances.get(pgdata.parent)
    if descriptor is None:
        make_private(pgdata.parent)
        descriptor = _entrances[pgdata.parent] = os.open(pgdata.parent, os.O_PATH | os.O_CLOEXEC)
    # Our pid rather than ``self``: child processes connect by this path too.
    return f"/proc/{os.getpid()}/fd/{descriptor}/{pgdata.name}"


def socket_path(folder: Path) -> str:
    return f"{socket_folder(folder)}/{_SOCKET_NAME}"


def _is_ready(pgdata: Path, pid: int) -> bool:
    # The server writes its state into the eighth line; before that, a connection would be refused.
    try:
        lines = (pgdata / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As Postgres binds: connections that were closed a moment ago don't make the port taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def overrides(extra: Mapping[str, str]) -> dict[str, str]:
    """``extra``, unless it would undo a promise."""
    ours = {*_FIXED, *_ON_A_SOCKET, "port", "hba_file", "data_directory", "cluster_name"}
    refused = sorted(set(extra) & ours)
    if refused:
        raise ValueError(f"a cluster's {', '.join(refused)} can't be overridden")
    return dict(extra)


def configuration(*, name: str, port: int, private: bool, throwaway: bool, extra: Mapping[str, str]) -> str:
    address = _ON_A_SOCKET if private else _ON_A_PORT
    # The later one wins: no caller's setting replaces a fixed one.
    chosen = {**_DEFAULTS, **extra, **_FIXED, **address, "cluster_name": name, "port": str(port)}
    if throwaway:
        chosen |= _THROWAWAY
    lines = [f"{key} = {_quoted(value)}" for key, value in sorted(chosen.items())]
    return "\n".join(["# Written by Tracelake at every start.", *lines, ""])


def _quoted(value: str) -> str:
    if "\n" in value:
        raise ValueError("a setting's value is one line")
    # Postgres reads backslash escapes in its configuration files.
    return "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def clear_leftovers(pgdata: Path, patience: float) -> None:
    """Leave no process and no stale pid file; a server that runs longer than ``patience`` is a conflict."""
    if not _PROC.joinpath("self", "cwd").exists() or not pgdata.exists():
        return
    deadline = time.monotonic() + patience
    servers = _Processes()
    while server := servers.still(pid for pid in _using(pgdata) if not _is_subprocess(pid)):
        if time.monotonic() > deadline:
            raise Conflict("ClusterInUse", f"a Postgres that isn't ours (pid {server[0]}) runs in {pgdata}")
        time.sleep(_LEFTOVERS_POLL)
    end_orphans(pgdata)
    (pgdata / "postmaster.pid").unlink(missing_ok=True)


def end_orphans(pgdata: Path) -> None:
    """End the processes of a killed server; only to be called when that server is gone."""
    started = time.monotonic()
    orphans = _Processes()
    while running := orphans.still(pid for pid in _using(pgdata) if _is_subprocess(pid)):
        # A subprocess leaves at SIGQUIT unless it hangs.
        patient = time.monotonic() - started < _QUIT_PATIENCE
        for pid in running:
            try:
                os.kill(pid, signal.SIGQUIT if patient else signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(_LEFTOVERS_POLL)


class _Processes:
    """Processes that were seen in a data folder, until each has ended.

    A process that exits loses its program and its working folder first and its shared memory later, which takes a
    while on a busy machine; a server that starts in between finds the memory in use and gives up.
    """

    def __init__(self) -> None:
        self._started: dict[int, str] = {}

    def still(self, seen: Iterable[int]) -> list[int]:
        """Those of all calls so far that haven't ended."""
        for pid in seen:
            if (start := _start_of_running(pid)) is not None:
                self._started.setdefault(pid, start)
        self._started = {
            pid: start for pid, start in self._started.items() if _start_of_running(pid) == start
        }
        return list(self._started)


def _start_of_running(pid: int) -> str | None:
    """When a process started, which distinguishes it from a later one with its number; None once it has ended."""
    try:
        fields = _PROC.joinpath(str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def _using(pgdata: Path) -> list[int]:
    try:
        folder = pgdata.stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in os.scandir(_PROC):
        if not entry.name.isdigit():
            continue
        try:
            here = os.path.samestat(os.stat(f"{entry.path}/cwd"), folder)
            if here and Path(os.readlink(f"{entry.path}/exe")).name.startswith("postgres"):
                found.append(int(entry.name))
        except OSError:
            # It ended since the listing, or belongs to a user whose processes we can't look into.
            continue
    return found


def _is_subprocess(pid: int) -> bool:
    # Postgres titles its subprocesses "postgres: …"; the server itself keeps its command line.
    try:
        return _PROC.joinpath(str(pid), "cmdline").read_bytes().startswith(b"postgres: ")
    except OSError:
        # It ended meanwhile, so it can't be a server to wait for.
        return True
