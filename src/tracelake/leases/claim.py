"""Claims tasks: wake-ups in, leased tasks out, and no more of them than the holder can run.

``Poller`` turns wake-ups into claims. A wake-up is only a hint: one that names no task, or a task that is unknown,
done or leased to another worker, costs a line in the log; one for a task that this worker holds waits until that
attempt is over. A claim is repeated with the same key until it is answered, so a lost response gives the same
lease. The key is new with every start of a worker, so that no process takes over the lease of one that has died.

``WakeUps`` are messages that were received and not yet settled. They stay hidden from other workers while they are
held, by one call every few seconds for all; they are acknowledged and released in the background, in batches. When
the queue can't be reached they are abandoned: a duplicate wake-up is harmless, and a lost one is sent again from
the state database.

``Load`` counts the tasks in hand and decides how many more to claim. As many attempts run at once as there are
operators. Claims run ahead of them only while tasks take milliseconds, and then by no more than a tenth of a
second's work, since a claimed task is unavailable to other workers; one that waits too long is released. Sources
run for ever and mostly wait, so they run beside the others and take none of their places.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from uuid import UUID

import structlog

from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse
from tracelake.domain.backoff import Backoff, spread
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.held_task import HeldTask
from tracelake.queue.base import Message, Queue

VISIBILITY_SECONDS = 60.0
MAX_AHEAD = 64
_REFUSED_PAUSE = 1.0
_BACKOFF = Backoff(first=0.1, longest=5.0)
_GATHER_SECONDS = 0.02
"""Acknowledgements aren't urgent: those within this time share one call."""
_AHEAD_SECONDS = 0.1
_SHORT_SECONDS = 0.02
"""A task that takes longer gains nothing from being claimed early."""
_LONGEST_WAIT = 1.0
"""A claimed task that waits longer than this for an operator is released."""
_MAX_UNREPORTED = 1000
_WEIGHT = 0.2
"""Of the latest attempt in the moving average of how long attempts take."""

_log = structlog.get_logger(__name__)


def new_worker_id(runtime: str) -> str:
    """A different id for every start, so that no process takes over the lease of one that has ended."""
    return f"{runtime}:{socket.gethostname()[:100]}:{os.getpid()}-{secrets.token_hex(4)}"


async def reach_stack(
    client: DispatcherClient, open_queue: Callable[[], Awaitable[Queue]], name: str
) -> Queue:
    """Open the queue, however long it takes until the Dispatcher and the queue can be reached; the queue's absence
    is logged once. The Dispatcher comes first: it makes the login that the queue is opened with."""
    await client.check()
    backoff = _BACKOFF.counter()
    while True:
        try:
            return await open_queue()
        except Unavailable as error:
            if backoff.failures == 0:
                _log.warning("queue_away", queue=name, error=error.message)
        await asyncio.sleep(backoff.failed())


