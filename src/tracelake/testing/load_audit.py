"""Holds the state database to a load's ledger: nothing acknowledged is lost, nothing was committed twice.

It knows the history of acknowledged calls and the database as it is now, and nothing of how the one became
the other.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import asyncpg

from tracelake import sqlfiles
from tracelake.testing.caller import Ledger
from tracelake.testing.load import SCOPE_JOBS

SQL = sqlfiles.load("tracelake.testing", "load_audit.sql")
_POLL = 0.1


async def settled(state_dsn: str, patience: float = 60.0) -> None:
    """Returns once no task waits or runs and the outbox is empty; says what is left if that never comes."""
    connection = await asyncpg.connect(state_dsn)
    left: list[str] = []
    try:
        async with asyncio.timeout(patience):
            while True:
                left = [row["what"] for row in await connection.fetch(SQL.unfinished)]
                if not left:
                    return
                await asyncio.sleep(_POLL)
    except TimeoutError:
        raise AssertionError("still unfinished:\n" + "\n".join(left)) from None
    finally:
        await connection.close()


async def audit(state_dsn: str, ledger: Ledger) -> list[str]:
    """Every way in which the settled database contradicts the ledger."""
    connection = await asyncpg.connect(state_dsn)
    try:
        return [
            *ledger.surprises,
            *_scopes(ledger, await connection.fetch(SQL.scopes)),
            *_attempts(ledger, await connection.fetch(SQL.completed_attempts)),
            *_partitions(ledger, await connection.fetch(SQL.committed_scopes)),
            *_merged(ledger, await connection.fetch(SQL.merged_ranges), await _cursor(connection)),
        ]
    finally:
        await connection.close()


async def _cursor(connection: asyncpg.Connection[Any]) -> int:
    cursor: int = await connection.fetchval(SQL.merge_cursor)
    return cursor


def _scopes(ledger: Ledger, rows: list[asyncpg.Record]) -> list[str]:
    """One task for each job and acknowledged scope, and it is completed."""
    found: Counter[tuple[str, int, int]] = Counter()
    wrong = []
    for row in rows:
        found[row["job"], row["range_start"], row["range_end"]] += 1
        if row["status"] != "Completed":
            wrong.append(f"{row['job']} {row['range_start']}-{row['range_end']} is {row['status']}")
    wanted = {(job, start, end) for job in SCOPE_JOBS for start, end in ledger.scopes}
    wrong += [f"lost: no task of {job} for {start}-{end}" for job, start, end in sorted(wanted - set(found))]
    wrong += [f"nobody asked for {job} {start}-{end}" for job, start, end in sorted(set(found) - wanted)]
    wrong += [f"{count} tasks of {scope}" for scope, count in found.items() if count != 1]
    return wrong


def _attempts(ledger: Ledger, rows: list[asyncpg.Record]) -> list[str]:
    """A task is completed by one attempt, the one that was told so."""
    counted = {str(row["task_id"]): row["attempts"] for row in rows}
    wrong = [
        f"task {task} was completed by attempts {each}" for task, each in counted.items() if len(each) > 1
    ]
    for task, attempt in ledger.completions.items():
        if counted.get(task) != [attempt]:
            wrong.append(f"task {task}: attempt {attempt} was acknowledged, {counted.get(task)} counted")
    return wrong


def _partitions(ledger: Ledger, rows: list[asyncpg.Record]) -> list[str]:
    """Each job's output has each scope once, and no other."""
    wrong = []
    for job in SCOPE_JOBS:
        spans = sorted((row["range_start"], row["range_end"]) for row in rows if row["job"] == job)
        if spans != sorted(ledger.scopes):
            wrong.append(
                f"the partitions of {job} are {spans[:5]}…, not the {len(ledger.scopes)} scopes asked for"
            )
    return wrong


def _merged(ledger: Ledger, rows: list[asyncpg.Record], cursor: int) -> list[str]:
    """The ranges that were read follow each other without gap or overlap up to the last cursor."""
    wrong = []
    reached = -1
    for row in rows:
        if row["status"] != "Completed":
            wrong.append(f"merge up to {row['upto']} is {row['status']}")
        elif row["after"] != reached:
            wrong.append(f"merge read on from {row['after']} after it had read up to {reached}")
        reached = row["upto"]
    if not reached == cursor == ledger.highest_tick:
        wrong.append(
            f"merge read up to {reached}, its cursor is {cursor}, ticks went to {ledger.highest_tick}"
        )
    return wrong
