"""The addresses, logins and ports of a stack, known before any of its parts runs, so that all parts can start
together.

``Ports`` chooses the ports; the supervisor holds each one for as long as the stack runs, and a part listens on the
supervisor's own socket. ``RoleDsns`` has the databases by the logins of the stack's roles: each role can do one
thing, and only the Dispatcher logs in as the owner. ``roles_kept`` restores a role of the data database that has
changed its own password.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import structlog

from tracelake import objects
from tracelake.dev.home import DATA_DATABASE, QUEUE_DATABASE, STATE_DATABASE, Home
from tracelake.domain.errors import Conflict
from tracelake.embedded.postgres import port_dsn, private_dsn
from tracelake.hot.install import READER_ROLE, WRITER_ROLE, Installed, install, restore_roles
from tracelake.postgres.dsn import with_login
from tracelake.queue.postgres_install import QUEUE_ROLE
from tracelake.serving.local_sockets import LOOPBACK, HeldPort
from tracelake.serving.metrics_port import METRICS_PATH
from tracelake.settings import Secret
from tracelake.store.query_roles import AUDIT_ROLE, CATALOG_ROLE
from tracelake.tokens.home_copies import QuerySecrets
from tracelake.tokens.opaque_tokens import first_token

_CHECK_SECONDS = 15.0
_END_SECONDS = 0.5

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackPorts:
    """``metrics`` has the port of each part that serves its metrics on one of its own, by the part's name."""

    user: HeldPort
    internal: HeldPort
    query: HeldPort
    state: HeldPort
    data: HeldPort
    metrics: Mapping[str, HeldPort]


class Addresses:
    def __init__(self, home: Home, ports: StackPorts) -> None:
        self.ports = ports
        self.user_url = f"http://{LOOPBACK}:{ports.user.number}"
        self.internal_url = f"http://{LOOPBACK}:{ports.internal.number}"
        self.query_url = f"http://{LOOPBACK}:{ports.query.number}"
        self.object_root = str(home.objects)
        self.user_token = home.secrets().user_token
        self.worker_token = first_token(home.worker_tokens)
        self.dsns = RoleDsns.of(
            home,
            state=port_dsn(ports.state.number, STATE_DATABASE),
            queue=port_dsn(ports.state.number, QUEUE_DATABASE),
            data=port_dsn(ports.data.number, DATA_DATABASE),
        )
        self._private = RoleDsns.of(
            home,
            state=_part_dsn(home.state_cluster, ports.state, STATE_DATABASE),
            queue=_part_dsn(home.state_cluster, ports.state, QUEUE_DATABASE),
            data=_part_dsn(home.data_cluster, ports.data, DATA_DATABASE),
        )

    def metrics(self) -> dict[str, str]:
        """Where each part serves its metrics."""
        own = {name: f"http://{LOOPBACK}:{port.number}" for name, port in self.ports.metrics.items()}
        return {name: url + METRICS_PATH for name, url in {"dispatcher": self.internal_url, **own}.items()}

    def for_workers(self, rpc_pools: Path | None) -> dict[str, str]:
        return {
            **({} if rpc_pools is None else {"TRACELAKE_RPC_POOLS": str(rpc_pools)}),
            "TRACELAKE_INTERNAL_URL": self.internal_url,
            "TRACELAKE_QUERY_URL": self.query_url,
            "TRACELAKE_WORKER_TOKEN": self.worker_token,
            **self._private.for_workers(),
            "TRACELAKE_DATA_ADDRESS": f"{LOOPBACK}:{self.ports.data.number}",
            "TRACELAKE_OBJECTS": objects.address(self.object_root),
        }

    def for_delivery(self) -> dict[str, str]:
        """Without any login that writes."""
        return {
            "TRACELAKE_INTERNAL_URL": self.internal_url,
            "TRACELAKE_WORKER_TOKEN": self.worker_token,
            "TRACELAKE_QUEUE_DSN": self._private.queue,
            "TRACELAKE_DATA_READ_DSN": self._private.data_read,
        }

    def for_scheduler(self) -> dict[str, str]:
        return {
            "TRACELAKE_INTERNAL_URL": self.internal_url,
            "TRACELAKE_WORKER_TOKEN": self.worker_token,
        }

    def for_queries(self) -> dict[str, str]:
        return {
            **self._private.for_queries(),
            "TRACELAKE_OBJECTS": objects.address(self.object_root),
        }


