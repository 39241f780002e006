"""Looks at the hot tables while everything happens: whoever reads sees one chain, and no row of another one."""

from __future__ import annotations

from contextlib import suppress

import psycopg
from psycopg import IsolationLevel, sql

from tracelake import sqlfiles
from tracelake.client import Client
from tracelake.testing.chain_soak.stack import SoakStack

_SQL = sqlfiles.load("tracelake.testing.chain_soak", "watch.sql")
_OF_BLOCKS = ("hot_transactions", "hot_logs")


class Watch:
    """``looks`` counts those that found tables to look at."""

    def __init__(self, stack: SoakStack, client: Client) -> None:
        self._stack = stack
        self._tables = {name: _table(client, name) for name in ("hot_blocks", *_OF_BLOCKS)}
        self.looks = 0
        self.wrong: list[str] = []

    def look(self) -> None:
        """All of it in one snapshot; nothing while the database is away, or before the first commit."""
        away = suppress(psycopg.OperationalError, psycopg.errors.UndefinedTable)
        with away, psycopg.connect(self._stack.data_dsn, connect_timeout=2) as data:
            data.isolation_level = IsolationLevel.REPEATABLE_READ
            self._look(data)

    def _look(self, data: psycopg.Connection) -> None:
        blocks = self._tables["hot_blocks"]
        broken = data.execute(sql.SQL(_SQL.broken_links).format(blocks=blocks)).fetchall()
        self.wrong += [
            f"while it ran: hot blocks: {number} doesn't follow the one before" for (number,) in broken
        ]
        for name in _OF_BLOCKS:
            statement = sql.SQL(_SQL.strays).format(blocks=blocks, rows=self._tables[name])
            strays = data.execute(statement).fetchall()
            self.wrong += [
                f"while it ran: {name}: rows of a block {number} that isn't stored" for (number,) in strays
            ]
        self.looks += 1


def _table(client: Client, name: str) -> sql.Identifier:
    return sql.Identifier("data", f"d_{client.dataset(name).dataset_version.hex}")