class Poller:
    """Receives wake-ups and claims their tasks; ``accept`` is called with each task that was claimed."""

    def __init__(
        self,
        *,
        wake_ups: WakeUps,
        client: DispatcherClient,
        load: Load,
        worker_id: str,
        accept: Callable[[HeldTask], None],
    ) -> None:
        self._wake_ups = wake_ups
        self._client = client
        self._load = load
        self._worker_id = worker_id
        self._accept = accept
        self._start = secrets.token_hex(4)

    async def poll(self, max_messages: int, wait_seconds: float) -> int:
        """Receive and claim once; the result is the number of wake-ups received."""
        messages = await self._wake_ups.receive(max_messages, wait_seconds)
        wanted = self._sort(messages)
        if wanted:
            await self._claim(wanted)
        return len(messages)

    def _sort(self, messages: Iterable[Message]) -> dict[UUID, list[Message]]:
        """The messages that need a claim, by task; the others are settled or kept with their held task."""
        wanted: dict[UUID, list[Message]] = {}
        for message in messages:
            task_id = _task_id(message)
            if task_id is None:
                _log.warning("wake_up_malformed", message_id=message.id)
                # Acknowledged: its next delivery would be as malformed.
                self._wake_ups.done([message.receipt])
                continue
            held = self._load.get(task_id)
            if held is not None:
                # It may be for the next attempt: a claim would be
                # refused now, and acknowledging it would lose it.
                held.later_receipts.append(message.receipt)
            else:
                wanted.setdefault(task_id, []).append(message)
        return wanted

    async def _claim(self, wanted: dict[UUID, list[Message]]) -> None:
        claims = [
            ClaimRequest(task_id, self._worker_id, f"{self._start}-{messages[0].id}")
            for task_id, messages in wanted.items()
        ]
        unsettled = {message.receipt for messages in wanted.values() for message in messages}
        try:
            for answer in await self._client.claim(claims):
                receipts = [message.receipt for message in wanted[answer.task_id]]
                self._take(answer, receipts)
                unsettled.difference_update(receipts)
        except TracelakeError as error:
            _log.error("claims_refused", reason=error.reason, error=error.message, claims=len(claims))
            # The released wake-ups come again at once: without a
            # pause the refused claims would go round in a tight loop.
            await asyncio.sleep(_REFUSED_PAUSE)
        finally:
            # Also when cancelled: other workers get them now instead of after the visibility timeout.
            self._wake_ups.give_back(unsettled)

    def _take(self, answer: ClaimResponse, receipts: list[str]) -> None:
        if answer.task is None or answer.lease_token is None:
            _log.debug("not_claimed", task_id=str(answer.task_id), reason=answer.reason)
            self._wake_ups.done(receipts)
            return
        self._accept(HeldTask(answer, answer.task, answer.lease_token, receipts))


def _task_id(message: Message) -> UUID | None:
    named = message.body.get("task_id") if isinstance(message.body, dict) else None
    try:
        return UUID(named) if isinstance(named, str) else None
    except ValueError:
        return None


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
        self._backoff = _BACKOFF.counter()

    async def receive(
        self, max_messages: int, wait_seconds: float, max_bytes: int | None = None
    ) -> list[Message]:
        """Messages, or none after ``wait_seconds``; during an outage none, after a growing delay."""
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
            # The queue itself gives up a message that can't be decoded, after some deliveries.
            _log.exception("queue_unreadable", queue=self._name)
            await self._wait()
            return []
        if self._away:
            self._away = False
            _log.info("queue_back", queue=self._name)
        self._backoff.succeeded()
        self._held.update(message.receipt for message in messages)
        return messages

    def done(self, receipts: Iterable[str]) -> None:
        self._settle(self._done, receipts)

    def give_back(self, receipts: Iterable[str]) -> None:
        """Make them visible to other workers at once."""
        self._settle(self._returned, receipts)

    async def close(self, seconds: float) -> None:
        """Release the messages still held, and settle as many as possible within ``seconds``."""
        # A copy: settling removes receipts from the set.
        self.give_back(tuple(self._held))
        self._keeping.cancel()
        tasks = [self._keeping, *([self._settling] if self._settling is not None else [])]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self) -> None:
        await asyncio.sleep(self._backoff.failed(jitter=spread()))

    def _settle(self, group: set[str], receipts: Iterable[str]) -> None:
        for receipt in receipts:
            # A receipt is settled once, by the first caller.
            if receipt in self._held:
                self._held.discard(receipt)
                group.add(receipt)
        # A task that isn't done looks at both sets again before it ends.
        if group and (self._settling is None or self._settling.done()):
            self._settling = asyncio.create_task(self._settle_all())

    async def _settle_all(self) -> None:
        while self._done or self._returned:
            # A released message is wanted by another worker now; acknowledgements can wait for company.
            if not self._returned:
                await asyncio.sleep(_GATHER_SECONDS)
            # Emptied before the calls: receipts that are settled meanwhile belong to the next round.
            done, self._done = sorted(self._done), set()
            returned, self._returned = sorted(self._returned), set()
            try:
                await self._queue.ack(done)
                await self._queue.release(returned)
            except TracelakeError as error:
                # Not repeated: they become visible again by themselves, and a duplicate wake-up is harmless.
                _log.warning("wake_ups_unsettled", count=len(done) + len(returned), error=error.message)

    async def _keep_hidden(self) -> None:
        while True:
            # A quarter: a few extensions may fail before a message becomes visible to others.
            await asyncio.sleep(self._visibility / 4)
            if self._held:
                try:
                    await self._queue.extend(sorted(self._held), visibility_seconds=self._visibility)
                except TracelakeError as error:
                    _log.warning("wake_ups_not_extended", count=len(self._held), error=error.message)


