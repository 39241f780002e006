"""Who waits for whom: whether a statement in flight has come as far as it can, and holding still those that wait.

A statement that waits is only left alone once it has outlived the deadlock timeout: its own look for a cycle
is over then, so of a cycle that is closed later the last one in is the victim, every time.

A commit may let several waiters go at once, and the machine decides which of them gets to the next lock first.
So the server process of a statement that waits is stopped (SIGSTOP) while it sleeps, and they go on one at a
time. Whose commit grants which lock is Postgres's own doing, and the same every time.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
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


async def until_settled(monitor: LockMonitor, statement: Statement, parked: Sequence[Statement]) -> None:
    unsettled = True
    while unsettled:
        unsettled = not await settled(monitor, statement, parked)
        await asyncio.sleep(_POLL if unsettled else 0)


async def settled(monitor: LockMonitor, statement: Statement, parked: Sequence[Statement]) -> bool:
    """Is the statement done, or does it wait for a session that is idle or waits itself?"""
    if not await _stuck(monitor, statement, parked):
        return statement.task.done()
    if _state(statement.pid) == "R":
        return False
    await asyncio.sleep(DEADLOCK_TIMEOUT * 3)
    if _state(statement.pid) == "R":
        return False
    return await _stuck(monitor, statement, parked) or statement.task.done()


async def granted(monitor: LockMonitor, parked: Sequence[Statement]) -> Statement | None:
    """The first of those that wait whose lock has come free."""
    waits = await monitor.blockers([statement.pid for statement in parked])
    return next((s for s in parked if s.task.done() or not waits[s.pid]), None)


async def _stuck(monitor: LockMonitor, statement: Statement, parked: Sequence[Statement]) -> bool:
    if statement.task.done():
        return False
    waits = await monitor.blockers([statement.pid, *(other.pid for other in parked)])
    stuck = bool(waits[statement.pid]) and not _in_cycle(statement.pid, waits)
    return stuck and not statement.task.done()


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


class HeldBackends:
    """Server processes that are stopped while they wait. One on another machine, or of another account, isn't
    ours to stop: there, which of several waiters goes on first is left to chance."""

    def __init__(self) -> None:
        self._ours: set[int] = set()
        self._held: set[int] = set()

    def know(self, pid: int, database: str, client_port: int | None) -> None:
        """Its title names database and client: only the process that serves this very session has that."""
        title = _read(pid, "cmdline")
        marks = (f" {database} ", f"({client_port})")
        if client_port and title.startswith("postgres:") and all(mark in title for mark in marks):
            self._ours.add(pid)

    def hold(self, pid: int) -> None:
        if pid in self._ours and self._signal(pid, signal.SIGSTOP):
            self._held.add(pid)

    def let_go(self, pid: int) -> None:
        if pid in self._held:
            self._signal(pid, signal.SIGCONT)
            self._held.discard(pid)

    def let_all_go(self) -> None:
        for pid in list(self._held):
            self.let_go(pid)

    def _signal(self, pid: int, number: signal.Signals) -> bool:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            self._ours.discard(pid)
            return False
        return True


def _state(pid: int) -> str:
    """The kernel's letter for what the process does (R runs, S sleeps); nothing where that can't be known."""
    return _read(pid, "stat").rpartition(")")[2].strip()[:1]


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