def _part_dsn(cluster: Path, port: HeldPort, database: str) -> str:
    """The DSN for parts: by the socket instead of the port, which every user of the machine can reach."""
    return port_dsn(port.number, database) if port.socket is None else private_dsn(cluster, database)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RoleDsns:
    queue: str
    data_write: str
    data_read: str
    catalog: str
    audit: str

    @classmethod
    def of(cls, home: Home, *, state: str, queue: str, data: str) -> Self:
        """The roles' logins to the databases at these DSNs, with the home's passwords."""
        writing, reading, query = home.data_secrets(), home.reading_secrets(), home.query_secrets()
        return cls(
            queue=with_login(queue, QUEUE_ROLE, home.secrets().queue_password),
            data_write=with_login(data, WRITER_ROLE, writing.writer_password),
            data_read=with_login(data, READER_ROLE, reading.reader_password),
            catalog=catalog_dsn(state, query),
            audit=audit_dsn(state, query),
        )

    def for_workers(self) -> dict[str, str]:
        return {
            "TRACELAKE_QUEUE_DSN": self.queue,
            "TRACELAKE_DATA_WRITE_DSN": self.data_write,
        }

    def for_queries(self) -> dict[str, str]:
        return {
            "TRACELAKE_CATALOG_DSN": self.catalog,
            "TRACELAKE_AUDIT_DSN": self.audit,
            "TRACELAKE_DATA_READ_DSN": self.data_read,
        }


def catalog_dsn(state_dsn: str, passwords: QuerySecrets) -> str:
    return with_login(state_dsn, CATALOG_ROLE, passwords.catalog_password)


def audit_dsn(state_dsn: str, passwords: QuerySecrets) -> str:
    return with_login(state_dsn, AUDIT_ROLE, passwords.audit_password)


def install_data(home: Home, dsn: str, *, new_passwords: bool = False) -> Installed:
    """Install the data database and store its passwords in the home. Processes that were started with others need a
    restart."""
    if new_passwords:
        home.forget_data_secrets()
    installed = asyncio.run(install(dsn, **_passwords(home), replace=new_passwords))
    # After the install: the database decides which passwords are valid.
    home.keep_data_secrets(installed.writer_password.reveal(), installed.reader_password.reveal())
    return installed


@contextmanager
def roles_kept(home: Home, dsn: Callable[[], str]) -> Iterator[None]:
    """Restore roles that have changed their own password, which Postgres can't forbid: the others are locked out
    until the next check, and no longer. A database that is down is checked again later."""
    over = threading.Event()

    def keep() -> None:
        while not over.wait(_CHECK_SECONDS):
            try:
                for role in asyncio.run(restore_roles(dsn(), **_passwords(home))):
                    _log.warning("role password or settings restored", role=role)
            except Exception as error:
                # No error may end this thread: it runs for as long as the stack.
                _log.warning("cannot check the data database's roles", error=str(error))

    keeper = threading.Thread(target=keep, name="data-roles", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        over.set()
        # A check may hang on a database that stops; the thread is a daemon, so it can't delay the end.
        keeper.join(_END_SECONDS)


def _passwords(home: Home) -> dict[str, Secret]:
    return {
        "writer_password": Secret(home.data_secrets().writer_password),
        "reader_password": Secret(home.reading_secrets().reader_password),
    }


class Ports:
    def __init__(self) -> None:
        self._held: dict[int, str] = {}
        self._ports: list[HeldPort] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for each in self._ports:
            each.close()

    def take(self, name: str, port: int) -> HeldPort:
        """Hold the port of ``--NAME-port``, or any free one for 0; the error for a taken port has a remedy."""
        if port in self._held:
            raise Conflict(
                "PortTaken", f"port {port} can't be both the {self._held[port]} and the {name} port"
            )
        try:
            return self._hold(name, port)
        except OSError as error:
            raise Conflict(
                "PortTaken",
                f"the {name} port {LOOPBACK}:{port} can't be used ({error.strerror}): end what listens there, take "
                f"another with --{name}-port (0 for any free one), or free ones for everything with --port auto",
            ) from None

    def take_or_any(self, name: str, port: int) -> HeldPort:
        """Hold the port of the last start if it is still free, otherwise any."""
        try:
            return self._hold(name, 0 if port in self._held else port)
        except OSError:
            return self._hold(name, 0)

    def _hold(self, name: str, port: int) -> HeldPort:
        held = HeldPort(port)
        self._ports.append(held)
        self._held[held.number] = name
        return held
