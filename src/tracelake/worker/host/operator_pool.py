"""Warm operator processes: one is ready before a task asks for it.

A process is fresh until its first attempt, and from then on belongs to that attempt's job: state that an operator
leaves in it meets no other job's tasks. It is used again only if it reported itself clean, has no child according
to the kernel, and hasn't served too many attempts. Each source of operators always has a fresh process; the
source that was asked for last has as many as tasks may run at once. Some processes that belong to a job are kept,
the most recently used ones. One that dies while it waits is replaced, after a delay that grows when that happens
repeatedly. A pool ends with its host.

``OperatorSupply`` provides processes for as long as the worker lives. When a host is killed, everything that
it started ends too: the attempts of that moment fail, and a new host is started for the next ones.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from tracelake.contracts.dispatcher_api import TaskPayload
from tracelake.contracts.operator_protocol import MAX_RUNS, SparkTarget
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.worker.host.client import HostedProgram, HostSpec, OperatorHost, OperatorProcess
from tracelake.worker.operator_session import AttemptProcess

_READY_SECONDS = 10.0
_KEPT = 4
"""Minimum number of processes that wait for another attempt of their job; twice the concurrency if that is more."""
_MAX_SOURCES = 8
_PROCESS_BACKOFF = Backoff(first=0.1, longest=10.0)
_HOST_BACKOFF = Backoff(first=0.2, longest=10.0)
_PATIENCE = 60.0
_ENDED = ("OperatorHostGone", "OperatorPoolClosed")

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessKey:
    """The attempts that may share a process: those of one job of one DAG, in its current definition, by one
    operator."""

    dag: str
    job: str
    operator: str
    definition: bytes


def process_key(task: TaskPayload) -> ProcessKey:
    """Equal for attempts that differ only in the ranges that they read and write of the same datasets."""
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
    return ProcessKey(task.job.dag_name, task.job.name, task.operator, hashlib.sha256(encoded).digest())


@dataclass(frozen=True, slots=True)
class _Waiting:
    use: ProcessKey | None
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
        """Number of processes that are ready."""
        return len(self._idle)

    async def take(self, use: ProcessKey | None = None) -> OperatorProcess:
        """A process for an attempt; None for a caller that only needs a process and runs no attempt.

        Raises when there will be none: the host is gone, or its processes can't be started.
        """
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
        """Return a process. One that isn't used again has ended when this returns, with everything that it left
        behind."""
        self._taken.remove(process)
        fresh = process.runs == 0
        if fresh:
            process.use = None
        if reusable and process.alive and self._closed is None and (fresh or self._may_run_again(process)):
            # `is False`: None means that the kernel doesn't say.
            if (fresh or process.ready) and process.children.any is False:
                self._add_idle(process)
                return
            tidying = asyncio.create_task(self._tidy(process))
            self._tidying.add(tidying)
            tidying.add_done_callback(self._tidying.discard)
            return
        self._gap.set()
        await process.kill()

    async def connect_to(self, spark: SparkTarget | None) -> None:
        """Make processes connect to this Spark as they start; those that wait are replaced."""
        self._host.spark = spark
        self._gap.set()
        await self._kill_idle()

    async def close(self) -> None:
        """End the waiting processes; those that were taken stay with their callers."""
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

    def _find(self, use: ProcessKey | None, source: str | None) -> OperatorProcess | None:
        """The job's most recently used process, or a fresh one."""
        own = [process for process in self._idle if process.use is not None and process.use == use]
        fresh = [process for process in self._idle if process.use is None and process.source == source]
        for process in (*reversed(own), *fresh):
            self._idle.remove(process)
            return process
        return None

    async def _next(self, use: ProcessKey | None, source: str | None) -> OperatorProcess:
        waiting = _Waiting(use, source, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._gap.set()
        try:
            return await waiting.process
        # The process may have come in the same moment, and must not be lost.
        except asyncio.CancelledError:
            process = waiting.process
            if process.done() and not process.cancelled() and process.exception() is None:
                self._add_idle(process.result())
            raise

    async def _tidy(self, process: OperatorProcess) -> None:
        """Keep a process for its job once it reports itself clean and the kernel confirms it."""
        try:
            async with asyncio.timeout(_READY_SECONDS):
                if not process.ready:
                    await process.receive()
        except (TracelakeError, TimeoutError):
            pass
        if process.ready and process.children.any is False and self._closed is None:
            self._add_idle(process)
            return
        self._gap.set()
        await process.kill()

    def _add_idle(self, process: OperatorProcess) -> None:
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
        """Whether to start another process with this source: first for callers that wait, then to have enough
        fresh ones."""
        if any(waiting.source == source and not waiting.process.done() for waiting in self._waiting):
            return True
        if source not in self._sources[:_MAX_SOURCES]:
            return False
        fresh = sum(1 for process in self._idle if process.use is None and process.source == source)
        return fresh < (self._size if source == self._last else 1)

    async def _keep_warm(self) -> None:
        """Keep each source warm in a task of its own: one that is slow or can't be loaded delays no other."""
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
        backoff = _PROCESS_BACKOFF.counter()
        while self._lacks(source):
            try:
                await self._add(source)
                backoff.succeeded()
            except Exception as error:
                if self._host.has_ended():
                    # The cause of an earlier death isn't what the present callers need to know.
                    return
                known = _as_known(error)
                delay = backoff.failed()
                _log.warning("operator_not_started", source=source, error=known.message, retry_in=delay)
                self._fail_waiters(known, source)
                await asyncio.sleep(delay)

    async def _add(self, source: str | None) -> None:
        process = await self._host.spawn(source)
        process.hosted.gone.add_done_callback(lambda _: self._forget(process))
        self._add_idle(process)

    def _fail_waiters(self, error: TracelakeError, source: str | None) -> None:
        """Pass an error to the callers that wait for this source; others may still get their process."""
        for waiting in [each for each in self._waiting if each.source == source]:
            self._waiting.remove(waiting)
            if not waiting.process.done():
                waiting.process.set_exception(error)

    def _end(self, why: Unavailable) -> None:
        self._closed = self._closed or why
        for source in {waiting.source for waiting in self._waiting}:
            self._fail_waiters(self._closed, source)


def _may_be_left_out(operator: str, failed: Mapping[str, str]) -> Unavailable:
    """A retryable error: another worker, or this one after its next start, may have the operator."""
    source, why = next(iter(failed.items()))
    return Unavailable(
        "OperatorsLeftOut",
        f"this worker has no operator {operator[:200]!r}, and {source} was left out: {why}",
    )


def _as_known(error: Exception) -> TracelakeError:
    """Any reason why a process can't start becomes an error for its callers; the pool itself goes on."""
    if isinstance(error, TracelakeError):
        return error
    return Unavailable("OperatorNotStarted", f"an operator process can't be started: {error or type(error)}")


class OperatorSupply:
    def __init__(self, spec: HostSpec, size: int) -> None:
        self._spec = spec
        self._size = size
        self._host: OperatorHost | None = None
        self._pool: OperatorPool | None = None
        self._spark: SparkTarget | None = None
        self._warm = asyncio.Event()
        self._taken: dict[int, tuple[OperatorPool, OperatorProcess]] = {}

    async def start(self) -> None:
        """Start the first host. Raises with reason and remedy when operators can't be run here."""
        self._host = await OperatorHost.start(self._spec)
        self._host.spark = self._spark

    def warm_up(self) -> None:
        """Begin to keep processes ready; after ``use_spark``, if there is a Spark to connect to."""
        if self._host is not None:
            self._pool = OperatorPool(self._host, self._size)
            self._warm.set()

    async def use_spark(self, target: SparkTarget | None) -> None:
        """Set the Spark that processes connect to as they start; those that wait are replaced."""
        self._spark = target
        if self._pool is not None:
            await self._pool.connect_to(target)
        elif self._host is not None:
            self._host.spark = target

    async def watch(self) -> None:
        """Start a new host whenever one has ended, until cancelled."""
        while True:
            if self._host is not None:
                await self._host.died()
                _log.error("operator_host_died")
                try:
                    await self._drop()
                except Exception as error:
                    _log.error("operator_host_not_tidied", exc_info=error)
            backoff = _HOST_BACKOFF.counter()
            while self._host is None:
                try:
                    await self.start()
                    self.warm_up()
                except Exception as error:
                    unexpected = None if isinstance(error, TracelakeError | OSError) else error
                    delay = backoff.failed()
                    _log.error(
                        "operator_host_not_started", error=str(error), retry_in=delay, exc_info=unexpected
                    )
                    await asyncio.sleep(delay)

    @property
    def available(self) -> bool:
        return self._warm.is_set()

    async def take(self, use: ProcessKey | None = None) -> AttemptProcess:
        """Wait a while for a new host when the old one has ended: that isn't the caller's fault."""
        try:
            async with asyncio.timeout(_PATIENCE):
                while True:
                    await self._warm.wait()
                    pool = self._pool
                    if pool is not None and (process := await self._of(pool, use)) is not None:
                        return process
        except TimeoutError:
            raise Unavailable("NoOperatorHost", "the operator host has ended and can't be started") from None

    async def warmed(self) -> None:
        """Wait until a process is ready; raises when none can be started."""
        await self.give_back(await self.take(), reusable=True)

    async def _of(self, pool: OperatorPool, use: ProcessKey | None) -> AttemptProcess | None:
        """A process of this pool; None when the pool has ended with its host."""
        try:
            process = await pool.take(use)
        except Unavailable as error:
            if error.reason not in _ENDED:
                raise
            # The end of an old pool says nothing about its successor.
            if pool is self._pool:
                self._warm.clear()
            return None
        # By id, which isn't used again for as long as the entry keeps the process.
        self._taken[id(process)] = (pool, process)
        return process

    async def give_back(self, process: AttemptProcess, *, reusable: bool) -> None:
        pool, taken = self._taken.pop(id(process))
        await pool.give_back(taken, reusable=reusable and pool is self._pool)

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
    ) -> HostedProgram:
        if self._host is None:
            raise Unavailable("NoOperatorHost", "the operator host has ended and is being started again")
        return await self._host.start_program(argv, env, log=log, folder=folder)

    async def close(self) -> None:
        await self._drop()

    async def _drop(self) -> None:
        # First, so that no caller finds a pool that is about to close.
        self._warm.clear()
        host, self._host = self._host, None
        pool, self._pool = self._pool, None
        if pool is not None:
            with suppress(TracelakeError):
                await pool.close()
        if host is not None:
            await host.stop()
