"""Platform tasks: what the sink and the delivery process have in common.

``PlatformHolder`` is a process that claims tasks of one queue and runs one coroutine for each that it holds, for as
long as it holds it. ``PlatformTask`` is that coroutine with its control: the heartbeat's answers reach it, and its
end becomes a report. Such a task never completes; it ends when it is stopped, superseded or fails.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import structlog

from tracelake.contracts.dispatcher_api import CompleteRequest
from tracelake.domain.errors import Conflict, NotFound, TracelakeError
from tracelake.leases.claim import Load, Poller, WakeUps
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.held_task import Heartbeats, HeldTask, Stop
from tracelake.leases.report import HeldTaskReporter, conclude
from tracelake.queue.base import Queue
from tracelake.settings import Secret

CLAIMS_AT_ONCE = 100
_POLL_SECONDS = 1.0
_REPORT_SECONDS = 2.0
_LOOK_SECONDS = 0.05

_log = structlog.get_logger(__name__)


class PlatformTask(ABC):
    """``name`` is the part's word in logs."""

    name: str

    def __init__(self, held: HeldTask) -> None:
        self.held = held
        self._working: asyncio.Task[None] | None = None

    @abstractmethod
    async def work(self) -> None:
        """Runs until it is asked to finish, or is cancelled."""

    @abstractmethod
    def finish(self) -> bool:
        """Asked to end in order; False when the work hasn't come far enough to do so."""

    @abstractmethod
    def hold(self, paused: bool) -> None:
        """Do nothing new while paused."""

    async def run(self) -> CompleteRequest | None:
        """The completion to report, or None when no report is expected."""
        held = self.held
        gone = "it ended by itself"
        if held.stopped is None:
            self._working = asyncio.create_task(self.work())
            held.controlled_by(self)
            try:
                await asyncio.wait([self._working])
            finally:
                self._working.cancel()
                await asyncio.gather(self._working, return_exceptions=True)
                held.controlled_by(None)
            gone = self._why()
        return conclude(held, None, gone)

    def _why(self) -> str:
        assert self._working is not None
        error = None if self._working.cancelled() else self._working.exception()
        match error:
            case None:
                return "it ended by itself"
            case Conflict() | NotFound():
                stop = Stop.CANCELED if error.reason == "Canceled" else Stop.SUPERSEDED
                self.held.log.warning(f"{self.name}_superseded", reason=error.reason)
                # For `conclude`: a superseded attempt sends no report.
                self.held.stop(stop)
                return error.message
            case TracelakeError():
                self.held.log.error(f"{self.name}_failed", reason=error.reason, error=error.message)
                return f"{error.reason}: {error.message}"
            case _:
                self.held.log.error(f"{self.name}_internal_error", exc_info=error)
                return f"{type(error).__name__} in the {self.name}: {error}"

    def stop(self, why: Stop) -> None:
        # After a release, what was begun may still be ended; after any other stop the lease is gone.
        if why not in (Stop.RELEASED, Stop.OUTDATED) or not self.finish():
            self.kill()

    def kill(self) -> None:
        if self._working is not None:
            self._working.cancel()

    def pause(self, paused: bool) -> None:
        self.held.log.info(f"{self.name}_paused" if paused else f"{self.name}_resumed")
        self.hold(paused)

    def renew(self, token: Secret) -> None:
        # A platform task makes no calls with its capability token.
        del token


class PlatformHolder:
    """The tasks that a process holds, from their claim until their completion was reported."""

    def __init__(
        self,
        *,
        client: DispatcherClient,
        queue: Queue,
        queue_name: str,
        worker_id: str,
        make: Callable[[HeldTask], PlatformTask],
    ) -> None:
        self._make = make
        self._load = Load(CLAIMS_AT_ONCE)
        self._heartbeats = Heartbeats(lambda beat, timeout: client.heartbeat(beat, timeout=timeout))
        self._wake_ups = WakeUps(queue, queue_name)
        self._reporter = HeldTaskReporter(client, self._load, self._heartbeats, self._wake_ups)
        self._running: set[asyncio.Task[None]] = set()
        self._poller = Poller(
            wake_ups=self._wake_ups,
            client=client,
            load=self._load,
            worker_id=worker_id,
            accept=self._accept,
        )

    @property
    def running(self) -> int:
        """Number of tasks that run."""
        return len(self._load.running)

    def progressed(self, held: HeldTask) -> None:
        self._heartbeats.send_soon(held)

    async def serve(self, stop: asyncio.Event, stop_now: asyncio.Event, drain_seconds: float) -> None:
        """Until ``stop``; then the tasks are released, so that another process claims them within moments."""
        stopped = asyncio.create_task(stop.wait())
        polling = asyncio.create_task(self._poll(stop))
        await asyncio.wait([polling, stopped], return_when=asyncio.FIRST_COMPLETED)
        # Not cancelled: a claim under way may bring leases, which have to be released.
        await asyncio.gather(polling)
        stopped.cancel()
        await self._drain(drain_seconds, stop_now)

    async def _poll(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._poller.poll(CLAIMS_AT_ONCE, _POLL_SECONDS)

    async def _drain(self, seconds: float, stop_now: asyncio.Event) -> None:
        """Returns when all tasks were released, or their time is over."""
        loop = asyncio.get_running_loop()
        for held in self._load.held:
            held.stop(Stop.RELEASED)
        deadline = loop.time() + seconds
        while self._load.running and not stop_now.is_set() and loop.time() < deadline:
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
        completion = None
        try:
            completion = await self._make(held).run()
        finally:
            # The time doesn't count: a task that runs beside others is in no mean.
            self._load.ran(held, 0)
            if completion is None:
                # Superseded or cancelled: the wake-up is released, and the next claim finds out.
                self._reporter.let_go(held)
        if completion is not None:
            await self._reporter.report(held, completion)


async def run_holder(
    start: Callable[[AsyncExitStack], Awaitable[PlatformHolder]],
    stop: asyncio.Event,
    stop_now: asyncio.Event,
    *,
    on_ready: Callable[[], None],
    drain_seconds: float,
) -> None:
    """A process from its start to its end. ``start`` puts what has to be closed into the stack."""
    async with AsyncExitStack() as parts:
        # Starting waits for services without a limit, so a stop must be able to end it.
        starting = asyncio.ensure_future(start(parts))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        holder = starting.result()
        on_ready()
        await holder.serve(stop, stop_now, drain_seconds)
