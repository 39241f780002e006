"""The invoker: takes attempts that were leased for it, runs each one's function once, and sees to its end.

An attempt is taken or refused at once: taken means that it is in the journal, and from there on it always gets an
end, by the function itself, by the completion shim, or by a successor that finds it in the journal. The same
attempt is never started twice. Time counts from the moment it was taken, whatever it is spent on, because the
lease does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from tracelake.contracts.bundles import Invocation
from tracelake.domain import errors
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.lambda_.completion_shim import Ending, ending_of, failed, released
from tracelake.worker.lambda_.environment_pool import EnvironmentPool
from tracelake.worker.lambda_.journal import Fence, Journal
from tracelake.worker.lambda_.reports import Reports
from tracelake.worker.lambda_.run_function import FunctionRun, run_function
from tracelake.worker.lambda_.runtime_api import Broken
from tracelake.worker.logs.attempt_log import AttemptLog

LOOK_SECONDS = 5.0
"""How often somebody asks whether a running task has been canceled: functions needn't heartbeat."""
_LAST_WORDS_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class NoSlot(errors.TracelakeError):
    """All slots are taken; the caller may ask somebody else, or again."""

    status = 429


@dataclass(slots=True)
class _Attempt:
    task: Invocation
    event: bytes
    fence: Fence
    deadline: float
    interrupted: asyncio.Future[Ending | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def interrupt(self, ending: Ending | None) -> None:
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
    ) -> None:
        self._dispatcher = dispatcher
        self._reports = Reports(dispatcher, journal)
        self._pool = pool
        self._journal = journal
        self._log_folder = log_folder
        self._concurrency = concurrency
        self._look_seconds = look_seconds
        self._running: dict[tuple[object, int], _Attempt] = {}
        self._work: set[asyncio.Task[None]] = set()
        self._stopping = False
        self.idle_since = time.monotonic()

    @property
    def running(self) -> int:
        return len(self._running)

    def take(self, task: Invocation, event: bytes) -> None:
        """Returns when the attempt is ours. ``NoSlot`` and ``Unavailable`` mean that it isn't."""
        fence = Fence(task.task_id, task.attempt, task.lease_token)
        if fence.key in self._journal:
            return
        if self._stopping:
            raise errors.Unavailable("Stopping", "this invoker is stopping")
        if len(self._running) >= self._concurrency:
            raise NoSlot("NoSlot", f"all {self._concurrency} slots are taken")
        try:
            self._journal.begin(fence)
        except OSError as error:
            raise errors.Unavailable("JournalUnusable", f"the journal can't be written: {error}") from None
        deadline = asyncio.get_running_loop().time() + task.timeout_seconds
        attempt = self._running[fence.key] = _Attempt(task, event, fence, deadline)
        self._start(self._see_to(attempt))

    def report_unfinished(self) -> None:
        """What a predecessor left behind: its functions died with it."""
        for fence in self._journal.unfinished:
            self._start(self._reports.tell_dead(fence))

    async def stop(self, drain_seconds: float, hurry: asyncio.Event | None = None) -> None:
        """Take nothing more; what isn't done in time, or when ``hurry`` is set, is handed back. What can't be told
        is for the successor."""
        self._stopping = True
        await self._drain(drain_seconds, hurry or asyncio.Event())
        for attempt in self._running.values():
            attempt.interrupt(Ending(released(attempt.task), "the worker is stopping; handed back"))
        if self._work:
            await asyncio.wait(self._work, timeout=_LAST_WORDS_SECONDS)
        late = [*self._work]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _drain(self, seconds: float, hurry: asyncio.Event) -> None:
        done = asyncio.create_task(self._until_done())
        hurried = asyncio.create_task(hurry.wait())
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
            ending = Ending(failed(attempt.task, f"the invoker failed: {error or type(error).__name__}"))
        finally:
            del self._running[attempt.fence.key]
            self.idle_since = time.monotonic()
        status = "Canceled" if ending is None else ending.completion.status
        seconds = round(time.monotonic() - started, 4)
        await self._reports.tell(attempt.fence, attempt.task, None if ending is None else ending.completion)
        _log.info("function_ended", status=status, seconds=seconds, **bound)

    async def _run(self, attempt: _Attempt) -> Ending | None:
        """None when there is nobody to tell: the task was canceled, or taken over."""
        task = attempt.task
        secrets = (task.capability_token, str(task.lease_token))
        log = AttemptLog.open(self._log_folder, str(task.task_id), task.attempt, secrets)
        watch = asyncio.create_task(self._watch(attempt))
        try:
            ending = await self._race(attempt, log)
            for said in _notes(ending):
                log.note(said)
            return ending
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            await log.close()

    async def _race(self, attempt: _Attempt, log: AttemptLog) -> Ending | None:
        run = FunctionRun(attempt.task, attempt.event, attempt.deadline, log.write_fd)
        function = asyncio.create_task(run_function(self._pool, run))
        try:
            left = attempt.deadline - asyncio.get_running_loop().time()
            either: set[asyncio.Future[Any]] = {function, attempt.interrupted}
            await asyncio.wait(either, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if function.done():
                return ending_of(attempt.task, function.result(), emitted=run.emitted)
        finally:
            # Once this has ended, nothing of the function is left.
            function.cancel()
            await asyncio.gather(function, return_exceptions=True)
        if attempt.interrupted.done():
            return attempt.interrupted.result()
        late = Broken(f"timed out after {attempt.task.timeout_seconds} s")
        return ending_of(attempt.task, late, emitted=False)

    async def _watch(self, attempt: _Attempt) -> None:
        """Ends the attempt when its task has been canceled or is somebody else's by now."""
        while True:
            await asyncio.sleep(self._look_seconds)
            try:
                found = await self._dispatcher.fetch(attempt.task.task_id, until=attempt.deadline)
            except errors.TracelakeError as error:
                _log.warning("task_not_found", task_id=str(attempt.task.task_id), error=error.message)
                continue
            if found.status == "Canceled" or found.attempt != attempt.task.attempt:
                attempt.interrupt(None)
                return


def _notes(ending: Ending | None) -> list[str]:
    if ending is None:
        return ["stopped: the task was canceled, or another attempt has begun"]
    return [said for said in (ending.note, ending.completion.error_message) if said is not None]
