"""The worker's wake-ups: messages that it has received and not yet settled.

They stay hidden from others for as long as it holds them, by one call every few seconds for all. Acknowledging and
giving back happen in the background and together. When the queue can't be reached they are let go: a wake-up that
comes twice is harmless, and one that is lost comes again from the state database.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import structlog

from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.queue.base import Message, Queue

VISIBILITY_SECONDS = 60.0
_PAUSES = (0.1, 5.0)
_GATHER_SECONDS = 0.02
"""Nobody waits for an acknowledgement: many go together."""

_log = structlog.get_logger(__name__)


class WakeUps:
    def __init__(self, queue: Queue, name: str, visibility_seconds: float = VISIBILITY_SECONDS) -> None:
        self._queue = queue
        self._name = name
        self._visibility = visibility_seconds
        self._held: set[str] = set()
        self._done: set[str] = set()
        self._returned: set[str] = set()
        self._settling: asyncio.Task[None] | None = None
        self._keeping = asyncio.create_task(self._keep_hidden())
        self._away = False
        self._pause = _PAUSES[0]

    async def receive(
        self, max_messages: int, wait_seconds: float, max_bytes: int | None = None
    ) -> list[Message]:
        """What is there, or nothing after ``wait_seconds``; through an outage, nothing after a growing pause."""
        try:
            messages = await self._queue.receive(
                self._name,
                max_messages=max_messages,
                wait_seconds=wait_seconds,
                visibility_seconds=self._visibility,
                max_bytes=max_bytes,
            )
        except Unavailable as error:
            if not self._away:
                self._away = True
                _log.warning("queue_away", queue=self._name, error=error.message)
            await self._wait()
            return []
        except Exception:
            # A message that can't even be read is given up by the queue itself, after some deliveries.
            _log.exception("queue_unreadable", queue=self._name)
            await self._wait()
            return []
        if self._away:
            self._away = False
            _log.info("queue_back", queue=self._name)
        self._pause = _PAUSES[0]
        self._held.update(message.receipt for message in messages)
        return messages

    def done(self, receipts: Iterable[str]) -> None:
        self._settle(self._done, receipts)

    def give_back(self, receipts: Iterable[str]) -> None:
        """Somebody else may have them at once."""
        self._settle(self._returned, receipts)

    async def close(self, seconds: float) -> None:
        """Give what is still held back, and settle what can be settled in that time."""
        self.give_back(tuple(self._held))
        self._keeping.cancel()
        tasks = [self._keeping, *([self._settling] if self._settling is not None else [])]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self) -> None:
        await asyncio.sleep(self._pause * random.uniform(0.5, 1.5))
        self._pause = min(_PAUSES[1], self._pause * 2)

    def _settle(self, group: set[str], receipts: Iterable[str]) -> None:
        for receipt in receipts:
            if receipt in self._held:
                self._held.discard(receipt)
                group.add(receipt)
        if group and (self._settling is None or self._settling.done()):
            self._settling = asyncio.create_task(self._settle_all())

    async def _settle_all(self) -> None:
        while self._done or self._returned:
            if not self._returned:
                await asyncio.sleep(_GATHER_SECONDS)
            done, self._done = sorted(self._done), set()
            returned, self._returned = sorted(self._returned), set()
            try:
                await self._queue.ack(done)
                await self._queue.release(returned)
            except TracelakeError as error:
                _log.warning("wake_ups_unsettled", count=len(done) + len(returned), error=error.message)

    async def _keep_hidden(self) -> None:
        while True:
            await asyncio.sleep(self._visibility / 4)
            if self._held:
                try:
                    await self._queue.extend(sorted(self._held), visibility_seconds=self._visibility)
                except TracelakeError as error:
                    _log.warning("wake_ups_not_extended", count=len(self._held), error=error.message)
