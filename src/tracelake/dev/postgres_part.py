"""A part that is an embedded Postgres with its databases."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

from tracelake.embedded_postgres import Cluster

_STOP_SECONDS = 2.0


class PostgresPart:
    """Keeps its port for as long as the supervisor lives: the others hold DSNs that name it."""

    def __init__(self, folder: Path, *, name: str, databases: Sequence[str]) -> None:
        self.name = f"postgres-{name}"
        self._folder = folder
        self._short_name = name
        self._databases = databases
        self._port = 0
        self._cluster: Cluster | None = None

    @property
    def pid(self) -> int | None:
        return self._cluster.pid if self._cluster is not None else None

    @property
    def alive(self) -> bool:
        return self.pid is not None

    @property
    def port(self) -> int:
        return self._port

    def dsn(self, database: str) -> str:
        assert self._cluster is not None
        return self._cluster.dsn(database)

    def start(self, stopping: threading.Event) -> None:
        self.stop()
        cluster = Cluster(self._folder, name=self._short_name, port=self._port)
        cluster.start()
        self._cluster = cluster
        self._port = cluster.port
        for database in self._databases:
            if not stopping.is_set():
                cluster.ensure_database(database)

    def stop(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.stop(_STOP_SECONDS)
