"""The ``lambda`` runtime: wake-ups become leases, and leases are handed over to invokers.

A task is claimed only when somebody is there to be asked, so tasks that can't run keep waiting without a lease. A
wake-up leaves the outbox when its task was claimed or can't be; until then it is held there, and comes again by
itself if this process dies. When nobody can be asked at all, wake-ups go back to the outbox, which tries them again
after a while and shows why; an invoker that comes makes them due at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from uuid import UUID

import structlog
from prometheus_client import CollectorRegistry, Gauge

from tracelake.dispatcher.loops.hand_over import HandOvers
from tracelake.dispatcher.loops.invokers import Invokers, Turn
from tracelake.domain.errors import Unavailable
from tracelake.store import invokers, outbox
from tracelake.store.db import Database, DeployLock
from tracelake.store.invokers import InvokerRow
from tracelake.store.outbox_entry import OutboxEntry

log = structlog.get_logger(__name__)

IN_HAND = 64
MAX_WAITING = 20_000
LOOK_SECONDS = 1.0
HELD_SECONDS = (1.0, 15.0)
"""Waiting for an invoker is no failure of the wake-up: it is tried for as long as it takes."""
_NEVER_GIVEN_UP = 2**31 - 1

Settle = Callable[[Sequence[int]], None]


async def look_who_is_there(db: Database, known: Invokers, always_there: Sequence[InvokerRow] = ()) -> None:
    """``always_there`` are invokers that are configured and don't register themselves."""
    present = await db.run(invokers.present, lock=DeployLock.NONE)
    known.see([*always_there, *present])


class FunctionInvocations:
    """``look`` brings ``known`` up to date."""

    def __init__(
        self,
        db: Database,
        known: Invokers,
        look: Callable[[], Awaitable[None]],
        hand_overs: HandOvers,
        registry: CollectorRegistry,
    ) -> None:
        self._db = db
        self._hand_overs = hand_overs
        self._invokers = known
        self._look = look
        self._looked_at = float("-inf")
        self._waiting: dict[UUID, tuple[OutboxEntry, Settle]] = {}
        self._in_hand: dict[UUID, asyncio.Task[None]] = {}
        self._stirred = asyncio.Event()
        waiting = Gauge("tracelake_invocations_waiting", "Tasks that wait for an invoker.", registry=registry)
        waiting.set_function(lambda: len(self._waiting))

    def offer(self, entries: Sequence[OutboxEntry], settle: Settle) -> None:
        """Wake-ups to act on. ``settle`` is called with those that are done with; any other stays in the outbox
        and comes again. What waits here already needs no second one."""
        for entry in entries:
            held = self._waiting.get(entry.task_id) if entry.task_id is not None else None
            if entry.task_id is None or (held is not None and held[0].outbox_id != entry.outbox_id):
                settle([entry.outbox_id])
            elif held is None and len(self._waiting) < MAX_WAITING:
                self._waiting[entry.task_id] = (entry, settle)
        self._stirred.set()

    async def run(self) -> None:
        """For ever: hand over what waits, as far as somebody is there to take it."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS if self._waiting else None):
                    await self._stirred.wait()
            self._stirred.clear()
            try:
                await self._pass()
            except Unavailable as error:
                log.warning("functions wait for the database", error=error.message)
                await asyncio.sleep(LOOK_SECONDS)
            except Exception:
                log.exception("loop failed", loop="invoke functions")
                await asyncio.sleep(LOOK_SECONDS)

    async def drain(self, seconds: float) -> None:
        """Begin nothing more. What waits for a slot is released; what is being handed over gets half of that time
        for its answer, and the other half to be given up in order."""
        self._hand_overs.stop()
        self._waiting.clear()
        if self._in_hand:
            _, late = await asyncio.wait(self._in_hand.values(), timeout=seconds / 2)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=seconds / 2)

    async def _pass(self) -> None:
        if not self._waiting:
            return
        now = asyncio.get_running_loop().time()
        if not len(self._invokers) or now - self._looked_at >= LOOK_SECONDS:
            await self._look()
            self._looked_at = now
        self._begin(now)
        if self._waiting and (why := self._invokers.why_nobody(now)):
            await self._put_back(why)

    def _begin(self, now: float) -> None:
        for task_id in [*self._waiting]:
            if len(self._in_hand) >= IN_HAND:
                return
            if task_id in self._in_hand:
                continue
            invoker = self._invokers.choose(now)
            if invoker is None:
                return
            entry, settle = self._waiting.pop(task_id)
            settled = partial(settle, [entry.outbox_id])
            task = asyncio.create_task(self._hand_overs.deliver(task_id, Turn(invoker), settled))
            self._in_hand[task_id] = task
            task.add_done_callback(partial(self._done, task_id))

    def _done(self, task_id: UUID, _: asyncio.Task[None]) -> None:
        del self._in_hand[task_id]
        self._stirred.set()

    async def _put_back(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        ids = [entry.outbox_id for entry, _ in waiting.values()]
        base, longest = HELD_SECONDS
        await self._db.run(
            lambda tx: outbox.failed(
                tx, ids, why, base_seconds=base, max_seconds=longest, max_tries=_NEVER_GIVEN_UP
            ),
            lock=DeployLock.NONE,
        )
        log.warning("functions can't be handed over", count=len(ids), error=why)
