"""The two roles of the Query Service in the state database: one reads the catalog, one adds audit rows.

Neither can do the other's work, nor anything else: they own nothing, are members of nothing, and the privileges
that Postgres grants to PUBLIC are revoked in this database. Installing again is safe: it renews the
grants and sets the passwords given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import asyncpg

from tracelake.postgres import scram, sqlfiles
from tracelake.postgres.roles import change_roles, put_bare_role, strip_public_or_warn
from tracelake.settings import Secret

CATALOG_ROLE = "tracelake_catalog"
AUDIT_ROLE = "tracelake_audit"

CONNECTIONS = 60
"""Maximum number of connections per role, for all Query Services of an installation together: one service has up to
four by the first role and two by the second. ``ALTER DATABASE … SET tracelake.guest_connections`` changes it."""

CATALOG_SETTINGS = frozenset(
    {
        "search_path=catalog",
        "default_transaction_read_only=on",
        "statement_timeout=10s",
        "idle_in_transaction_session_timeout=10s",
    }
)
AUDIT_SETTINGS = CATALOG_SETTINGS - {"default_transaction_read_only=on"}
"""The settings that the grants below make, as Postgres's catalogue shows them."""

_SQL = sqlfiles.load("tracelake.store.sql", "query_roles.sql")


async def install_query_roles(
    connection: asyncpg.Connection[Any],
    known: Mapping[str, str] | None = None,
    *,
    dsn: Secret,
    catalog_password: Secret,
    audit_password: Secret,
) -> None:
    """Install them in the migrated state database of ``connection``; the login of ``dsn`` may create roles.
    ``known`` are verifiers of exactly these passwords that roles have already."""
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
        await strip_public_or_warn(connection)
        await connection.execute(await connection.fetchval(_SQL.grant_catalog, CATALOG_ROLE))
        await connection.execute(await connection.fetchval(_SQL.grant_audit, AUDIT_ROLE))

    await change_roles(connection, put_roles, dsn=dsn.reveal(), guests=tuple(verifiers))
