"""Creates roles and databases that are missing, and leaves existing ones alone.

Postgres lets every role into every database by default; here a role gets into those that it owns or was granted,
and into no other.
"""

from __future__ import annotations

from contextlib import suppress

import psycopg
from psycopg import errors, sql

from tracelake.postgres import sqlfiles

_QUERIES = sqlfiles.load("tracelake.embedded.postgres", "provision.sql")


def ensure_role(admin_dsn: str, role: str, password: str) -> None:
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        connection.execute(_compose(_QUERIES.close_maintenance_database))
        # Hashed on this side: the statement, and so the server's log, never has the password.
        verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
        parts = {"role": sql.Identifier(role), "verifier": sql.Literal(verifier.decode())}
        known = connection.execute(_compose(_QUERIES.find_role), {"role": role}).fetchone()
        query = _QUERIES.set_password if known else _QUERIES.create_role
        connection.execute(_compose(query, **parts))


def ensure_database(admin_dsn: str, database: str, owner: str) -> None:
    # CREATE DATABASE is refused inside a transaction.
    with psycopg.connect(admin_dsn, autocommit=True) as connection:
        names = {"database": sql.Identifier(database), "owner": sql.Identifier(owner)}
        known = connection.execute(_compose(_QUERIES.find_database), {"database": database}).fetchone()
        if not known:
            # Another process may have created it since the look; Postgres reports that race in either way.
            with suppress(errors.DuplicateDatabase, errors.UniqueViolation):
                connection.execute(_compose(_QUERIES.create_database, **names))
        # Each time: the process that created it may have died before closing it.
        connection.execute(_compose(_QUERIES.close_database, **names))
        connection.execute(_compose(_QUERIES.close_maintenance_database))


def _compose(query: str, **parts: sql.Composable) -> sql.Composed:
    return sql.SQL(query).format(**parts)
