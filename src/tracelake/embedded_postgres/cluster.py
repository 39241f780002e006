"""One Postgres server with its own folder, for as long as this process lives.

    with Cluster(home / "state", name="state") as cluster:
        cluster.ensure_database("tracelake")
        connect(cluster.dsn("tracelake"))

A ``private`` cluster has no port: it listens on a socket in its data folder, which nobody but its own account and
who started it can enter.

Promises: commits survive a crash of the server, of this process and of the machine; nobody gets in
without a password, and nobody at all from another machine; a restart keeps the DSN while the port is
free; a folder has one launcher at a time, a second one is refused (``ClusterInUse``) rather than attached,
since whoever stops a shared server would stop it for everybody. If this process is killed, the server
shuts itself down.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

from tracelake.capped_log import CappedLog
from tracelake.domain.errors import Conflict, Invalid, NotFound, Unavailable
from tracelake.embedded_postgres import binaries, leftovers
from tracelake.embedded_postgres.account import Account, ServerAccount, server_account
from tracelake.embedded_postgres.folder import ClusterFolder, make_private, unusable
from tracelake.embedded_postgres.hand_over import hand_over
from tracelake.embedded_postgres.initialize import initialize
from tracelake.embedded_postgres.server_process import ServerProcess
from tracelake.embedded_postgres.settings import HBA, LOOPBACK, SOCKET_PORT, configuration, overrides

SUPERUSER = "postgres"
_POLL = 0.01
_DRAIN_SECONDS = 2.0
_SAID_CHARACTERS = 4096
_PORT_TRIES = 5
_SOCKET_NAME = f".s.PGSQL.{SOCKET_PORT}"
_SOCKET_PATH_BYTES = 107
_entrances: dict[Path, int] = {}


class _PortTakenError(Exception):
    """Somebody else got the port between our choice and the server's bind."""


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
            leftovers.end_orphans(self._folder.pgdata)
        if self._log is not None:
            # What it said last is in the file when this returns.
            self._log.drained(_DRAIN_SECONDS)
            self._log = None
        if self._account is not None:
            self._account.release()
            self._account = None
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
        return address.replace("//", f"//{quote(user, '')}:{quote(password, '')}@", 1)

    def ensure_role(self, role: str) -> None:
        """A login that may do nothing yet, with a password of its own that ``dsn(user=role)`` knows."""
        from tracelake.embedded_postgres import provision

        provision.ensure_role(self.dsn(), role, self._folder.ensure_password(role))

    def ensure_database(self, database: str, owner: str | None = None) -> None:
        """A database that its owner, and nobody by default, may connect to."""
        from tracelake.embedded_postgres import provision

        provision.ensure_database(self.dsn(), database, owner or SUPERUSER)

    def _prepare_and_launch(self) -> None:
        folder = self._folder
        leftovers.clear(folder.pgdata, self._start_timeout)
        version = folder.version()
        if version is not None and version != str(binaries.MAJOR_VERSION):
            raise Invalid(
                "ClusterVersionMismatch",
                f"{folder.pgdata} was made by Postgres {version}, this is {binaries.MAJOR_VERSION}: "
                f"dump it with {version} and load it into a new folder",
            )
        if version is not None and folder.password(SUPERUSER) is None:
            raise Invalid("ClusterPasswordsLost", f"{folder.path} has data, but its passwords.json is gone")
        self._account = server_account(folder.path, folder.pgdata, lasting=not self._throwaway)
        account = self._account.account if self._account else None
        programs = binaries.executable_by(account)
        if version is None:
            initialize(folder, programs, self._account, superuser=SUPERUSER, throwaway=self._throwaway)
        if self._account is not None and self._account.takes_over:
            hand_over(folder, self._account.account)
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
        folder.replace(folder.pgdata / "postgresql.conf", text, account)
        folder.replace(folder.pgdata / "pg_hba.conf", HBA, account)
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
                log.drained(_DRAIN_SECONDS)
            said = log.said().strip()[-_SAID_CHARACTERS:]
            if ended and "could not bind" in said:
                raise _PortTakenError
            what = "ended" if ended else f"wasn't ready after {self._start_timeout:g} s"
            raise Unavailable("ClusterStartFailed", f"the Postgres in {self._folder.path} {what}: {said}")


def port_dsn(port: int, database: str) -> str:
    """Without anybody's credentials."""
    return f"postgresql://{LOOPBACK}:{port}/{quote(database, '')}?sslmode=disable"


def private_dsn(folder: Path, database: str) -> str:
    """The way to the private cluster in ``folder``, for this process and those it starts; without credentials."""
    return f"postgresql:///{quote(database, '')}?host={quote(socket_folder(folder), '')}&port={SOCKET_PORT}"


def socket_folder(folder: Path) -> str:
    """Where the socket of the private cluster in ``folder`` is, by a path that fits into the address of a socket:
    one that is too long is entered through a descriptor of this process, which stays open."""
    pgdata = ClusterFolder(folder).pgdata
    if len(os.fsencode(pgdata / _SOCKET_NAME)) < _SOCKET_PATH_BYTES:
        return str(pgdata)
    descriptor = _entrances.get(pgdata.parent)
    if descriptor is None:
        make_private(pgdata.parent)
        descriptor = _entrances[pgdata.parent] = os.open(pgdata.parent, os.O_PATH | os.O_CLOEXEC)
    return f"/proc/{os.getpid()}/fd/{descriptor}/{pgdata.name}"


def socket_path(folder: Path) -> str:
    return f"{socket_folder(folder)}/{_SOCKET_NAME}"


def _is_ready(pgdata: Path, pid: int) -> bool:
    # The server itself keeps its state in the eighth line, before which a connection would be refused.
    try:
        lines = (pgdata / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return False
    return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
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
