"""Databases of one test run on a server that several processes share.

Names carry the run's id, so that runs don't meet on an external server and a template is never older than
the code that built it. An advisory lock lets one process build a template while the others wait; it counts
as built once it's marked as a template, which is the build's last act.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import psycopg
from psycopg import sql

from tracelake import sqlfiles
from tracelake.domain.errors import Invalid

_QUERIES = sqlfiles.load("tracelake.testing", "shared_postgres.sql")
_OLDEST = 150000


class SharedPostgres:
    def __init__(self, admin_dsn: str, run: str) -> None:
        self.admin_dsn = admin_dsn
        self.run = run
        self._built: set[str] = set()
        with self._admin() as admin:
            version = admin.info.server_version
        if version < _OLDEST:
            raise Invalid("PostgresTooOld", f"tests need Postgres 15 or newer, this is {version // 10000}")

    def dsn(self, database: str) -> str:
        return urlunsplit(urlsplit(self.admin_dsn)._replace(path="/" + quote(database, "")))

    def clone(self, template_name: str, build: Callable[[str], None]) -> str:
        template = f"tracelake_{self.run}_template_{template_name}"
        self._ensure_template(template, build)
        database = f"tracelake_{self.run}_{uuid.uuid4().hex[:12]}"
        with self._admin() as admin:
            admin.execute(_compose(_QUERIES.clone, database=database, template=template))
        return self.dsn(database)

    def drop(self, dsn: str) -> None:
        with self._admin() as admin:
            admin.execute(_compose(_QUERIES.drop, database=unquote(urlsplit(dsn).path[1:])))

    def drop_everything(self) -> None:
        """Remove what this run made: for a server that outlives the run."""
        with self._admin() as admin:
            for (database,) in admin.execute(
                _QUERIES.list_run, {"prefix": f"tracelake_{self.run}_"}
            ).fetchall():
                admin.execute(_compose(_QUERIES.unmark_template, template=database))
                admin.execute(_compose(_QUERIES.drop, database=database))

    def _ensure_template(self, template: str, build: Callable[[str], None]) -> None:
        if template in self._built:
            return
        with self._admin() as admin:
            admin.execute(_QUERIES.lock, {"template": template})
            if not admin.execute(_QUERIES.find_template, {"template": template}).fetchone():
                admin.execute(_compose(_QUERIES.drop, database=template))
                admin.execute(_compose(_QUERIES.create, database=template))
                build(self.dsn(template))
                admin.execute(_compose(_QUERIES.mark_template, template=template))
        self._built.add(template)

    def _admin(self) -> psycopg.Connection:
        return psycopg.connect(self.admin_dsn, autocommit=True)


def _compose(query: str, **names: str) -> sql.Composed:
    return sql.SQL(query).format(**{key: sql.Identifier(name) for key, name in names.items()})
