"""The wrapper: polls, claims, runs, heartbeats and reports; it holds every credential, and operators hold none.

Reports are sent in the background, so that the next attempt starts while the last one is being committed. Until its
report is answered a task is kept alive by heartbeats like one that runs (``leases.report``).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from tracelake.contracts.dispatcher_api import MAX_BATCH, CompleteRequest
from tracelake.leases.claim import Load, Poller, WakeUps
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.held_task import Heartbeats, HeldTask, Stop
from tracelake.leases.report import HeldTaskReporter
from tracelake.queue.base import Queue
from tracelake.tokens.named_secrets import SecretProvider
from tracelake.worker.attempt import AttemptRunner, Operators
from tracelake.worker.calls import Committer, QueryClient
from tracelake.worker.metrics import AttemptMetrics
from tracelake.worker.rpc_pools import RpcPools
from tracelake.worker.settings import WorkerSettings
from tracelake.worker.spark.engine import SparkEngine

_WAIT_SECONDS = 1.0

_log = structlog.get_logger(__name__)


class Wrapper:
    def __init__(
        self,
        settings: WorkerSettings,
        *,
        object_root: Path,
        client: DispatcherClient,
        queue: Queue,
        operators: Operators,
        secrets: SecretProvider,
        committer: Committer | None = None,
        engine: SparkEngine | None = None,
        rpc_pools: RpcPools | None = None,
        queries: QueryClient | None = None,
        metrics: AttemptMetrics | None = None,
    ) -> None:
        self._settings = settings
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
        self._metrics = metrics
        if metrics is not None:
            metrics.watch(lambda: len(self.load.running), lambda: len(self.load.held))
            if engine is not None:
                metrics.watch_spark(lambda: engine.generation)
        self._reporter = HeldTaskReporter(client, self.load, self.heartbeats, self.wake_ups)
        self._poller = Poller(
            wake_ups=self.wake_ups,
            client=client,
            load=self.load,
            worker_id=settings.worker_id,
            accept=self._accept,
        )
        self._runner = AttemptRunner(
            settings=settings,
            object_root=object_root,
            operators=operators,
            client=client,
            secrets=secrets,
            committer=committer,
            engine=engine,
            on_progress=self.heartbeats.send_soon,
            rpc_pools=rpc_pools or RpcPools(),
            queries=queries,
        )

    async def poll(self, stop: asyncio.Event) -> None:
        """Claim work until ``stop`` is set, or until the idle timeout has passed without any."""
        while not stop.is_set():
            for held in self.load.take_overdue():
                self.report(held, held.completion("Released"))
            room = self.load.room
            if room < self.load.least_room or not self._operators.available:
                await self.load.changed(_WAIT_SECONDS)
            # Tasks that couldn't run here are left to other workers.
            elif self._engine is not None and not await self._spark_serves(self._engine):
                continue
            elif await self._poller.poll(min(room, MAX_BATCH), _WAIT_SECONDS):
                self._worked_at = self._loop.time()
            elif self._is_idle():
                _log.info("idle_timeout", seconds=self._idle_timeout)
                return

    async def run_attempts(self) -> None:
        """Run one attempt after the other, for ever; the worker runs one such loop per operator."""
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
        _log_end(held, completion, seconds)
        if self._metrics is not None:
            self._metrics.ended(None if completion is None else completion.status, seconds)
        self.report(held, completion)

    async def watch_spark(self, engine: SparkEngine) -> None:
        """Stop the attempts that run on a Spark server that has died: their operators may not notice."""
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
        """Restart sources whose RPC pool has changed: they run for ever, with the endpoints they started with."""
        while True:
            await asyncio.sleep(_WAIT_SECONDS)
            for held in self.load.running:
                if held.is_source and pools.has_changed(held.payload.config, held.rpc_pool):
                    held.log.info("rpc_pool_changed")
                    held.stop(Stop.POOL_CHANGED)

    def report(self, held: HeldTask, completion: CompleteRequest | None) -> None:
        if completion is None:
            self._reporter.let_go(held)
        # Heartbeats end with the report, and progress that wasn't sent would be lost.
        elif self.heartbeats.has_unsent(held):
            reporting = asyncio.create_task(self._report_with_progress(held, completion))
            self._reporting.add(reporting)
            reporting.add_done_callback(self._reporting.discard)
        else:
            self._reporter.report(held, completion)

    async def _report_with_progress(self, held: HeldTask, completion: CompleteRequest) -> None:
        await self.heartbeats.flush(held)
        self._reporter.report(held, completion)

    def _accept(self, held: HeldTask) -> None:
        # From the claim on: a task that waits for an operator has a lease too.
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
            # asyncio itself keeps only weak references to tasks.
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


def _log_end(held: HeldTask, completion: CompleteRequest | None, seconds: float) -> None:
    if completion is None:
        held.log.warning("attempt_dropped", why=str(held.stopped), seconds=round(seconds, 3))
        return
    more = {"error": completion.error_message[:500]} if completion.error_message else {}
    held.log.info("attempt_ended", status=completion.status, seconds=round(seconds, 3), **more)
