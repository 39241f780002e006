"""A query of our own, done before anybody's: what is touched for the first time costs, so it is touched while idle.

The template does it once, so that caches are filled and code is loaded; each fork does it again before it says that
it is ready, so that the pages that a query writes to are its own already. Most of a small query's time goes there
otherwise. The file that it reads is sealed memory, which no query can write to, and stays open, so that its
descriptor never becomes another's.
"""

from __future__ import annotations

import fcntl
import os

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tracelake.query.engine import attach
from tracelake.query.engine.gate import parse
from tracelake.query.engine.identifiers import quoted
from tracelake.query.engine.messages import Run
from tracelake.query.engine.send_rows import send_rows

_NAME = "tracelake_warm_up"
_ORDER = Run([], 100, 65536, 65536)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
_SQL = (
    "SELECT block_number, count(*) AS n, max(address) AS address, sum(amount) AS amount FROM tracelake_warm_up "
    "WHERE block_number BETWEEN ? AND 20 AND address LIKE 'x%' GROUP BY block_number ORDER BY n DESC LIMIT 10"
)


class WarmUp:
    def __init__(self) -> None:
        rows = {"block_number": range(64), "address": [f"x{n}" for n in range(64)], "amount": [0.5] * 64}
        table = pa.table({name: pa.array(values) for name, values in rows.items()})
        memory = os.memfd_create("warm-up", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        with os.fdopen(os.dup(memory), "wb") as file:
            pq.write_table(table, file)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        self._relation = attach.Received(_NAME, table.schema, [memory], [])

    def do(self, connection: duckdb.DuckDBPyConnection) -> None:
        parse(connection.cursor(), _SQL, [5])
        attach.attach(connection, [self._relation])
        send_rows(len, connection.sql(_SQL, params=[5]), _ORDER)
        connection.execute(attach.SQL.drop_view.format(name=quoted(_NAME)))
