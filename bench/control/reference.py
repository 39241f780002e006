"""The reference line: plain durable single-row commits per second on one connection of the same Postgres."""

from __future__ import annotations

import asyncio
import time

import asyncpg
import psutil

from tracelake.postgres import sqlfiles

SQL = sqlfiles.load("bench.control", "reference.sql")


async def others_busy() -> float:
    """The part of the machine that is in use while the system under test is idle. Neighbours slow single
    commits down far more than batched work, so that with them a ratio flatters."""
    psutil.cpu_percent()
    await asyncio.sleep(1)
    return float(psutil.cpu_percent()) / 100


async def commits_per_second(dsn: str, seconds: float) -> float:
    """Refuses to measure a server that doesn't wait for its disk."""
    connection = await asyncpg.connect(dsn)
    try:
        durable = [await connection.fetchval(query) for query in (SQL.fsync, SQL.synchronous_commit)]
        if durable != ["on", "on"]:
            raise RuntimeError(f"fsync, synchronous_commit are {durable}: these would not be durable commits")
        await connection.execute(SQL.table)
        insert = await connection.prepare(SQL.insert)
        commits = 0
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            await insert.fetch(commits)
            commits += 1
        elapsed = time.monotonic() - began
        await connection.execute(SQL.drop)
        return commits / elapsed
    finally:
        await connection.close()
