"""The two roles by which the Query Service gets at the state database: one reads the catalog, one adds audit rows.

Neither can do the other's work, nor anything else: they own nothing, are members of nothing, and what Postgres
gives to everybody (PUBLIC) is taken back in this database. Installing again is safe: it renews the grants and sets
the passwords given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg

from tracelake import scram, sqlfiles
from tracelake.roles import change_roles, put_bare_role, strip_public_or_say
from tracelake.secret import Secret

CATALOG_ROLE = "tracelake_catalog"
AUDIT_ROLE = "tracelake_audit"

CONNECTIONS = 60
"""Of each role at once, for all Query Services of an installation together: one of them has up to four by the
first and two by the second. ``ALTER DATABASE … SET tracelake.guest_connections`` says another number."""

CATALOG_SETTINGS = frozenset(
    {
        "search_path=catalog",
        "default_transaction_read_only=on",
        "statement_timeout=10s",
        "idle_in_transaction_session_timeout=10s",
    }
)
AUDIT_SETTINGS = CATALOG_SETTINGS - {"default_transaction_read_only=on"}
"""What the grants below set, as the catalogue of Postgres has it."""

_SQL = sqlfiles.load("tracelake.store.sql", "query_roles.sql")


async def install_query_roles(
    connection: asyncpg.Connection[Any],
    known: Mapping[str, str] | None = None,
    *,
    dsn: Secret,
    catalog_password: Secret,
    audit_password: Secret,
) -> None:
    """In the migrated state database of ``connection``, by ``dsn``, which may make roles. ``known`` are verifiers
    of these very passwords that roles have already."""
    verifiers = {
        CATALOG_ROLE: scram.verifier(catalog_password.reveal()),
        AUDIT_ROLE: scram.verifier(audit_password.reveal()),
        **(known or {}),
    }

    async def put_roles() -> None:
        for role, verifier in verifiers.items():
            await put_bare_role(
                connection, role, verifier, needed_by="the Query Service", connections=CONNECTIONS
            )
        await connection.execute(await connection.fetchval(_SQL.close_database))
        await strip_public_or_say(connection)
        await connection.execute(await connection.fetchval(_SQL.grant_catalog, CATALOG_ROLE))
        await connection.execute(await connection.fetchval(_SQL.grant_audit, AUDIT_ROLE))

    await change_roles(connection, put_roles, dsn=dsn.reveal(), guests=tuple(verifiers))
