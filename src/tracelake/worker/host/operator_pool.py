"""Warm operator processes: one is ready before a task asks for it.

A process is fresh until its first attempt, and from then on belongs to the job of that attempt: what an operator
has changed in it meets no other job's tasks. One that comes back is used again only if it said that it is as it was
before, has no child as far as the kernel knows, and hasn't served too many attempts.

There is always a fresh process for each source of operators; of the source that was asked for last there are as
many as tasks may run at once. Of those that belong to a job some are kept; who was used longest ago goes first. One
that dies while it waits is replaced, after a pause that grows when they die again and again. With its host the pool
is at an end.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from tracelake.contracts.dispatcher_api import TaskPayload
from tracelake.contracts.operator_protocol import MAX_RUNS, SparkTarget
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.worker.host.client import OperatorHost, OperatorProcess

_PAUSE, _LONGEST_PAUSE = 0.1, 10.0
_READY_SECONDS = 10.0
_KEPT = 4
"""Processes that wait for another attempt of their job, at least: twice as many as run at once, if that is more."""
_MAX_SOURCES = 8

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Use:
    """Whose attempts one process may run: those of one job of one DAG, as it is defined now, by one operator."""

    dag: str
    job: str
    operator: str
    definition: bytes


def use_of(task: TaskPayload) -> Use:
    """The same for attempts that differ in what they read and write of the same datasets, and in nothing else."""
    places = [
        sorted((str(each.dataset_uuid), str(each.dataset_version)) for each in side)
        for side in (task.inputs, task.outputs)
    ]
    defined = [
        task.config,
        task.udf,
        task.secrets,
        task.runtime,
        task.update_strategy,
        task.unique_key,
        places,
    ]
    encoded = msgspec.json.encode(defined, order="deterministic")
    return Use(task.job.dag_name, task.job.name, task.operator, hashlib.sha256(encoded).digest())


@dataclass(frozen=True, slots=True)
class _Waiting:
    use: Use | None
    source: str | None
    process: asyncio.Future[OperatorProcess]

    def takes(self, process: OperatorProcess) -> bool:
        if self.process.done():
            return False
        return process.source == self.source if process.use is None else process.use == self.use


class OperatorPool:
    def __init__(self, host: OperatorHost, size: int) -> None:
        self._host = host
        self._size = size
        self._kept = max(_KEPT, 2 * size)
        self._sources = [None, *sorted({each for each in host.operators.values() if each is not None})]
        self._last: str | None = None
        self._idle: deque[OperatorProcess] = deque()
        self._taken: set[OperatorProcess] = set()
        self._waiting: deque[_Waiting] = deque()
        self._tidying: set[asyncio.Task[None]] = set()
        self._adding: dict[str | None, asyncio.Task[None]] = {}
        self._gap = asyncio.Event()
        self._gap.set()
        self._closed: Unavailable | None = None
        self._keeper = asyncio.create_task(self._keep_warm())

    @property
    def warm(self) -> int:
        """How many are ready at once."""
        return len(self._idle)

    async def take(self, use: Use | None = None) -> OperatorProcess:
        """Raises when there will be none: the host is gone, or its processes can't be started. None is for whoever
        only wants to see one, and gives it no attempt."""
        if use is not None and self._host.failed and use.operator not in self._host.operators:
            raise _may_be_left_out(use.operator, self._host.failed)
        source = None if use is None else self._host.operators.get(use.operator)
        while True:
            if self._closed is not None:
                raise self._closed
            process = self._find(use, source) or await self._next(use, source)
            # It may have died since it was found ready.
            if process.alive:
                process.use, self._last = use, source
                self._taken.add(process)
                self._gap.set()
                return process

    async def give_back(self, process: OperatorProcess, *, reusable: bool) -> None:
        """One that isn't used again is gone when this returns, with everything that it left behind."""
        self._taken.remove(process)
        fresh = process.runs == 0
        if fresh:
            process.use = None
        if reusable and process.alive and self._closed is None and (fresh or self._may_run_again(process)):
            if (fresh or process.ready) and process.children.any is False:
                self._welcome(process)
                return
            tidying = asyncio.create_task(self._tidy(process))
            self._tidying.add(tidying)
            tidying.add_done_callback(self._tidying.discard)
            return
        self._gap.set()
        await process.kill()

    async def connect_to(self, spark: SparkTarget | None) -> None:
        """From now on processes connect to this Spark as they start; those that wait do it anew."""
        self._host.spark = spark
        self._gap.set()
        await self._kill_idle()

    async def close(self) -> None:
        """What was taken stays its taker's."""
        self._end(Unavailable("OperatorPoolClosed", "the worker is stopping"))
        self._keeper.cancel()
        await asyncio.gather(self._keeper, *self._tidying, return_exceptions=True)
        await self._kill_idle()

    async def _kill_idle(self) -> None:
        idle = list(self._idle)
        self._idle.clear()
        await asyncio.gather(*(process.kill() for process in idle))

    def _may_run_again(self, process: OperatorProcess) -> bool:
        return process.use is not None and process.runs < MAX_RUNS and self._host.sealed

    def _find(self, use: Use | None, source: str | None) -> OperatorProcess | None:
        """The job's own, the last one that was used; or a fresh one."""
        own = [process for process in self._idle if process.use is not None and process.use == use]
        fresh = [process for process in self._idle if process.use is None and process.source == source]
        for process in (*reversed(own), *fresh):
            self._idle.remove(process)
            return process
        return None

    async def _next(self, use: Use | None, source: str | None) -> OperatorProcess:
        waiting = _Waiting(use, source, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._gap.set()
        try:
            return await waiting.process
        except asyncio.CancelledError:
            process = waiting.process
            if process.done() and not process.cancelled() and process.exception() is None:
                self._welcome(process.result())
            raise

    async def _tidy(self, process: OperatorProcess) -> None:
        """It may be used again once it says so, and if that is true."""
        try:
            async with asyncio.timeout(_READY_SECONDS):
                if not process.ready:
                    await process.receive()
        except (TracelakeError, TimeoutError):
            pass
        if process.ready and process.children.any is False and self._closed is None:
            self._welcome(process)
            return
        self._gap.set()
        await process.kill()

    def _welcome(self, process: OperatorProcess) -> None:
        for waiting in self._waiting:
            if waiting.takes(process):
                self._waiting.remove(waiting)
                waiting.process.set_result(process)
                return
        self._idle.append(process)
        kept = [each for each in self._idle if each.use is not None]
        if len(kept) > self._kept:
            self._idle.remove(kept[0])
            self._end_one(kept[0])

    def _end_one(self, process: OperatorProcess) -> None:
        ending = asyncio.create_task(process.kill())
        self._tidying.add(ending)
        ending.add_done_callback(self._tidying.discard)

    def _forget(self, process: OperatorProcess) -> None:
        with suppress(ValueError):
            self._idle.remove(process)
            _log.warning("idle_operator_died", pid=process.pid)
            self._gap.set()

    def _lacks(self, source: str | None) -> bool:
        """Whether another process with this source is to be started: for whoever waits, then so that there are
        enough fresh ones."""
        if any(waiting.source == source and not waiting.process.done() for waiting in self._waiting):
            return True
        if source not in self._sources[:_MAX_SOURCES]:
            return False
        fresh = sum(1 for process in self._idle if process.use is None and process.source == source)
        return fresh < (self._size if source == self._last else 1)

    async def _keep_warm(self) -> None:
        """The sources are kept warm beside each other: one that can't be loaded, or takes its time, is in no other
        one's way."""
        died = asyncio.create_task(self._host.died())
        died.add_done_callback(lambda _: self._gap.set())
        try:
            while not (died.done() or self._host.has_ended()):
                await self._gap.wait()
                self._gap.clear()
                for source in {*self._sources, *(waiting.source for waiting in self._waiting)}:
                    if source not in self._adding and self._lacks(source):
                        self._begin_to_add(source)
            self._end(Unavailable("OperatorHostGone", "the operator host has ended"))
        finally:
            adding = list(self._adding.values())
            for task in (died, *adding):
                task.cancel()
            await asyncio.gather(*adding, return_exceptions=True)

    def _begin_to_add(self, source: str | None) -> None:
        def done(_: object) -> None:
            del self._adding[source]
            self._gap.set()

        self._adding[source] = adding = asyncio.create_task(self._add_enough(source))
        adding.add_done_callback(done)

    async def _add_enough(self, source: str | None) -> None:
        pause = _PAUSE
        while self._lacks(source):
            try:
                await self._add(source)
                pause = _PAUSE
            except Exception as error:
                if self._host.has_ended():
                    # What the process died of then isn't what those who wait need to hear.
                    return
                known = _as_known(error)
                _log.warning("operator_not_started", source=source, error=known.message, retry_in=pause)
                self._disappoint(known, source)
                await asyncio.sleep(pause)
                pause = min(_LONGEST_PAUSE, pause * 2)

    async def _add(self, source: str | None) -> None:
        process = await self._host.spawn(source)
        process.hosted.gone.add_done_callback(lambda _: self._forget(process))
        self._welcome(process)

    def _disappoint(self, error: TracelakeError, source: str | None) -> None:
        """Those who wait for this source: others may still get what they wait for."""
        for waiting in [each for each in self._waiting if each.source == source]:
            self._waiting.remove(waiting)
            if not waiting.process.done():
                waiting.process.set_exception(error)

    def _end(self, why: Unavailable) -> None:
        self._closed = self._closed or why
        for source in {waiting.source for waiting in self._waiting}:
            self._disappoint(self._closed, source)


def _may_be_left_out(operator: str, failed: Mapping[str, str]) -> Unavailable:
    """Tried again: another worker, or the same one after its next start, may have it."""
    source, why = next(iter(failed.items()))
    return Unavailable(
        "OperatorsLeftOut",
        f"this worker has no operator {operator[:200]!r}, and {source} was left out: {why}",
    )


def _as_known(error: Exception) -> TracelakeError:
    """Whatever kept a process from starting keeps the pool from nothing else."""
    if isinstance(error, TracelakeError):
        return error
    return Unavailable("OperatorNotStarted", f"an operator process can't be started: {error or type(error)}")
