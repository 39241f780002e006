"""The pool of slots: ``count`` queries run at a time, each in a confined process that was started beforehand.

One process more than there are slots is kept ready, so that a query finds one at once while the process of another,
which had to be killed, is replaced. ``FairQueue`` decides who is served next: callers take turns, a caller's own
queries are served in order, one caller holds only a part of the slots, and no caller fills the queue. How many may
wait, and for how long, is bounded. A caller without a key is bounded by the queue alone.

Open the pool in the main thread: a sandbox ends with the thread that started it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Coroutine, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeAlias, TypeVar

from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Unavailable
from tracelake.query.engine.confinement import Confinement, best_confinement
from tracelake.query.engine.restrict import SlotLimits, raise_descriptor_limit
from tracelake.query.engine.slot import Slot
from tracelake.query.engine.template import SlotOutput, Template, start_template
from tracelake.sandbox.layout import EndReason

T = TypeVar("T")
TurnKey: TypeAlias = Hashable | None
_SPARE = 1
#: One caller may fill this part of the queue.
_PARTS = 4
_START_BACKOFF = Backoff(0.2, 10.0)

_log = logging.getLogger(__name__)


class Slots:
    """``confinement`` describes for people (log, ``/readyz``) how the slots are confined; ``confined``: whether by
    a sandbox. ``count`` and ``free`` are for metrics."""

    def __init__(self, confinement: Confinement, limits: SlotLimits, count: int, queue: int) -> None:
        self.confinement = confinement.description
        self.confined = confinement.confined
        self.count = count
        self.limits = limits
        self._confinement = confinement
        # One caller can't hold all slots, unless there is only one.
        self._turns: FairQueue[Template] = FairQueue(max(1, count - 1), queue)
        self._output = SlotOutput()
        self._alive: set[Template] = set()
        self._idle: deque[Template] = deque()
        self._running = 0
        self._starting = 0
        self._start_failures = _START_BACKOFF.counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls,
        count: int,
        limits: SlotLimits,
        *,
        queue: int = 64,
        unconfined: bool = False,
        confinement: Confinement | None = None,
    ) -> Slots:
        """``count``: queries that run at a time; ``queue``: queries that may wait. Returns when the first slot is
        ready. Raises Unavailable when none can be started, or none can be confined and ``unconfined`` isn't set."""
        raise_descriptor_limit()
        chosen = confinement or await best_confinement(limits, unconfined=unconfined)
        slots = cls(chosen, limits, count, queue)
        try:
            slots._adopt(await start_template(chosen, slots._output))
        except BaseException:
            await slots.close()
            raise
        slots._fill_up()
        return slots

    @property
    def free(self) -> int:
        return min(self.count - self._running, len(self._idle))

    @asynccontextmanager
    async def take(self, wait_seconds: float, *, key: TurnKey = None) -> AsyncIterator[Slot]:
        """``key`` identifies the caller. Raises Unavailable ``QueryServiceBusy``. Leaving the context before the
        query has ended, by an error or by cancellation, kills the query."""
        template = await self._next(wait_seconds, key)
        slot = Slot(template, self.limits)
        try:
            yield slot
        finally:
            self._put_back(template, slot, key)

    async def _next(self, wait_seconds: float, key: TurnKey) -> Template:
        if self._closed.done():
            raise Unavailable("QueryServiceClosed", "the query service is shutting down")
        turn = self._turns.join(key)
        self._serve()
        try:
            # Not ``wait_for``: it would cancel the turn, and
            # ``_serve`` can't set the result of a canceled future.
            await asyncio.wait({turn}, timeout=wait_seconds)
        except asyncio.CancelledError:
            # The slot may have been granted at the very moment of the cancellation.
            if turn.done() and turn.exception() is None:
                self._return(turn.result(), key)
            elif not turn.done():
                self._turns.leave(key, turn)
            raise
        if not turn.done():
            self._turns.leave(key, turn)
            raise busy(f"none of {self.count} slots became free within {wait_seconds:g} s")
        return turn.result()

    def _return(self, unused: Template, key: TurnKey) -> None:
        self._running -= 1
        self._turns.done(key)
        # It may have ended between its turn and the cancellation.
        if unused in self._alive:
            # It saw no query, so it is the first to be used again.
            self._idle.appendleft(unused)
        self._serve()

    def _put_back(self, template: Template, slot: Slot, key: TurnKey) -> None:
        self._running -= 1
        self._turns.done(key)
        # The next query gets the spare process now, and doesn't wait for this one to be renewed.
        self._serve()
        self._background(self._renew(template, slot))

    async def _renew(self, template: Template, slot: Slot) -> None:
        """The process makes itself ready for the next query, or is replaced."""
        if await slot.leave() and template in self._alive:
            self._idle.append(template)
            self._serve()
            return
        self._alive.discard(template)
        self._fill_up()
        # The replacement starts while this process is still being killed.
        await template.end()
        if not self._closed.done():
            reason, output = template.process.ended.result(), self._output.take()
            # A kill is how a timeout or a disconnected caller ends; anything else is worth a look.
            level = logging.INFO if reason is EndReason.KILLED and not output else logging.WARNING
            _log.log(level, "a process for queries has ended (%s) %s", reason.value, output)

    def _serve(self) -> None:
        while self._idle and self._running < self.count and (turn := self._turns.next()) is not None:
            self._running += 1
            turn.set_result(self._idle.popleft())

    def _adopt(self, template: Template) -> None:
        self._alive.add(template)
        self._idle.append(template)
        template.process.ended.add_done_callback(lambda _: self._lost(template))
        self._serve()

    def _lost(self, template: Template) -> None:
        """An idle process may end too, for instance when the machine runs out of memory."""
        self._alive.discard(template)
        # A process in use is closed by ``_renew``, which its caller triggers.
        if template in self._idle:
            self._idle.remove(template)
            template.close()
        self._fill_up()

    def _fill_up(self) -> None:
        """Starts at most as many at a time as the machine has cores: each start uses one for a third of a
        second."""
        missing = self.count + _SPARE - len(self._alive) - self._starting
        for _ in range(min(missing, (os.cpu_count() or 1) - self._starting)):
            if not self._closed.done():
                self._starting += 1
                self._background(self._start())

    async def _start(self) -> None:
        try:
            template = await start_template(self._confinement, self._output)
            self._start_failures.succeeded()
            if self._closed.done():
                await template.end()
            else:
                self._adopt(template)
        except (Unavailable, OSError) as error:
            _log.error("%s", error)
            # A pool that is closed meanwhile doesn't wait for the whole pause.
            await asyncio.wait({self._closed}, timeout=self._start_failures.failed())
        finally:
            # The number of starts at a time is bounded, so each one that ends makes room for another.
            self._starting -= 1
            self._fill_up()

    def _background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Leaves no process behind. Queries that run are killed; processes that are starting are waited for."""
        if self._closed.done():
            return
        self._closed.set_result(None)
        self._turns.refuse_all(Unavailable("QueryServiceClosed", "the query service is shutting down"))
        alive, idle = tuple(self._alive), tuple(self._idle)
        for template in alive:
            template.process.kill()
        await asyncio.gather(*(asyncio.shield(template.process.ended) for template in alive))
        # The socket of a process in use is closed by ``_renew``, after its caller has seen the end.
        await asyncio.gather(*(template.end() for template in idle))
        # Starts and renewals that are under way end their own processes.
        while self._tasks:
            await asyncio.gather(*self._tasks)
        await self._confinement.close()
        self._output.close()


class FairQueue(Generic[T]):
    """``share``: maximum number of slots that one caller holds; ``queue``: maximum number of waiting queries."""

    def __init__(self, share: int, queue: int) -> None:
        self._share = share
        self._queue = queue
        self._max_per_caller = max(1, queue // _PARTS)
        self._waiting: OrderedDict[TurnKey, deque[asyncio.Future[T]]] = OrderedDict()
        self._running: Counter[TurnKey] = Counter()
        self._count = 0

    def join(self, key: TurnKey) -> asyncio.Future[T]:
        """The future gets its result when it is the caller's turn."""
        if self._count >= self._queue:
            raise busy(f"{self._queue} queries are waiting already")
        own = self._waiting.get(key, ())
        if key is not None and len(own) >= self._max_per_caller:
            raise busy(f"{self._max_per_caller} of your queries are waiting already")
        turn: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        self._count += 1
        return turn

    def leave(self, key: TurnKey, turn: asyncio.Future[T]) -> None:
        """Give up waiting, before it was the caller's turn."""
        self._waiting[key].remove(turn)
        self._forget(key)

    def next(self) -> asyncio.Future[T] | None:
        """The turn that a free slot goes to; the slot counts as taken from here on."""
        for key, turns in self._waiting.items():
            if key is None or self._running[key] < self._share:
                # The loop ends here, so changing the mapping inside it is safe.
                turn = turns.popleft()
                self._waiting.move_to_end(key)
                self._forget(key)
                self._running[key] += 1
                return turn
        return None

    def done(self, key: TurnKey) -> None:
        """The caller has returned a slot."""
        self._running[key] -= 1
        if not self._running[key]:
            # Every task is a new key, so keys that stay would add up for as long as the service runs.
            del self._running[key]

    def refuse_all(self, why: Unavailable) -> None:
        for turns in self._waiting.values():
            for turn in turns:
                turn.set_exception(why)
        self._waiting.clear()
        self._count = 0

    def _forget(self, key: TurnKey) -> None:
        self._count -= 1
        if not self._waiting[key]:
            del self._waiting[key]


def busy(why: str) -> Unavailable:
    return Unavailable("QueryServiceBusy", f"{why}; try again")
