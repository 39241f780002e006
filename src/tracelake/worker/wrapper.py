"""The wrapper: polls, claims, runs, heartbeats and reports, and holds every credential while operators hold none.

Reports go out in the background, so that the next attempt starts while the last one is being committed. Until its
report is answered a task is kept alive by heartbeats like one that runs. A report that is refused because the
attempt has been superseded is dropped; one whose outputs are refused becomes a failure that says why.
"""

from __future__ import annotations

import asyncio
from functools import partial

import structlog

from tracelake.contracts.dispatcher_api import MAX_BATCH, CompleteRequest, CompleteResponse
from tracelake.domain.errors import Conflict, NotFound, TracelakeError, Unavailable
from tracelake.queue.base import Queue
from tracelake.worker.attempt import AttemptRunner, Operators
from tracelake.worker.calls import Committer
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.heartbeats import Heartbeats
from tracelake.worker.held_task import HeldTask, Stop
from tracelake.worker.load import Load
from tracelake.worker.poll import Poller
from tracelake.worker.query_client import QueryClient
from tracelake.worker.rpc_pools import RpcPools
from tracelake.worker.secret_provider import SecretProvider
from tracelake.worker.settings import WorkerSettings
from tracelake.worker.spark.engine import SparkEngine
from tracelake.worker.wake_ups import WakeUps

