"""A query of our own, done before anybody's: what is touched for the first time costs, so it is touched while idle.

The template does it once, so that caches are filled and code is loaded; each fork does it again before it says that
it is ready, so that the pages that a query writes to are its own already. Most of a small query's time goes there
otherwise. The file that it reads is sealed memory, which no query can write to, and stays open, so that its
descriptor never becomes another's.
"""

from __future__ import annotations

import duckdb

from tracelake.query.engine import attach
from tracelake.query.engine.gate import parse
from tracelake.query.engine.identifiers import quoted
from tracelake.query.engine.messages import Run
from tracelake.query.engine.send_rows import send_rows
from tracelake.query.engine.warm_up_rows import SCHEMA

_NAME = "tracelake_warm_up"
_ORDER = Run([], 100, 65536, 65536)
_SQL = (
    "SELECT block_number, count(*) AS n, max(address) AS address, sum(amount) AS amount FROM tracelake_warm_up "
    "WHERE block_number BETWEEN ? AND 20 AND address LIKE 'x%' GROUP BY block_number ORDER BY n DESC LIMIT 10"
)


class WarmUp:
    """``file`` is a descriptor of ``warm_up_rows.sealed_file``, kept for good."""

    def __init__(self, file: int) -> None:
        self._relation = attach.Received(_NAME, SCHEMA, [file], [])

    def do(self, connection: duckdb.DuckDBPyConnection) -> None:
        parse(connection.cursor(), _SQL, [5])
        attach.attach(connection, [self._relation])
        send_rows(len, connection.sql(_SQL, params=[5]), _ORDER)
        connection.execute(attach.SQL.drop_view.format(name=quoted(_NAME)))
