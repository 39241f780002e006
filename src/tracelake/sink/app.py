"""A sink process, put together: wake-ups in, one drain per sink task that it holds.

One process serves every buffered dataset. Starting waits for a Dispatcher and a queue that aren't there yet.
``stop`` lets what was received be written and hands the tasks back, so that another sink has them within
moments and not after a lease; ``hurry`` cuts that short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import structlog

from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.hot.buffers import BufferStore
from tracelake.objects.directory import DirectoryStore
from tracelake.queue.postgres import PostgresQueue
from tracelake.sink.settings import SinkSettings
from tracelake.sink.sink_task import SinkParts, SinkTask
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.heartbeats import Heartbeats
from tracelake.worker.held_task import HeldTask, Stop
from tracelake.worker.load import Load
from tracelake.worker.poll import Poller
from tracelake.worker.wake_ups import WakeUps

_NEVER = 2**31 - 1
"""The queue itself gives up nothing: a message that came often was taken by sinks that died, and may be well."""
_POOL_SIZE = 8
_CLAIMS_AT_ONCE = 100
_POLL_SECONDS = 1.0
_QUEUE_PAUSES = (0.1, 5.0)
_REPORT_SECONDS = 2.0
_LOOK_SECONDS = 0.05

_log = structlog.get_logger(__name__)


async def run_sink(
    settings: SinkSettings, stop: asyncio.Event, hurry: asyncio.Event, on_ready: Callable[[], None]
) -> None:
    async with AsyncExitStack() as parts:
        starting = asyncio.create_task(_start(settings, parts))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        sink = starting.result()
        _log.info("sink_ready", worker_id=settings.worker_id)
        on_ready()
        polling = asyncio.create_task(sink.poll(stop))
        await asyncio.wait([polling, stopped], return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(polling)
        await sink.drain(settings.drain_seconds, hurry)
    _log.info("sink_stopped", worker_id=settings.worker_id)


async def _start(settings: SinkSettings, parts: AsyncExitStack) -> Sink:
    client = DispatcherClient(settings.internal_url, settings.worker_token)
    parts.push_async_callback(client.close)
    queue = await _open_queue(settings)
    parts.push_async_callback(queue.close)
    await client.check()
    store = BufferStore(settings.data_dsn)
    parts.push_async_callback(store.close)
    sink = Sink(settings, client, queue, store)
    parts.push_async_callback(sink.close)
    return sink


async def _open_queue(settings: SinkSettings) -> PostgresQueue:
    pause, longest = _QUEUE_PAUSES
    said = False
    while True:
        try:
            return await PostgresQueue.open(
                settings.queue_dsn.reveal(), max_receives=_NEVER, pool_size=_POOL_SIZE
            )
        except Unavailable as error:
            if not said:
                said = True
                _log.warning("queue_away", queue=settings.queue, error=error.message)
        await asyncio.sleep(pause)
        pause = min(longest, pause * 2)


class Sink:
    """The tasks that a process holds, from their claim to the answer to their report."""

    def __init__(
        self, settings: SinkSettings, client: DispatcherClient, queue: PostgresQueue, store: BufferStore
    ) -> None:
        self._client = client
        self._load = Load(_CLAIMS_AT_ONCE)
        self._heartbeats = Heartbeats(lambda beat, timeout: client.heartbeat(beat, timeout=timeout))
        self._wake_ups = WakeUps(queue, settings.queue)
        self._running: set[asyncio.Task[None]] = set()
        self._poller = Poller(
            wake_ups=self._wake_ups,
            client=client,
            load=self._load,
            worker_id=settings.worker_id,
            accept=self._accept,
        )
        self._parts = SinkParts(
            client=client,
            queue=queue,
            store=store,
            objects=DirectoryStore(settings.object_root),
            on_progress=self._heartbeats.hurry,
        )

    async def poll(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._poller.poll(_CLAIMS_AT_ONCE, _POLL_SECONDS)

    async def drain(self, seconds: float, hurry: asyncio.Event) -> None:
        """Returns when all tasks were handed back, or couldn't be in time."""
        loop = asyncio.get_running_loop()
        for held in self._load.held:
            held.stop(Stop.RELEASED)
        deadline = loop.time() + seconds
        while self._load.running and not hurry.is_set() and loop.time() < deadline:
            await self._load.changed(_LOOK_SECONDS)
        for held in self._load.running:
            held.kill()
        if self._running:
            await asyncio.wait(tuple(self._running), timeout=_REPORT_SECONDS)
        if left := self._load.held:
            _log.warning("drained_unreported", tasks=[str(held.task_id) for held in left])

    async def close(self) -> None:
        for running in self._running:
            running.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._heartbeats.close()
        await self._wake_ups.close(_REPORT_SECONDS)

    def _accept(self, held: HeldTask) -> None:
        self._heartbeats.keep(held)
        self._load.add_beside(held)
        running = asyncio.create_task(self._run(held))
        self._running.add(running)
        running.add_done_callback(self._running.discard)

    async def _run(self, held: HeldTask) -> None:
        settled = False
        try:
            completion = await SinkTask(held, self._parts).run()
            self._load.ran(held, 0)
            if completion is not None:
                held.reported = True
                await self._client.complete(completion)
                held.log.info("attempt_reported", status=completion.status)
                settled = True
        except TracelakeError as refusal:
            held.log.warning("report_refused", reason=refusal.reason, error=refusal.message)
        finally:
            self._heartbeats.let_go(held)
            self._load.ran(held, 0)
            self._load.reported(held)
            (self._wake_ups.done if settled else self._wake_ups.give_back)(held.receipts)
            self._wake_ups.give_back(held.later_receipts)
