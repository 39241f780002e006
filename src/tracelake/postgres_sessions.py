"""Limits that end a Postgres session whose client has vanished, and with it the locks that the session holds.

``idle_in_transaction_session_timeout`` ends a session that waits for the next statement, ``statement_timeout``
cancels one that runs. Neither ends a session whose client vanished between the messages of one statement, after
the statement was parsed and before it was executed: the server counts it as running, and ignores a cancel while
it reads from the client. ``transaction_timeout`` does, from Postgres 17 on; older servers notice by TCP keepalives
that the client's machine is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

KEEPALIVES = {
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
    "tcp_user_timeout": "30000",
}
"""Server settings of every connection: a client's machine that is gone is noticed within 40 seconds."""

_LIMIT = """
SELECT set_config('transaction_timeout', $1, false) FROM pg_settings WHERE name = 'transaction_timeout'
"""


def end_transactions_after(seconds: int) -> Callable[[Any], Coroutine[Any, Any, None]]:
    """An ``init`` function for a pool: a transaction that is open for longer ends, together with its session."""

    async def limit(connection: Any) -> None:
        await connection.fetch(_LIMIT, f"{seconds}s")

    return limit


async def while_waiting(
    work: Coroutine[Any, Any, T], look: Callable[[], Awaitable[object]], patience: float
) -> T:
    """The result of ``work``. Each time that it has taken ``patience`` seconds more, ``look`` is called: it may
    find a session in the way and end it."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=patience))[0]:
            await look()
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