class Load:
    def __init__(self, concurrency: int, now: Callable[[], float] | None = None) -> None:
        self._concurrency = concurrency
        self._held: dict[UUID, HeldTask] = {}
        self._waiting: deque[tuple[float, HeldTask]] = deque()
        self._free: deque[asyncio.Future[HeldTask]] = deque()
        self._running: set[HeldTask] = set()
        self._beside: set[HeldTask] = set()
        self._mean: float | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._now = now or self._loop.time

    def get(self, task_id: UUID) -> HeldTask | None:
        return self._held.get(task_id)

    @property
    def held(self) -> list[HeldTask]:
        return list(self._held.values())

    @property
    def running(self) -> list[HeldTask]:
        return [*self._running, *self._beside]

    @property
    def room(self) -> int:
        """Number of tasks that may be claimed now."""
        # While the Dispatcher is away, ended attempts stay held
        # until they are reported; the places don't bound them.
        if len(self._held) >= _MAX_UNREPORTED:
            return 0
        return max(0, self._concurrency + self._ahead - len(self._waiting) - len(self._running))

    @property
    def least_room(self) -> int:
        """Room at which the next claim is worth a call: claims ahead are renewed when half of them are used up."""
        return max(1, self._ahead // 2)

    @property
    def _ahead(self) -> int:
        if self._mean is None or self._mean > _SHORT_SECONDS:
            return 0
        # A mean of zero must not divide.
        return min(MAX_AHEAD, int(_AHEAD_SECONDS / max(self._mean, 1e-4)))

    async def changed(self, seconds: float) -> None:
        """Wait until an attempt ends or is reported, at most ``seconds``."""
        # The caller has just looked: only changes from here on are worth waking up for.
        self._changed.clear()
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def add(self, held: HeldTask) -> None:
        self._held[held.task_id] = held
        while self._free:
            runner = self._free.popleft()
            # One that was cancelled while it waited runs nothing.
            if not runner.done():
                self._running.add(held)
                runner.set_result(held)
                return
        self._waiting.append((self._now(), held))

    def add_beside(self, held: HeldTask) -> None:
        """Add a task that already runs and takes no operator's place; ``ran`` must follow."""
        self._held[held.task_id] = held
        self._beside.add(held)

    async def next(self) -> HeldTask:
        """Wait for the next attempt to run; ``ran`` must follow."""
        if self._waiting:
            _, held = self._waiting.popleft()
            self._running.add(held)
            return held
        turn: asyncio.Future[HeldTask] = self._loop.create_future()
        self._free.append(turn)
        return await turn

    def ran(self, held: HeldTask, seconds: float) -> None:
        if held in self._beside:
            # Left out of the mean: sources run for ever, and claims run ahead by how short attempts are.
            self._beside.discard(held)
            self._changed.set()
            return
        self._running.discard(held)
        self._mean = seconds if self._mean is None else self._mean + _WEIGHT * (seconds - self._mean)
        self._changed.set()

    def reported(self, held: HeldTask) -> None:
        self._held.pop(held.task_id, None)
        self._changed.set()

    def take_overdue(self) -> list[HeldTask]:
        """Remove and return the tasks that have waited too long, and stop claiming ahead for now."""
        if not self._waiting or self._now() - self._waiting[0][0] < _LONGEST_WAIT:
            return []
        # Unknown until the next attempt has ended, so that nothing is claimed ahead.
        self._mean = None
        return self.take_waiting()

    def take_waiting(self) -> list[HeldTask]:
        taken = [held for _, held in self._waiting]
        self._waiting.clear()
        return taken
