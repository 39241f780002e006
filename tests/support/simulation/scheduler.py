"""The scheduler: the one place where a simulated run takes its decisions, with its trace and its treatment of
locks.

Actors are coroutines that pass every statement, pause and look at the world to ``turn`` and wait. Exactly one
of them runs at any time, and one statement is in flight, except for statements that wait for a lock: those are
parked until a commit lets them continue, one at a time. Postgres itself is asked whether a statement waits. The
trace has a line for each event and one hash over all of them: two runs of a seed must agree in every line.

A waiting statement is only left alone once it has outlived the deadlock timeout: its own search for a cycle is
over then, so the last one to close a cycle is always the victim. A commit may release several waiters at once,
and the machine would decide which of them gets the next lock first. So the server process of a waiting
statement is stopped (SIGSTOP) while it sleeps, and they continue one at a time. Which commit grants which lock
is decided by Postgres, the same every time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import zlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import asyncpg

START = datetime(2030, 1, 1, tzinfo=UTC)
DEADLOCK_TIMEOUT = 0.001
_POLL = 0.0005
PATIENCE = 0.004


class Trace:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._hash = hashlib.sha256()

    def add(self, now: datetime, actor: str, label: str, result: str) -> None:
        at = (now - START) / timedelta(seconds=1)
        line = f"{len(self.lines):5d} {at:8.1f}s {actor:<12} {label:<58.58} {result}"
        self.lines.append(line)
        self._hash.update(line.encode())

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def summary(result: Any) -> str:
    """A result in a few characters that differ when the result does."""
    if isinstance(result, BaseException):
        return f"{type(result).__name__}: {result}"[:100]
    if isinstance(result, Sequence) and not isinstance(result, str):
        return f"{len(result)} rows {zlib.crc32(repr(result).encode()):08x}"
    return "" if result is None else str(result)[:60]


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


_actor: ContextVar[str] = ContextVar("simulated_actor")


class Died(BaseException):
    """The process that ran this is gone, with all it knew. Nothing of ours may catch it by accident."""


class Link(Protocol):
    """A database session that a turn uses."""

    pid: int

    async def lose(self) -> None:
        """The client is gone: the server rolls back and releases what the session held."""


class Monitor(LockMonitor, Protocol):
    async def set_clock(self, now: datetime) -> None: ...

    def hold(self, pid: int) -> None:
        """Keep the session's server process from going on by itself."""

    def let_go(self, pid: int) -> None: ...


@dataclass(slots=True, eq=False)
class Turn:
    actor: str
    label: str
    run: Callable[[], Awaitable[Any]] | None
    link: Link | None
    releases: bool
    due: datetime | None
    future: asyncio.Future[Any]
    task: asyncio.Task[Any] | None = None
    postponed: bool = False


@dataclass(slots=True)
class Odds:
    """How often a statement's process dies, how the interleaving leans, and how often an actor is passed over
    for a long while: some races need one actor to stand still while others do all of their work. ``slow_commit`` is
    how often a commit takes that long: what it wrote is seen late, and its locks are held."""

    die: float = 0.0
    die_at_commit: float = 0.0
    stick: float = 0.0
    tick: float = 0.1
    longest_tick: float = 5.0
    starve: float = 0.0
    slow_commit: float = 0.0


