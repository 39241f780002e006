"""A part that is an embedded Postgres with its databases."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from tracelake.dev.log_tail import last_lines
from tracelake.embedded_postgres import Cluster
from tracelake.embedded_postgres.folder import ClusterFolder

_STOP_SECONDS = 2.0


def last_port(folder: Path) -> int:
    """The one that this cluster had the last time; 0 when there was none."""
    return ClusterFolder(folder).remembered_port()


class PostgresPart:
    """On a port that doesn't change: the others hold DSNs that name it. ``prepare`` is called with it at each
    start, and it is ready after that."""

    ended = "ended"

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        port: int,
        databases: Sequence[str],
        prepare: Callable[[PostgresPart], None] | None = None,
    ) -> None:
        self.name = f"postgres-{name}"
        self._folder = folder
        self._short_name = name
        self._databases = databases
        self._port = port
        self._prepare = prepare
        self._cluster: Cluster | None = None

    @property
    def pid(self) -> int | None:
        return self._cluster.pid if self._cluster is not None else None

    @property
    def alive(self) -> bool:
        return self.pid is not None

    def dsn(self, database: str) -> str:
        assert self._cluster is not None
        return self._cluster.dsn(database)

    def start(self, stopping: threading.Event) -> None:
        self.stop()
        cluster = Cluster(self._folder, name=self._short_name, port=self._port)
        cluster.start()
        self._cluster = cluster
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
