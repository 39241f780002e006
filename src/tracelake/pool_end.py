"""The end of a pool of connections, the same for every process that has one."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg


async def close_pool(pool: asyncpg.Pool[Any], seconds: float) -> None:
    """In order when that can be done in time; whoever is still inside is cut off (the server rolls back)."""
    try:
        async with asyncio.timeout(seconds):
            await pool.close()
    except TimeoutError:
        pool.terminate()
