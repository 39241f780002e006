"""A part that is an embedded Postgres with its databases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from tracelake.dev.log_tail import last_lines
from tracelake.embedded_postgres import Cluster, PortRelay, port_dsn
from tracelake.embedded_postgres.cluster import socket_path
from tracelake.embedded_postgres.folder import ClusterFolder
from tracelake.held_port import HeldPort

_STOP_SECONDS = 2.0


def last_port(folder: Path) -> int:
    """The one that this cluster had the last time; 0 when there was none."""
    return ClusterFolder(folder).remembered_port()


class PostgresPart:
    """Reached by its socket, and for those who can't enter its folder (operators, people with ``dev.json``) by
    a port that doesn't change. ``prepare`` is called with it at each start, and it is ready after that."""

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
        """For this process and those it starts."""
        assert self._cluster is not None
        return self._cluster.dsn(database)

    def port_dsn(self, database: str) -> str:
        """The same by its port."""
        parts = urlsplit(self.dsn(database))
        login = parts.netloc.rpartition("@")[0]
        return port_dsn(self._port.number, database).replace("//", f"//{login}@", 1)

    def start(self, stopping: threading.Event) -> None:
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
            cluster.stop(_STOP_SECONDS)

    def last_words(self) -> tuple[str, ...]:
        return last_lines(ClusterFolder(self._folder).log)
