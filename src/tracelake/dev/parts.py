"""The parts of ``tracelake dev``: embedded Postgres servers, and the commands that people run as well.

The Dispatcher, the Query Service, the sink, the delivery process and the workers are started by their own commands,
on the stack's databases. The Query Service listens before the databases and the Dispatcher are there.
Where queries can't be confined it refuses to serve any; the rest of the stack works without it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tracelake.dev.addresses import Addresses
from tracelake.dev.child_process import ChildProcess, ChildSpec, last_lines
from tracelake.dev.handle import QueryHandle, is_ready, own_file, remove_handle
from tracelake.dev.home import Home
from tracelake.domain.errors import Unavailable
from tracelake.embedded.postgres import Cluster, PortRelay, port_dsn
from tracelake.embedded.postgres.cluster import socket_path
from tracelake.embedded.postgres.folder import ClusterFolder
from tracelake.postgres.dsn import with_login
from tracelake.serving.local_sockets import LOOPBACK, HeldPort
from tracelake.serving.metrics_port import METRICS
from tracelake.stack_connection import read_handle

POSTGRES_STOP_SECONDS = 2.0
DISPATCHER = "dispatcher"
QUERY = "query"
QUERY_FILE = "query.json"
QUERY_START_SECONDS = 60.0
_WAY_OUT = "TRACELAKE_QUERY_UNCONFINED=1"
"""Appears in the refusal of a service that can't confine queries, and in no other error."""
DRAIN_SECONDS = 2
TASK_STOP_SECONDS = 4.0
"""Ctrl-C ends the whole stack within 10 s: unfinished tasks are released and run after the next start. Workers, the
sink and the delivery process come first; the Dispatcher and the Query Service have ``ChildSpec.stop_timeout`` after
that, the databases ``POSTGRES_STOP_SECONDS``. Parts that hang are killed, so the three together are the longest
stop."""
WORKER_START_SECONDS = 120.0
"""Time for a Spark server to start on a cold machine."""
SCHEDULER = "scheduler"
WORKER = "worker"
SINK = "sink"
DELIVERY = "delivery"
PLATFORM_START_SECONDS = 60.0
_PLATFORM = "TRACELAKE_"
_SECRETS = ("TRACELAKE_SECRET_", "TRACELAKE_SECRETS_FILE")
_READS: Mapping[str, Sequence[str]] = {
    QUERY: ("TRACELAKE_QUERY_", "TRACELAKE_EXPORT_ROOT"),
    WORKER: (*_SECRETS, "TRACELAKE_SPARK_", "TRACELAKE_OPERATOR_USER", "TRACELAKE_RPC_POOLS"),
    SINK: (),
    DELIVERY: (*_SECRETS, "TRACELAKE_DELIVERY_"),
    SCHEDULER: (),
}
"""Names, and beginnings of names, of the platform's variables that a part reads from the supervisor's environment.
The Dispatcher isn't here: its settings are many, and it gets all but the secrets."""


def last_port(folder: Path) -> int:
    """The port of the cluster's last start; 0 when there was none."""
    return ClusterFolder(folder).remembered_port()


def inherited(part: str) -> dict[str, str]:
    """The supervisor's environment for a part: no login, token or secret of the platform that is another's."""

    def is_for_it(name: str) -> bool:
        if part == DISPATCHER:
            return not name.startswith(_SECRETS)
        return not name.startswith(_PLATFORM) or name.startswith(("TRACELAKE_HTTP_", *_READS[part]))

    return {name: value for name, value in os.environ.items() if is_for_it(name)}


