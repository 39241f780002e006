"""The invoker: takes attempts that were leased for it, runs each one's function once, and reports its end.

An attempt is taken or refused at once. A taken attempt is in the journal, and from then on it always gets an end:
by the function itself, by the completion shim, or by a successor that finds it in the journal. The same attempt
is never started twice. Its time counts from the moment it was taken, because its lease does.

``run_function`` runs one function once: it takes or starts an environment, gives it the event, and keeps it if it
is still usable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from tracelake.contracts.bundles import NOOP_FUNCTION, Invocation, function_of
from tracelake.domain import errors
from tracelake.domain.errors import TracelakeError
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.sandbox.layout import MIB
from tracelake.worker.attempt_log import AttemptLog
from tracelake.worker.lambda_.completion_shim import FunctionEnding, ending_of, failed, released
from tracelake.worker.lambda_.environment import Environment, EnvironmentPool
from tracelake.worker.lambda_.function_program import FunctionIdentity
from tracelake.worker.lambda_.journal import AttemptFence, Journal, JournaledReports
from tracelake.worker.lambda_.runtime_api import AttemptToken, Broken, Result, RuntimeCall
from tracelake.worker.metrics import AttemptMetrics

LOOK_SECONDS = 5.0
"""Interval of asking whether a running task has been canceled: functions needn't send heartbeats."""
_LAST_WORDS_SECONDS = 2.0
MEMORY_BYTES = 256 * MIB
NOOP_ENTRYPOINT = f"{NOOP_FUNCTION}.handler"
_FRESH_TRIES = 2

