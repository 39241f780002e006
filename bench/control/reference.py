"""The yardstick: plain durable single-row commits per second on one connection of the same Postgres."""

from __future__ import annotations

import time

import asyncpg

from tracelake import sqlfiles

SQL = sqlfiles.load("bench.control", "reference.sql")


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
