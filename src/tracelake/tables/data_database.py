"""``DataDatabase``: an attempt's connections to the data database, by a login of its own.

One loads staging tables, one reads committed rows as they are now, one holds a snapshot. They are opened when they
are first needed and kept for the attempt, since opening one costs more than loading a block. Everything that an
attempt reads of its inputs comes from the one snapshot, which is held until it ends; executors read from it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.postgres import sqlfiles

if TYPE_CHECKING:
    import psycopg

SQL = sqlfiles.load("tracelake.tables", "sql/hot_tables.sql")
_SNAPSHOT_GRACE = 60
# A dead connection is noticed within a minute and a half. By default it takes hours.
_KEEPALIVE = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 6}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The rows that were committed at one moment. Other connections can open it by ``name`` while ``connection``
    holds it."""

    connection: psycopg.Connection
    name: str


class DataDatabase:
    """``seconds`` is the attempt's timeout; None for a source. The snapshot isn't held much longer, so that an
    operator that hangs doesn't keep the database from removing old rows."""

    def __init__(self, dsn: str | None = None, seconds: float | None = None) -> None:
        self._dsn = dsn
        self._seconds = seconds
        self._staging: psycopg.Connection | None = None
        self._live: psycopg.Connection | None = None
        self._snapshot: Snapshot | None = None

    @property
    def dsn(self) -> str:
        if self._dsn is None:
            raise Invalid(
                "NoDataDatabase", "this worker has no data database: set TRACELAKE_DATA_WRITE_DSN for it"
            )
        return self._dsn

    def staging(self) -> psycopg.Connection:
        if self._staging is None or self._staging.closed:
            self._staging = connect(self.dsn)
        return self._staging

    @property
    def is_staging(self) -> bool:
        """Whether the staging connection is open, so that there may be tables to drop."""
        return self._staging is not None and not self._staging.closed

    def live(self) -> psycopg.Connection:
        """For reading rows as they are committed now, statement by statement."""
        if self._live is None or self._live.closed:
            self._live = connect(self.dsn)
        return self._live

    def snapshot(self) -> Snapshot:
        """The attempt's snapshot, taken at the first call. A lost one isn't replaced: rows of the old and of a new
        one don't belong together."""
        if self._snapshot is None:
            self._snapshot = self._take_snapshot()
        if self._snapshot.connection.closed:
            raise Unavailable("SnapshotLost", "the connection that held the snapshot of the inputs is gone")
        return self._snapshot

    def close(self) -> None:
        held = self._snapshot.connection if self._snapshot is not None else None
        for connection in (self._staging, self._live, held):
            if connection is not None:
                connection.close()

    def _take_snapshot(self) -> Snapshot:
        connection = connect(self.dsn)
        import psycopg

        # A source runs without an end, and Postgres takes 0 for no limit.
        limit = 0 if self._seconds is None else int(self._seconds + _SNAPSHOT_GRACE) * 1000
        try:
            connection.execute(SQL.hold_snapshot, [str(limit)])
            connection.execute(SQL.begin_reading)
            row = connection.execute(SQL.take_snapshot).fetchone()
        except psycopg.Error as error:
            connection.close()
            raise Unavailable("DataUnavailable", f"the data database failed: {error}") from error
        assert row is not None
        return Snapshot(connection, row[0])


def connect(dsn: str) -> psycopg.Connection:
    """Open a connection in autocommit mode, without a statement timeout: the attempt's own timeout bounds it."""
    import psycopg

    try:
        connection = psycopg.connect(
            psycopg.conninfo.make_conninfo(dsn, **_KEEPALIVE), autocommit=True, connect_timeout=10
        )
        try:
            connection.execute(SQL.unhurried)
        except BaseException:
            connection.close()
            raise
        return connection
    except psycopg.Error as error:
        raise Unavailable("DataUnavailable", f"the data database can't be reached: {error}") from None