_WAIT_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class Wrapper:
    def __init__(
        self,
        settings: WorkerSettings,
        *,
        client: DispatcherClient,
        queue: Queue,
        operators: Operators,
        secrets: SecretProvider,
        committer: Committer | None = None,
        engine: SparkEngine | None = None,
        rpc_pools: RpcPools | None = None,
        queries: QueryClient | None = None,
    ) -> None:
        self._settings = settings
        self._client = client
        self._engine = engine
        self._operators = operators
        self._loop = asyncio.get_running_loop()
        self._worked_at = self._loop.time()
        self._idle_timeout = settings.idle_timeout
        self._reporting: set[asyncio.Task[None]] = set()
        self._sources: set[asyncio.Task[None]] = set()
        self.load = Load(settings.concurrency)
        self.heartbeats = Heartbeats(lambda beat, timeout: client.heartbeat(beat, timeout=timeout))
        self.wake_ups = WakeUps(queue, settings.queue)
        self._poller = Poller(
            wake_ups=self.wake_ups,
            client=client,
            load=self.load,
            worker_id=settings.worker_id,
            accept=self._accept,
        )
        self._runner = AttemptRunner(
            settings=settings,
            operators=operators,
            client=client,
            secrets=secrets,
            committer=committer,
            engine=engine,
            on_progress=self.heartbeats.hurry,
            rpc_pools=rpc_pools or RpcPools(),
            queries=queries,
        )

    async def poll(self, stop: asyncio.Event) -> None:
        """Take work until told to stop, or until there was none for too long."""
        while not stop.is_set():
            for held in self.load.take_overdue():
                self.report(held, held.completion("Released"))
            room = self.load.room
            if room < self.load.least_room or not self._operators.available:
                await self.load.changed(_WAIT_SECONDS)
            elif self._engine is not None and not await self._spark_serves(self._engine):
                continue
            elif await self._poller.poll(min(room, MAX_BATCH), _WAIT_SECONDS):
                self._worked_at = self._loop.time()
            elif self._is_idle():
                _log.info("idle_timeout", seconds=self._idle_timeout)
                return

    async def run_attempts(self) -> None:
        """One operator's worth of work, for ever; as many of these run as the worker has operators."""
        while True:
            await self._run(await self.load.next())

    async def _run(self, held: HeldTask) -> None:
        began = self._loop.time()
        try:
            completion = await self._runner.run(held)
        finally:
            seconds = self._loop.time() - began
            self.load.ran(held, seconds)
        self._worked_at = self._loop.time()
        _tell(held, completion, seconds)
        self.report(held, completion)

    async def watch_spark(self, engine: SparkEngine) -> None:
        """What runs on a Spark that has died has failed, whether its operator noticed or not."""
        known = engine.generation
        while True:
            target = await engine.ready()
            generation = engine.generation
            if generation != known:
                await self._operators.use_spark(target)
                known = generation
            await engine.lost(generation)
            for held in self.load.running:
                if held.generation == generation:
                    held.stop(Stop.ENGINE_LOST)

    async def watch_rpc_pools(self, pools: RpcPools) -> None:
        """A source runs for ever: endpoints that are changed reach it by its beginning again."""
        while True:
            await asyncio.sleep(_WAIT_SECONDS)
            for held in self.load.running:
                if held.is_source and pools.has_changed(held.payload.config, held.rpc_pool):
                    held.log.info("rpc_pool_changed")
                    held.stop(Stop.POOL_CHANGED)

    def report(self, held: HeldTask, completion: CompleteRequest | None) -> None:
        if completion is None:
            self._let_go(held, settled=False)
        elif self.heartbeats.has_unsaid(held):
            reporting = asyncio.create_task(self._report_with_progress(held, completion))
            self._reporting.add(reporting)
            reporting.add_done_callback(self._reporting.discard)
        else:
            self._submit(held, completion)

    async def _report_with_progress(self, held: HeldTask, completion: CompleteRequest) -> None:
        await self.heartbeats.flush(held)
        self._submit(held, completion)

    def _submit(self, held: HeldTask, completion: CompleteRequest) -> None:
        held.reported = True
        answer = self._client.complete(completion)
        answer.add_done_callback(partial(self._answered, held, completion))

    def _answered(
        self, held: HeldTask, completion: CompleteRequest, answer: asyncio.Future[CompleteResponse]
    ) -> None:
        refusal = None if answer.cancelled() else answer.exception()
        match refusal:
            case None:
                held.log.info("attempt_reported", status=completion.status)
                self._let_go(held, settled=True)
            case Conflict() | NotFound():
                held.log.warning("report_refused", status=completion.status, reason=refusal.reason)
                self._let_go(held, settled=False)
            case TracelakeError() if completion.status == "Completed" and not isinstance(
                refusal, Unavailable
            ):
                held.log.warning("outputs_refused", reason=refusal.reason, error=refusal.message)
                said = f"what it produced was refused ({refusal.reason}): {refusal.message}"
                self._submit(held, held.completion("Failed", said))
            case _:
                held.log.error("report_lost", status=completion.status, error=str(refusal))
                self._let_go(held, settled=False)

    def _let_go(self, held: HeldTask, *, settled: bool) -> None:
        """A wake-up that came while the task was held may be for its next attempt: whoever claims finds out."""
        self.heartbeats.let_go(held)
        self.load.reported(held)
        if settled:
            self.wake_ups.done(held.receipts)
        else:
            self.wake_ups.give_back(held.receipts)
        self.wake_ups.give_back(held.later_receipts)

    def _accept(self, held: HeldTask) -> None:
        self.heartbeats.keep(held)
        payload = held.payload
        if self._settings.idle_timeout is not None:
            self._idle_timeout = max(self._settings.idle_timeout, payload.idle_timeout_seconds or 0)
        if payload.runtime != self._settings.runtime:
            held.log.warning("wrong_runtime", runtime=payload.runtime, serves=self._settings.runtime)
            self.report(held, held.completion("Released"))
            return
        if held.is_source:
            self.load.add_beside(held)
            running = asyncio.create_task(self._run(held))
            self._sources.add(running)
            running.add_done_callback(self._sources.discard)
        else:
            self.load.add(held)

    def _is_idle(self) -> bool:
        if self._idle_timeout is None or self.load.held:
            return False
        return self._loop.time() - self._worked_at >= self._idle_timeout

    async def _spark_serves(self, engine: SparkEngine) -> bool:
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await engine.ready()
        except TimeoutError:
            return False
        return True


def _tell(held: HeldTask, completion: CompleteRequest | None, seconds: float) -> None:
    if completion is None:
        held.log.warning("attempt_dropped", why=str(held.stopped), seconds=round(seconds, 3))
        return
    more = {"error": completion.error_message[:500]} if completion.error_message else {}
    held.log.info("attempt_ended", status=completion.status, seconds=round(seconds, 3), **more)
