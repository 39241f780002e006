"""Signals between publishers and waiting receivers, by one connection per process.

A signal only shortens a wait: receivers look for themselves every so often (the fallback), so a lost signal costs
at most that. Publishers in the same process signal directly; other processes are signalled by NOTIFY, sent apart
from the publishing transaction (inside, it would take a lock of the whole server at commit) and coalesced: the
first goes out at once, further ones within a few milliseconds go out together.

One signal wakes one receiver of the process. A receiver that found a full batch wakes the next, so a burst
spreads over all of them while a single message doesn't send all of them to the database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeAlias

import asyncpg
import structlog

from tracelake.domain.backoff import Backoff
from tracelake.postgres import sqlfiles

CHANNEL = "tracelake_queue"
# A half-open connection receives nothing and reports nothing; a statement now and then detects it.
_PROBE_SECONDS = 15.0
_STATEMENT_TIMEOUT = 10.0
_RECONNECT_BACKOFF = Backoff(first=0.05, longest=2.0)
_INTERRUPTIONS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError)

_SQL = sqlfiles.load("tracelake.queue", "sql/messages.sql")
_log = structlog.get_logger(__name__)

QueueConnection: TypeAlias = "asyncpg.Connection[Any]"


class Waiter:
    """A receiver's place in the line of its queue, from before its first look until it has messages."""

    def __init__(self, wakeups: Wakeups, queue: str) -> None:
        self._wakeups = wakeups
        self._queue = queue
        self.signal = asyncio.Event()

    def __enter__(self) -> Waiter:
        self._wakeups.line(self._queue)[self] = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A signal that this receiver can't use (it was served, cancelled or cut off) goes to the next."""
        self._wakeups.leave(self._queue, self)
        # After an error it isn't known whether a signal came for this receiver, and one too many is harmless.
        if self.signal.is_set() or error is not None:
            self._wakeups.wake(self._queue)

    async def wait(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.signal.wait()


class Wakeups:
    """Keeps the connection, through restarts of the database, and the lines of waiting receivers."""

    def __init__(self, connect: Callable[[], Awaitable[QueueConnection]], coalesce_seconds: float) -> None:
        self._connect = connect
        self._coalesce_seconds = coalesce_seconds
        self._lines: dict[str, dict[Waiter, None]] = {}
        self._pending: set[str] = set()
        self._stir = asyncio.Event()
        self._listening = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="queue-wakeups")

    async def listening(self) -> None:
        """Returns once signals of other processes are received."""
        await self._listening.wait()

    async def close(self) -> None:
        # Receivers that wait notice the close now, not at their next look.
        for queue in tuple(self._lines):
            self._wake_line(queue)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def waiter(self, queue: str) -> Waiter:
        return Waiter(self, queue)

    def line(self, queue: str) -> dict[Waiter, None]:
        return self._lines.setdefault(queue, {})

    def leave(self, queue: str, waiter: Waiter) -> None:
        line = self._lines[queue]
        del line[waiter]
        if not line:
            del self._lines[queue]

    def announce(self, queue: str) -> None:
        """Messages can be received: wake a receiver here at once, and elsewhere as soon as NOTIFY goes out."""
        self.wake(queue)
        self._pending.add(queue)
        self._stir.set()

    def wake(self, queue: str) -> None:
        for waiter in self._lines.get(queue, ()):
            # Those with a signal are about to look anyway; it goes to the first that sleeps.
            if not waiter.signal.is_set():
                waiter.signal.set()
                return

    def _wake_line(self, queue: str) -> None:
        for waiter in self._lines.get(queue, ()):
            waiter.signal.set()

    async def _run(self) -> None:
        reconnects = _RECONNECT_BACKOFF.counter()
        while True:
            try:
                connection = await self._connect()
                try:
                    await self._listen(connection)
                    # Only once it listens: a server that accepts and
                    # then drops must still be left alone for a while.
                    reconnects.succeeded()
                    await self._notify_while_open(connection)
                finally:
                    self._listening.clear()
                    # A close in order would wait for a server that may be gone.
                    connection.terminate()
            except _INTERRUPTIONS as error:
                pause = reconnects.failed()
                _log.warning("queue_signals_interrupted", error=type(error).__name__, retry_in=pause)
            else:
                # The server closed the connection while no statement was running.
                pause = reconnects.failed()
            await asyncio.sleep(pause)

    async def _listen(self, connection: QueueConnection) -> None:
        own_pid = connection.get_server_pid()

        def receive(_connection: object, pid: int, _channel: str, payload: object) -> None:
            # Receivers of this process were woken directly, when the message was published.
            if pid != own_pid:
                self.wake(str(payload))

        # Or a connection that the server closed would only be noticed by the next probe.
        connection.add_termination_listener(lambda _connection: self._stir.set())
        await connection.add_listener(CHANNEL, receive)
        self._listening.set()
        # Signals sent while no connection listened are lost, so every reader polls once.
        for queue in tuple(self._lines):
            self._wake_line(queue)

    async def _notify_while_open(self, connection: QueueConnection) -> None:
        while not connection.is_closed():
            with suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_SECONDS):
                    await self._stir.wait()
            self._stir.clear()
            # Without names it is the probe. Names that fail to go
            # out are lost, and the fallback finds their messages.
            names, self._pending = sorted(self._pending), set()
            await connection.execute(_SQL.notify, names, timeout=_STATEMENT_TIMEOUT)
            await asyncio.sleep(self._coalesce_seconds)
