"""Who waits for whom: whether the statements in flight have come as far as they can.

A statement that waits is only left alone once it has outlived the deadlock timeout: its own look for a cycle
is over then, so of a cycle that is closed later the last one in is the victim, every time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

DEADLOCK_TIMEOUT = 0.001
_POLL = 0.0005


class LockMonitor(Protocol):
    async def blockers(self, pids: list[int]) -> dict[int, list[int]]: ...


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement in flight, and the server process that runs it."""

    pid: int
    task: asyncio.Task[Any]


async def until_settled(monitor: LockMonitor, statements: Sequence[Statement]) -> None:
    unsettled = True
    while unsettled:
        unsettled = not await settled(monitor, statements)
        await asyncio.sleep(_POLL if unsettled else 0)


async def settled(monitor: LockMonitor, statements: Sequence[Statement]) -> bool:
    """Is every statement done, or waiting for a session that is idle or waits itself?"""
    if not await _look(monitor, statements):
        return False
    await asyncio.sleep(DEADLOCK_TIMEOUT * 3)
    return await _look(monitor, statements)


async def _look(monitor: LockMonitor, statements: Sequence[Statement]) -> bool:
    undone = [statement for statement in statements if not statement.task.done()]
    if not undone:
        return True
    waits = await monitor.blockers([statement.pid for statement in undone])
    return all(
        statement.task.done() or (waits[statement.pid] and not _in_cycle(statement.pid, waits))
        for statement in undone
    )


def _in_cycle(pid: int, waits: dict[int, list[int]]) -> bool:
    seen: set[int] = set()
    ahead = list(waits[pid])
    while ahead:
        other = ahead.pop()
        if other == pid:
            return True
        if other not in seen:
            seen.add(other)
            ahead += waits.get(other, [])
    return False