_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Attempt:
    task: Invocation
    event: bytes
    fence: AttemptFence
    deadline: float
    interrupted: asyncio.Future[FunctionEnding | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def interrupt(self, ending: FunctionEnding | None) -> None:
        if not self.interrupted.done():
            self.interrupted.set_result(ending)


class Invoker:
    def __init__(
        self,
        dispatcher: DispatcherClient,
        pool: EnvironmentPool,
        journal: Journal,
        *,
        log_folder: Path,
        concurrency: int,
        look_seconds: float = LOOK_SECONDS,
        metrics: AttemptMetrics | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._reports = JournaledReports(dispatcher, journal)
        self._pool = pool
        self._journal = journal
        self._log_folder = log_folder
        self._concurrency = concurrency
        self._look_seconds = look_seconds
        self._running: dict[tuple[object, int], _Attempt] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._metrics = metrics
        if metrics is not None:
            metrics.watch(lambda: len(self._running), lambda: len(self._work))
        self.idle_since = time.monotonic()

    @property
    def running(self) -> int:
        return len(self._running)

    def take(self, task: Invocation, event: bytes) -> None:
        """Take an attempt. ``OverQuota`` (no free slot) and ``Unavailable`` mean that it wasn't taken."""
        fence = AttemptFence(task.task_id, task.attempt, task.lease_token)
        # Delivered before: it runs, or it has run.
        if fence.key in self._journal:
            return
        if self._stopping:
            raise errors.Unavailable("Stopping", "this invoker is stopping")
        if len(self._running) >= self._concurrency:
            raise errors.OverQuota("NoSlot", f"all {self._concurrency} slots are taken")
        try:
            self._journal.begin(fence)
        except OSError as error:
            raise errors.Unavailable("JournalUnusable", f"the journal can't be written: {error}") from None
        deadline = asyncio.get_running_loop().time() + task.timeout_seconds
        attempt = self._running[fence.key] = _Attempt(task, event, fence, deadline)
        self._start(self._see_to(attempt))

    def report_unfinished(self) -> None:
        """Report attempts that a predecessor left unfinished: their functions died with it."""
        for fence in self._journal.unfinished:
            self._start(self._reports.report_dead(fence))

    async def stop(self, drain_seconds: float, stop_now: asyncio.Event | None = None) -> None:
        """Take nothing more; attempts that aren't done in time, or when ``stop_now`` is set, are released. A
        successor reports the ends that couldn't be reported."""
        self._stopping = True
        await self._drain(drain_seconds, stop_now or asyncio.Event())
        for attempt in self._running.values():
            attempt.interrupt(
                FunctionEnding(released(attempt.task), "the worker is stopping; the task was released")
            )
        if self._work:
            await asyncio.wait(self._work, timeout=_LAST_WORDS_SECONDS)
        late = [*self._work]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _drain(self, seconds: float, stop_now: asyncio.Event) -> None:
        done = asyncio.create_task(self._until_done())
        hurried = asyncio.create_task(stop_now.wait())
        either: set[asyncio.Task[Any]] = {done, hurried}
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in either:
            task.cancel()
        await asyncio.gather(*either, return_exceptions=True)

    async def _until_done(self) -> None:
        while self._work:
            await asyncio.wait(self._work)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def _see_to(self, attempt: _Attempt) -> None:
        job = attempt.task.job
        bound = {
            "task_id": str(attempt.task.task_id),
            "attempt": attempt.task.attempt,
            "job": f"{job.dag_name}/{job.name}",
        }
        started = time.monotonic()
        try:
            ending = await self._run(attempt)
        except Exception as error:
            _log.exception("invocation_failed", **bound)
            ending = FunctionEnding(
                failed(attempt.task, f"the invoker failed: {error or type(error).__name__}")
            )
        finally:
            del self._running[attempt.fence.key]
            self.idle_since = time.monotonic()
        status = "Canceled" if ending is None else ending.completion.status
        seconds = round(time.monotonic() - started, 4)
        if self._metrics is not None:
            self._metrics.ended(None if ending is None else status, seconds)
        await self._reports.report(attempt.fence, attempt.task, None if ending is None else ending.completion)
        _log.info("function_ended", status=status, seconds=seconds, **bound)

    async def _run(self, attempt: _Attempt) -> FunctionEnding | None:
        """Run an attempt; None when no report is expected, since the task was canceled or belongs to another
        attempt."""
        task = attempt.task
        secrets = (task.capability_token, str(task.lease_token))
        log = AttemptLog.open(self._log_folder, str(task.task_id), task.attempt, secrets)
        watch = asyncio.create_task(self._watch(attempt))
        try:
            ending = await self._race(attempt, log)
            for note in _notes(ending):
                log.note(note)
            return ending
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await log.close()

    async def _race(self, attempt: _Attempt, log: AttemptLog) -> FunctionEnding | None:
        run = FunctionRun(attempt.task, attempt.event, attempt.deadline, log.write_fd)
        function = asyncio.create_task(run_function(self._pool, run))
        try:
            left = attempt.deadline - asyncio.get_running_loop().time()
            either: set[asyncio.Future[Any]] = {function, attempt.interrupted}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            # First: a result counts also when the interruption came in the same moment.
            if function.done():
                return ending_of(attempt.task, function.result(), emitted=run.emitted)
        finally:
            # Nothing of the function is left after this.
            function.cancel()
            await asyncio.gather(function, return_exceptions=True)
        if attempt.interrupted.done():
            return attempt.interrupted.result()
        late = Broken(f"timed out after {attempt.task.timeout_seconds} s")
        return ending_of(attempt.task, late, emitted=False)

    async def _watch(self, attempt: _Attempt) -> None:
        """Interrupt the attempt when its task has been canceled or belongs to another attempt."""
        while True:
            await asyncio.sleep(self._look_seconds)
            try:
                found = await self._dispatcher.fetch(attempt.task.task_id, until=attempt.deadline)
            except errors.TracelakeError as error:
                _log.warning("task_not_found", task_id=str(attempt.task.task_id), error=error.message)
                # Without an answer nothing is known, and the function goes on.
                continue
            if found.status == "Canceled" or found.attempt != attempt.task.attempt:
                attempt.interrupt(None)
                return


def _notes(ending: FunctionEnding | None) -> list[str]:
    if ending is None:
        return ["stopped: the task was canceled, or another attempt has begun"]
    return [note for note in (ending.note, ending.completion.error_message) if note is not None]


@dataclass(slots=True)
class FunctionRun:
    """``log_fd`` receives the function's output; ``emitted`` is known when the run is over."""

    task: Invocation
    event: bytes = field(repr=False)
    deadline: float
    log_fd: int
    emitted: bool = False


def identity_of(task: Invocation) -> FunctionIdentity:
    function = function_of(task)
    return FunctionIdentity(
        bundle=function,
        entrypoint=NOOP_ENTRYPOINT if function == NOOP_FUNCTION else str(task.udf["entrypoint"]),
        dag=task.job.dag_name,
        job=task.job.name,
        timeout_seconds=task.timeout_seconds,
        memory_bytes=MEMORY_BYTES,
    )


async def run_function(pool: EnvironmentPool, run: FunctionRun) -> Result:
    """Run the function and return its result. When cancelled, it leaves nothing running."""
    function = identity_of(run.task)
    result: Result = Broken("the function was never started")
    for _ in range(_FRESH_TRIES):
        try:
            environment = await pool.take(function, run.log_fd)
        except TracelakeError as error:
            return Broken(error.message, retryable=error.status >= 500)
        except OSError as error:
            return Broken(f"the function's environment can't be made: {error}")
        result = await _invoke(pool, environment, run)
        # Only an event that never reached a function may be given to another environment.
        if not (isinstance(result, Broken) and not result.started and environment.was_warm):
            break
    return result


async def _invoke(pool: EnvironmentPool, environment: Environment, run: FunctionRun) -> Result:
    left = run.deadline - asyncio.get_running_loop().time()
    call = RuntimeCall(
        run.event,
        deadline_ms=int((time.time() + left) * 1000),
        arn=environment.function.arn,
        trace_id=f"Root={run.task.task_id};Attempt={run.task.attempt}",
        token=AttemptToken(run.task.capability_token, run.task.task_id, run.task.attempt),
    )
    kept = False
    try:
        result = await environment.invoke(call)
        run.emitted = "events" in environment.called
        await environment.output.detach()
        kept = environment.usable
        return result
    finally:
        if kept:
            pool.give_back(environment)
        else:
            await environment.close()