class PostgresPart:
    """A Postgres server with its databases. It listens on a socket in its folder, and for clients that can't enter
    the folder (operators, people with ``dev.json``) on a port that doesn't change. ``prepare`` is called at each
    start, before the part counts as ready."""

    ended = "ended"

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        port: HeldPort,
        relay: PortRelay,
        databases: Sequence[str],
        prepare: Callable[[PostgresPart], None] | None = None,
    ) -> None:
        self.name = f"postgres-{name}"
        self._folder = folder
        self._short_name = name
        self._databases = databases
        self._port = port
        self._relay = relay
        self._is_relayed = False
        self._prepare = prepare
        self._cluster: Cluster | None = None

    @property
    def pid(self) -> int | None:
        return self._cluster.pid if self._cluster is not None else None

    @property
    def alive(self) -> bool:
        return self.pid is not None

    def dsn(self, database: str) -> str:
        """The DSN by the socket, for this process and its children."""
        assert self._cluster is not None
        return self._cluster.dsn(database)

    def port_dsn(self, database: str) -> str:
        """The DSN by the port."""
        login = urlsplit(self.dsn(database))
        assert login.username is not None
        assert login.password is not None
        return with_login(
            port_dsn(self._port.number, database), unquote(login.username), unquote(login.password)
        )

    def start(self, stopping: threading.Event) -> None:
        # A cluster that crashed still holds its folder's lock.
        self.stop()
        is_private = self._port.socket is not None
        cluster = Cluster(
            self._folder,
            name=self._short_name,
            private=is_private,
            port=0 if is_private else self._port.number,
        )
        cluster.start()
        self._cluster = cluster
        ClusterFolder(self._folder).remember_port(self._port.number)
        # The relay outlives the server, and looks up the socket at each connection.
        if not self._is_relayed:
            self._relay.serve(self._port, lambda: socket_path(self._folder))
            self._is_relayed = True
        for database in self._databases:
            if not stopping.is_set():
                cluster.ensure_database(database)
        if self._prepare is not None and not stopping.is_set():
            self._prepare(self)

    def stop(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop(POSTGRES_STOP_SECONDS)

    def log_tail(self) -> tuple[str, ...]:
        return last_lines(ClusterFolder(self._folder).log)


def dispatcher_spec(
    home: Home,
    addresses: Addresses,
    *,
    databases: Callable[[], Mapping[str, str]],
    runtimes: Sequence[str] = (),
) -> ChildSpec:
    """``databases`` is called at each start for the DSNs of the owner, as environment variables."""

    ports = addresses.ports

    def argv() -> list[str]:
        return [
            *(sys.executable, "-P", "-m", "tracelake", "dispatcher", "--home", str(home.folder)),
            *("--user-port", str(ports.user.number), "--internal-port", str(ports.internal.number)),
            *(option for runtime in runtimes for option in ("--runtime", runtime)),
        ]

    return ChildSpec(
        name=DISPATCHER,
        argv=argv,
        ready=lambda pid: own_file(home.folder, pid).exists(),
        # Python looks for modules in its working folder; a home has none.
        folder=home.folder,
        log=home.logs / f"{DISPATCHER}.log",
        listens={"user": ports.user, "internal": ports.internal},
        env=lambda: {**inherited(DISPATCHER), **databases(), "TRACELAKE_QUERY_URL": addresses.query_url},
    )


class QueryPart(ChildProcess):
    """``refused`` is the reason why there are no queries; the part counts as started then."""

    refused: str | None = None

    @property
    def alive(self) -> bool:
        return self.refused is not None or super().alive

    @property
    def pid(self) -> int | None:
        return None if self.refused is not None else super().pid

    def start(self, stopping: threading.Event) -> None:
        try:
            super().start(stopping)
        except Unavailable as error:
            if _WAY_OUT not in error.message:
                raise
            self.refused = error.message


def query_spec(home: Home, addresses: Addresses) -> ChildSpec:
    """The service reads the Dispatcher's address from the file that the Dispatcher writes."""
    file = home.folder / QUERY_FILE

    def argv() -> list[str]:
        remove_handle(file)
        return [
            *(sys.executable, "-P", "-m", "tracelake", "query-service", "--home", str(home.folder)),
            *("--port", str(addresses.ports.query.number), "--ready-file", str(file)),
            *_metrics_options(addresses.ports.metrics[QUERY]),
        ]

    def ready(pid: int) -> bool:
        handle = read_handle(file, QueryHandle)
        return handle is not None and handle.pid == pid

    return ChildSpec(
        name=QUERY,
        argv=argv,
        ready=ready,
        folder=home.folder,
        log=home.logs / f"{QUERY}.log",
        listens={"query": addresses.ports.query, METRICS: addresses.ports.metrics[QUERY]},
        env=lambda: {**inherited(QUERY), **addresses.for_queries()},
        start_timeout=QUERY_START_SECONDS,
    )


def _metrics_options(port: HeldPort) -> list[str]:
    """The part of a command for the port that the supervisor holds; the environment could name another."""
    return ["--metrics-host", LOOPBACK, "--metrics-port", str(port.number)]


def worker_name(runtime: str) -> str:
    return f"worker-{runtime}"


def worker_spec(
    home: Home,
    runtime: str,
    metrics: HeldPort,
    *,
    environment: Mapping[str, str],
    operators: Sequence[str] = (),
) -> ChildSpec:
    """``environment`` has the addresses of the rest of the stack."""
    name = worker_name(runtime)
    ready_file = home.folder / f"{name}.pid"

    def argv() -> list[str]:
        ready_file.unlink(missing_ok=True)
        return [
            *(sys.executable, "-P", "-m", "tracelake", "worker", "--runtime", runtime),
            *("--home", str(home.folder), "--ready-file", str(ready_file)),
            *("--drain-seconds", str(DRAIN_SECONDS)),
            *_metrics_options(metrics),
            *(option for each in operators for option in ("--operators", each)),
        ]

    return ChildSpec(
        name=name,
        argv=argv,
        ready=lambda pid: is_ready(ready_file, pid),
        folder=home.folder,
        log=home.logs / f"{name}.log",
        listens={METRICS: metrics},
        env=lambda: {**inherited(WORKER), **environment},
        start_timeout=WORKER_START_SECONDS,
        stop_timeout=TASK_STOP_SECONDS,
    )


def sink_spec(home: Home, metrics: HeldPort, *, environment: Mapping[str, str]) -> ChildSpec:
    return _platform_spec(home, SINK, metrics, environment)


def delivery_spec(home: Home, metrics: HeldPort, *, environment: Mapping[str, str]) -> ChildSpec:
    return _platform_spec(home, DELIVERY, metrics, environment)


def _platform_spec(home: Home, name: str, metrics: HeldPort, environment: Mapping[str, str]) -> ChildSpec:
    """``environment`` has the addresses of the rest of the stack."""
    ready_file = home.folder / f"{name}.pid"

    def argv() -> list[str]:
        ready_file.unlink(missing_ok=True)
        return [
            *(sys.executable, "-P", "-m", "tracelake", name, "--home", str(home.folder)),
            *("--ready-file", str(ready_file), "--drain-seconds", str(DRAIN_SECONDS)),
            *_metrics_options(metrics),
        ]

    return ChildSpec(
        name=name,
        argv=argv,
        ready=lambda pid: is_ready(ready_file, pid),
        folder=home.folder,
        log=home.logs / f"{name}.log",
        listens={METRICS: metrics},
        env=lambda: {**inherited(name), **environment},
        start_timeout=PLATFORM_START_SECONDS,
        stop_timeout=TASK_STOP_SECONDS,
    )


def scheduler_spec(home: Home, metrics: HeldPort, *, environment: Mapping[str, str]) -> ChildSpec:
    """``environment`` has the Dispatcher's address and a worker token."""
    ready_file = home.folder / f"{SCHEDULER}.pid"

    def argv() -> list[str]:
        ready_file.unlink(missing_ok=True)
        return [
            *(sys.executable, "-P", "-m", "tracelake", "scheduler", "--home", str(home.folder)),
            *("--ready-file", str(ready_file)),
            *_metrics_options(metrics),
        ]

    return ChildSpec(
        name=SCHEDULER,
        argv=argv,
        ready=lambda pid: is_ready(ready_file, pid),
        folder=home.folder,
        log=home.logs / f"{SCHEDULER}.log",
        listens={METRICS: metrics},
        env=lambda: {**inherited(SCHEDULER), **environment},
        start_timeout=PLATFORM_START_SECONDS,
        stop_timeout=TASK_STOP_SECONDS,
    )
