"""The handler's data: constants, or one SELECT through asyncpg when a DSN is given."""

from __future__ import annotations

import json
from typing import Any
from uuid import UUID

import asyncpg

from bench.framework.shapes import CONFIG, DSN, QUERY, UUID_A

Row = tuple[int, UUID, dict[str, Any]]


class Lookup:
    """Opened on the server's own loop, at the first request: start-up hooks differ between the candidates."""

    def __init__(self) -> None:
        self._pool: asyncpg.Pool[asyncpg.Record] | None = None

    async def find(self, task_id: UUID) -> Row:
        if DSN is None:
            return 1, UUID_A, CONFIG
        if self._pool is None:
            self._pool = asyncpg.create_pool(DSN, min_size=8, max_size=8)
        await self._pool
        row = await self._pool.fetchrow(QUERY, task_id)
        if row is None:
            raise LookupError(task_id)
        return row["attempt"], row["lease_token"], json.loads(row["config"])
