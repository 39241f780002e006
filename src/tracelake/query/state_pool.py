"""The Query Service's connections to the state database: few, short, and none while nobody asks."""

from __future__ import annotations

import asyncpg

from tracelake.postgres_sessions import KEEPALIVES, end_transactions_after
from tracelake.secret import Secret

STATE_ERRORS = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)
"""What a database that is down, overloaded or replaced looks like from here."""

_CONNECT_SECONDS = 5.0
_COMMAND_SECONDS = 10.0
_TRANSACTION_SECONDS = 40
CLOSE_SECONDS = 1.0


async def open_pool(dsn: Secret, connections: int, application: str) -> asyncpg.Pool:
    """Doesn't wait for the database."""
    return await asyncpg.create_pool(
        dsn.reveal(),
        min_size=0,
        max_size=connections,
        init=end_transactions_after(_TRANSACTION_SECONDS),
        reset=_keep_session,
        timeout=_CONNECT_SECONDS,
        command_timeout=_COMMAND_SECONDS,
        server_settings={
            **KEEPALIVES,
            "application_name": application,
            "timezone": "UTC",
            "jit": "off",
            "plan_cache_mode": "force_generic_plan",
        },
    )


async def _keep_session(connection: asyncpg.Connection) -> None:
    """Single statements leave nothing behind in the session, so the usual reset would only cost a round trip."""
