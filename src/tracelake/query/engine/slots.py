"""The pool of slots: so many queries at a time, each in a process that waits for it.

One process more than there are slots is kept ready, so that a query finds one at once while the process of another,
which had to be killed, is replaced. Callers take turns (``turns``), each of them is served in the order in which it
came; how many may wait, and for how long, is bounded. Open it in the main thread: a sandbox ends with the thread
that started it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from tracelake.domain.errors import Unavailable
from tracelake.query.engine.confinement import best_confinement
from tracelake.query.engine.limits import SlotLimits, raise_descriptor_limit
from tracelake.query.engine.slot import Slot
from tracelake.query.engine.slot_output import SlotOutput
from tracelake.query.engine.slot_process import Confinement
from tracelake.query.engine.template import Template, start_template
from tracelake.query.engine.turns import Key, Turns, busy
from tracelake.worker.sandbox import EndReason

_log = logging.getLogger(__name__)
_SPARE = 1
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0


class Slots:
    """``confinement`` says for people (log, ``/readyz``) what holds the slots; ``confined`` whether that is a
    sandbox. ``count`` and ``free`` are for metrics."""

    def __init__(self, confinement: Confinement, limits: SlotLimits, count: int, queue: int) -> None:
        self.confinement = confinement.description
        self.confined = confinement.confined
        self.count = count
        self.limits = limits
        self._held_by = confinement
        self._turns: Turns[Template] = Turns(max(1, count - 1), queue)
        self._output = SlotOutput()
        self._alive: set[Template] = set()
        self._idle: deque[Template] = deque()
        self._running = 0
        self._starting = 0
        self._pause = _FIRST_PAUSE
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
        """``count`` queries at a time, ``queue`` callers that may wait. Returns when the first slot is ready;
        raises Unavailable when it can't be, or can't be confined and isn't to run ``unconfined``."""
        raise_descriptor_limit()
        held_by = confinement or await best_confinement(limits, unconfined=unconfined)
        slots = cls(held_by, limits, count, queue)
        try:
            slots._adopt(await start_template(slots._held_by, slots._output))
        except BaseException:
            await slots.close()
            raise
        slots._fill_up()
        return slots

    @property
    def free(self) -> int:
        return min(self.count - self._running, len(self._idle))

    @asynccontextmanager
    async def take(self, wait_seconds: float, *, key: Key = None) -> AsyncIterator[Slot]:
        """``key`` is whose query it is. Raises Unavailable ``QueryServiceBusy``. A query that the caller leaves
        before its end, by an error or because the caller was cancelled, is killed."""
        template = await self._next(wait_seconds, key)
        slot = Slot(template, self.limits)
        try:
            yield slot
        finally:
            self._put_back(template, slot, key)

    async def _next(self, wait_seconds: float, key: Key) -> Template:
        if self._closed.done():
            raise Unavailable("QueryServiceClosed", "the query service is shutting down")
        turn = self._turns.join(key)
        self._serve()
        try:
            await asyncio.wait({turn}, timeout=wait_seconds)
        except asyncio.CancelledError:
            if turn.done() and turn.exception() is None:
                self._return(turn.result(), key)
            elif not turn.done():
                self._turns.leave(key, turn)
            raise
        if not turn.done():
            self._turns.leave(key, turn)
            raise busy(f"none of {self.count} slots became free within {wait_seconds:g} s")
        return turn.result()

    def _return(self, unused: Template, key: Key) -> None:
        self._running -= 1
        self._turns.done(key)
        if unused in self._alive:
            self._idle.appendleft(unused)
        self._serve()

    def _put_back(self, template: Template, slot: Slot, key: Key) -> None:
        self._running -= 1
        self._turns.done(key)
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
        await template.end()
        if not self._closed.done():
            how, said = template.process.ended.result(), self._output.take()
            level = logging.INFO if how is EndReason.KILLED and not said else logging.WARNING
            _log.log(level, "a process for queries has ended (%s) %s", how.value, said)

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
        """One that waited may end as well, when the machine runs out of memory for instance."""
        self._alive.discard(template)
        if template in self._idle:
            self._idle.remove(template)
            template.close()
        self._fill_up()

    def _fill_up(self) -> None:
        """No more at a time than the machine has cores: each needs one of them for a third of a second."""
        missing = self.count + _SPARE - len(self._alive) - self._starting
        for _ in range(min(missing, (os.cpu_count() or 1) - self._starting)):
            if not self._closed.done():
                self._starting += 1
                self._background(self._start())

    async def _start(self) -> None:
        try:
            template = await start_template(self._held_by, self._output)
            self._pause = _FIRST_PAUSE
            if self._closed.done():
                await template.end()
            else:
                self._adopt(template)
        except (Unavailable, OSError) as error:
            _log.error("%s", error)
            await asyncio.wait({self._closed}, timeout=self._pause)
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        finally:
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
        # The socket of one that was in use is closed when its caller has heard of the end.
        await asyncio.gather(*(template.end() for template in idle))
        while self._tasks:
            await asyncio.gather(*self._tasks)
        await self._held_by.close()
        self._output.close()