@dataclass(slots=True)
class Scheduler:
    rng: random.Random
    monitor: Monitor
    odds: Odds
    trace: Trace = field(default_factory=Trace)
    now: datetime = START
    errors: list[tuple[str, BaseException]] = field(default_factory=list)
    rolled_back: list[str] = field(default_factory=list)
    ending: bool = False
    direct: bool = False
    _waiting: list[Turn] = field(default_factory=list)
    _parked: list[Turn] = field(default_factory=list)
    _running: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _database_now: datetime = START
    _last: str = ""
    _taken: int = 0
    _starved: dict[str, int] = field(default_factory=dict)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def actor(self) -> str:
        return _actor.get("-")

    def spawn(self, name: str, body: Coroutine[Any, Any, None]) -> None:
        self._running += 1
        self._idle.clear()
        task = asyncio.create_task(self._act(name, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def turn(
        self,
        label: str,
        run: Callable[[], Awaitable[Any]] | None = None,
        *,
        link: Link | None = None,
        releases: bool = False,
        due: datetime | None = None,
    ) -> Any:
        """Wait to be chosen, have ``run`` run, and get its result."""
        if self.direct:
            return await self._directly(label, run)
        if self.ending:
            if link is not None:
                await link.lose()
            raise Died
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(Turn(self.actor, label, run, link, releases, due, future))
        self._stopped_running()
        return await future

    async def sleep(self, seconds: float) -> None:
        await self.turn(f"sleeps {seconds:.1f}s", due=self.now + timedelta(seconds=seconds))

    async def run(self, turns: int) -> None:
        """Let the actors act for a number of turns, or until none is left."""
        await self._all_waiting()
        for _ in range(turns):
            if self.errors or not (self._waiting or self._parked):
                return
            await self._one_turn()

    async def end(self) -> None:
        """Every process dies where it stands; what it had open is rolled back."""
        self.ending = True
        while self._waiting or self._parked:
            while self._waiting:
                turn = self._waiting.pop(0)
                if turn.link is not None:
                    await turn.link.lose()
                await self._deliver(turn, Died())
            await self._release_parked()

    def advance(self, seconds: float) -> None:
        """The database's clock follows with the next statement: no one else looks at it."""
        self.now += timedelta(seconds=seconds)

    async def _set_clock(self) -> None:
        if self._database_now != self.now:
            self._database_now = self.now
            await self.monitor.set_clock(self.now)

    async def _directly(self, label: str, run: Callable[[], Awaitable[Any]] | None) -> Any:
        await self._set_clock()
        try:
            result = await run() if run is not None else None
        except Exception as error:
            self.trace.add(self.now, self.actor, label, summary(error))
            raise
        self.trace.add(self.now, self.actor, label, summary(result))
        return result

    async def _act(self, name: str, body: Coroutine[Any, Any, None]) -> None:
        _actor.set(name)
        try:
            await body
        except Died:
            pass
        except Exception as error:
            self.errors.append((name, error))
        finally:
            self._stopped_running()

    def _stopped_running(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._idle.set()

    async def _all_waiting(self) -> None:
        if self._running:
            await self._idle.wait()

    async def _one_turn(self) -> None:
        self._taken += 1
        ready = [turn for turn in self._waiting if turn.due is None or turn.due <= self.now]
        if ready and self.rng.random() < self.odds.starve:
            committing = [turn for turn in ready if turn.label == "COMMIT"]
            victim = self.rng.choice(committing if committing and self.rng.random() < 0.6 else ready)
            self._starved[victim.actor] = self._taken + self.rng.randint(20, 200)
        eligible = [turn for turn in ready if self._starved.get(turn.actor, 0) <= self._taken]
        later = [turn.due for turn in self._waiting if turn.due is not None and turn.due > self.now]
        if not eligible and later:
            self.advance((min(later) - self.now).total_seconds())
            return
        if not ready:
            raise AssertionError("every actor waits for a lock that nobody holds")
        if self.rng.random() < self.odds.tick:
            self.advance(self.rng.uniform(0, self.odds.longest_tick))
        same = [turn for turn in eligible if turn.actor == self._last]
        stick = same and self.rng.random() < self.odds.stick
        turn = self.rng.choice(same if stick else eligible or ready)
        if self._commits_slowly(turn):
            return
        self._waiting.remove(turn)
        self._last = turn.actor
        await self._take(turn)

    def _commits_slowly(self, turn: Turn) -> bool:
        if turn.postponed or turn.label != "COMMIT" or not self.odds.slow_commit:
            return False
        turn.postponed = True
        slow = self.rng.random() < self.odds.slow_commit
        if slow:
            self._starved[turn.actor] = self._taken + self.rng.randint(20, 200)
        return slow

    async def _take(self, turn: Turn) -> None:
        dies = None
        if turn.link is not None:
            odds = self.odds.die_at_commit if turn.label == "COMMIT" else self.odds.die
            if self.rng.random() < odds:
                dies = self.rng.choice(("before", "after"))
        if dies == "before" and turn.link is not None:
            await turn.link.lose()
            await self._finish(turn, Died("before"), releases=True)
            return
        if turn.run is None:
            await self._finish(turn, None, releases=False)
            return
        if turn.link is not None:
            await self._set_clock()
        turn.task = asyncio.ensure_future(_as_coroutine(turn.run))
        if not await self._done_or_waiting(turn):
            self.trace.add(self.now, turn.actor, turn.label, "waits for a lock")
            self._park(turn)
            return
        result = _outcome(turn.task)
        if dies == "after" and turn.link is not None:
            await turn.link.lose()
            self.trace.add(self.now, turn.actor, turn.label, summary(result))
            result = Died("after")
        releases = turn.releases or isinstance(result, BaseException)
        await self._finish(turn, result, releases=releases)

    async def _finish(self, turn: Turn, result: Any, *, releases: bool) -> None:
        self.trace.add(self.now, turn.actor, turn.label, summary(result))
        if isinstance(result, asyncpg.PostgresError):
            self.rolled_back.append(f"{type(result).__name__} in: {turn.label}")
        await self._deliver(turn, result)
        if releases and self._parked:
            await self._release_parked()

    async def _deliver(self, turn: Turn, result: Any) -> None:
        self._running += 1
        self._idle.clear()
        if isinstance(result, BaseException):
            turn.future.set_exception(result)
        else:
            turn.future.set_result(result)
        await self._idle.wait()

    async def _done_or_waiting(self, turn: Turn) -> bool:
        """True once the statement is done, False once it waits for a lock that a parked session holds."""
        assert turn.task is not None
        await asyncio.wait({turn.task}, timeout=PATIENCE)
        statement = _statement(turn)
        while not turn.task.done():
            if statement is not None and await settled(self.monitor, statement, self._in_flight()):
                return turn.task.done()
            await asyncio.wait({turn.task}, timeout=PATIENCE / 4)
        return True

    def _in_flight(self) -> list[Statement]:
        return [statement for turn in self._parked if (statement := _statement(turn)) is not None]

    def _park(self, turn: Turn) -> None:
        assert turn.link is not None
        self.monitor.hold(turn.link.pid)
        self._parked.append(turn)

    async def _release_parked(self) -> None:
        """Let those go on whose lock has come free, one at a time, in the order in which they began to wait."""
        while self._parked:
            in_flight = self._in_flight()
            free = await granted(self.monitor, in_flight)
            if free is None:
                return
            turn = self._parked.pop(in_flight.index(free))
            self.monitor.let_go(free.pid)
            await until_settled(self.monitor, free, self._in_flight())
            if free.task.done():
                await self._finish(turn, _outcome(free.task), releases=False)
            else:
                self._park(turn)


def _statement(turn: Turn) -> Statement | None:
    if turn.link is None or turn.task is None:
        return None
    return Statement(turn.link.pid, turn.task)


def _outcome(task: asyncio.Task[Any]) -> Any:
    error = task.exception()
    return task.result() if error is None else error


async def _as_coroutine(run: Callable[[], Awaitable[Any]]) -> Any:
    return await run()
