"""Starts, watches and ends a worker process: queue, Dispatcher, operators, and for some runtimes Spark or an
invoker.

Starting waits for a Dispatcher and a queue that aren't there yet; permanent errors are raised at once. ``stop``
begins the drain, ``stop_now`` skips the drain time.

Background tasks watch the host, Spark, pools and logs for as long as the worker runs. Each survives its own
errors and logs them. If one ends all the same, the worker ends with it and is restarted: without them it would
claim tasks that it can't run.

The work folder is locked by its worker and removed when the worker ends. A worker that was killed leaves its
folder, so each one that starts removes the unlocked folders beside its own; a folder that can't be removed stays,
and is logged. Only workers of one runtime share a parent folder, since an invoker keeps files for its successor.

The drain releases claimed tasks that haven't started at once. Running tasks may finish within the drain time;
then, or when ``stop_now`` is set, they are killed and released, so that another worker has them within moments and
not after a lease. A source never finishes by itself and is stopped right away.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import structlog

from tracelake import objects
from tracelake import queue as queues
from tracelake.contracts.dispatcher_api import WorkerRegistration
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.runtimes import ECS_SPARK, LAMBDA
from tracelake.hot.commit import HotStore
from tracelake.leases.claim import Load, reach_stack
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.leases.held_task import HeldTask, Stop
from tracelake.leases.presence import registered
from tracelake.serving.metrics_port import process_registry, serve_metrics
from tracelake.tokens.named_secrets import SecretProvider
from tracelake.trees import remove_if_possible
from tracelake.worker.attempt_log import sweep_logs
from tracelake.worker.calls import QueryClient
from tracelake.worker.data_commit import DataCommitter
from tracelake.worker.host.client import HostSpec
from tracelake.worker.host.operator_pool import OperatorSupply
from tracelake.worker.metrics import AttemptMetrics
from tracelake.worker.rpc_pools import RpcPools
from tracelake.worker.settings import WorkerSettings
from tracelake.worker.spark.engine import SparkEngine
from tracelake.worker.wrapper import Wrapper

OnReady = Callable[[], None]
_POLL_END_SECONDS = 5.0
_WAKE_UPS_SECONDS = 1.0
_SWEEP_SECONDS = 3600.0
_KILL_SECONDS = 5.0
_REPORT_SECONDS = 2.0
_LOOK_SECONDS = 0.05

_log = structlog.get_logger(__name__)


async def run_worker(
    settings: WorkerSettings, stop: asyncio.Event, stop_now: asyncio.Event, on_ready: OnReady
) -> None:
    """Run until stopped, idle for too long, or until a background task has ended."""
    registry = process_registry("worker")
    # First: a worker that waits for the rest of the stack is monitored as well.
    async with serve_metrics(settings.metrics, registry):
        metrics = AttemptMetrics(registry, settings.runtime, settings.concurrency)
        await _run(settings, stop, stop_now, on_ready, metrics)


async def _run(
    settings: WorkerSettings,
    stop: asyncio.Event,
    stop_now: asyncio.Event,
    on_ready: OnReady,
    metrics: AttemptMetrics,
) -> None:
    if settings.runtime == LAMBDA:
        from tracelake.worker.lambda_.app import run_invoker

        await run_invoker(settings, stop, on_ready, stop_now, metrics)
        return
    background = Background()
    async with AsyncExitStack() as parts:
        wrapper = await _or_stopped(stop, _start(settings, parts, background, metrics))
        if wrapper is None:
            return
        _log.info("worker_ready", runtime=settings.runtime, worker_id=settings.worker_id)
        on_ready()
        await _serve(wrapper, settings, stop, stop_now, background)
        background.check()
    _log.info("worker_stopped", worker_id=settings.worker_id)


async def _start(
    settings: WorkerSettings, parts: AsyncExitStack, background: Background, metrics: AttemptMetrics
) -> Wrapper:
    secrets = SecretProvider(os.environ, settings.secrets_file)
    rpc_pools = RpcPools(settings.rpc_pools, os.environ, required=settings.rpc_pools_required)
    parts.enter_context(own_work_folder(settings.work_folder))
    # Two calls: mkdir gives the mode to the last folder alone.
    settings.log_folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings.log_folder.mkdir(mode=0o700, exist_ok=True)
    client = DispatcherClient(settings.internal_url, settings.worker_token)
    parts.push_async_callback(client.close)
    object_root = _objects_folder(settings)
    supply = OperatorSupply(_host_spec(settings, object_root), settings.concurrency)
    parts.push_async_callback(supply.close)
    # Before Spark, which the host starts.
    await supply.start()
    engine = None
    if settings.runtime == ECS_SPARK:
        engine = await _start_spark(settings, supply, parts, background)
    supply.warm_up()
    await parts.enter_async_context(background.running("the watch over operators", supply.watch()))
    queue = await reach_stack(client, lambda: queues.open(settings.queue_dsn.reveal()), settings.queue)
    parts.push_async_callback(queue.close)
    registration = WorkerRegistration(settings.worker_id[:200], settings.runtime, settings.concurrency)
    await parts.enter_async_context(registered(client, registration))
    # Before the first claim: a worker whose processes can't start must not hold tasks.
    await supply.warmed()
    committer = None
    if settings.data_write_dsn is not None:
        committer = DataCommitter(HotStore(settings.data_write_dsn), settings.data_address)
        parts.push_async_callback(committer.close)
        await parts.enter_async_context(background.running("the renewal of logins", committer.keep_tickets()))
    queries = None
    if settings.query_url is not None:
        queries = QueryClient(settings.query_url)
        parts.push_async_callback(queries.close)
    wrapper = Wrapper(
        settings,
        object_root=object_root,
        client=client,
        queue=queue,
        operators=supply,
        secrets=secrets,
        committer=committer,
        engine=engine,
        rpc_pools=rpc_pools,
        queries=queries,
        metrics=metrics,
    )
    if engine is not None:
        watching = background.running("the watch over attempts on Spark", wrapper.watch_spark(engine))
        await parts.enter_async_context(watching)
    for what, work in (
        ("the watch over RPC pools", wrapper.watch_rpc_pools(rpc_pools)),
        ("the sweep of logs", _keep_logs_small(settings.log_folder)),
    ):
        await parts.enter_async_context(background.running(what, work))
    return wrapper


async def _keep_logs_small(folder: Path) -> None:
    while True:
        try:
            await asyncio.to_thread(sweep_logs, folder)
        except Exception as error:
            _log.error("logs_not_swept", exc_info=error)
        await asyncio.sleep(_SWEEP_SECONDS)


async def _serve(
    wrapper: Wrapper,
    settings: WorkerSettings,
    stop: asyncio.Event,
    stop_now: asyncio.Event,
    background: Background,
) -> None:
    polling = asyncio.create_task(wrapper.poll(stop))
    attempts = [asyncio.create_task(wrapper.run_attempts()) for _ in range(settings.concurrency)]
    stopped = asyncio.create_task(stop.wait())
    broken = asyncio.create_task(background.ended())
    try:
        await asyncio.wait([polling, stopped, broken, *attempts], return_when=asyncio.FIRST_COMPLETED)
        if broken.done():
            stop.set()
        # A claim that is under way is waited for: otherwise its tasks would be stuck until their leases expire.
        await asyncio.wait([polling], timeout=min(_POLL_END_SECONDS, settings.drain_seconds))
        if not polling.done():
            polling.cancel()
            await asyncio.wait([polling])
        await drain(wrapper, settings.drain_seconds, stop_now)
        # Raises what ended them: otherwise a broken worker would look like one that was stopped.
        for task in (polling, *attempts):
            if task.done() and not task.cancelled():
                task.result()
    finally:
        stopped.cancel()
        for task in (polling, broken, *attempts):
            task.cancel()
        await asyncio.gather(polling, stopped, broken, *attempts, return_exceptions=True)
        wrapper.heartbeats.close()
        await wrapper.wake_ups.close(_WAKE_UPS_SECONDS)


async def _start_spark(
    settings: WorkerSettings, supply: OperatorSupply, parts: AsyncExitStack, background: Background
) -> SparkEngine:
    # gRPC's own handling of forks restarts its threads in what was to become the operator host.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    from tracelake.worker.spark.server import spark_engine
    from tracelake.worker.spark.settings import SparkSettings

    # Not in the work folder: that is the operators', who could plant a link in the log's place.
    log = settings.log_folder.parent / f"spark-{settings.work_folder.name}.log"
    folder = settings.work_folder / "spark"
    engine = spark_engine(SparkSettings.from_environment(os.environ), supply, folder, log=log)
    parts.push_async_callback(engine.stop)
    await engine.start()
    await supply.use_spark(engine.target)
    await parts.enter_async_context(background.running("the watch over Spark", engine.watch()))
    return engine


def _objects_folder(settings: WorkerSettings) -> Path:
    store = objects.open(settings.objects)
    if store.local is None:
        raise Invalid(
            "ObjectsNotLocal",
            f"a worker stages files only in a local object store, not in {store.root.scheme}://",
        )
    return store.local.folder


def _host_spec(settings: WorkerSettings, object_root: Path) -> HostSpec:
    secret = (settings.secrets_file, settings.rpc_pools)
    hidden = (settings.log_folder, *(file for file in secret if file is not None))
    return HostSpec(
        home=settings.home,
        object_root=object_root,
        work_folder=settings.work_folder,
        operators=settings.operators,
        preload_spark=settings.runtime == ECS_SPARK,
        hidden=hidden,
    )


async def _or_stopped(stop: asyncio.Event, starting: Coroutine[Any, Any, Wrapper]) -> Wrapper | None:
    """Wait for the start; None when ``stop`` was set before."""
    start = asyncio.create_task(starting)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([start, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if start.done():
        return start.result()
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    return None


class Background:
    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str] = {}
        self._ended = asyncio.Event()

    @asynccontextmanager
    async def running(self, what: str, work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = what
        task.add_done_callback(self._note)
        try:
            yield
        finally:
            # It ends on purpose here, which is no reason to end the worker.
            task.remove_done_callback(self._note)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def ended(self) -> None:
        """Wait until one of them has ended."""
        await self._ended.wait()

    def check(self) -> None:
        """Raise the error of a background task that has ended."""
        for task, what in self._tasks.items():
            if task.done():
                error = None if task.cancelled() else task.exception()
                why = f": {type(error).__name__}: {error}" if error is not None else ""
                raise Unavailable("WorkerBroken", f"{what} has ended{why}; the worker must be restarted")

    def _note(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        _log.error("background_work_ended", what=self._tasks[task], exc_info=error)
        self._ended.set()


@contextmanager
def own_work_folder(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    lock = _lock(folder)
    try:
        for other in folder.parent.iterdir():
            # A link could lead the removal elsewhere.
            if other != folder and other.is_dir() and not other.is_symlink():
                _remove_if_left(other)
        yield
    finally:
        # Under the lock, or another worker that starts would remove the same folder meanwhile.
        remove_if_possible(folder)
        if lock is not None:
            os.close(lock)


def _remove_if_left(folder: Path) -> None:
    lock = _lock(folder)
    if lock is not None:
        remove_if_possible(folder)
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """The lock's descriptor; None when another process holds it, or the folder is gone or unreadable."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


async def drain(wrapper: Wrapper, seconds: float, stop_now: asyncio.Event) -> None:
    """Return when no task runs any more and every report that could be answered was."""
    loop = asyncio.get_running_loop()
    load = wrapper.load
    deadline = loop.time() + seconds
    waiting, running = load.take_waiting(), load.running
    _log.info("draining", running=len(running), released=len(waiting), seconds=seconds)
    for held in waiting:
        wrapper.report(held, held.completion("Released"))
    for held in running:
        if held.is_source:
            held.stop(Stop.RELEASED)
    await _until(load, lambda: not load.running or stop_now.is_set(), deadline)
    for held in load.running:
        _end(held)
    await _until(load, lambda: not load.running, loop.time() + _KILL_SECONDS)
    # Reports may take until the deadline, and a moment in any case, also after a second signal.
    least = loop.time() + _REPORT_SECONDS
    await _until(load, lambda: not load.held or stop_now.is_set(), max(least, deadline))
    await _until(load, lambda: not load.held, least)
    if left := load.held:
        _log.warning("drained_unreported", tasks=[str(held.task_id) for held in left])


async def _until(load: Load, condition: Callable[[], bool], deadline: float) -> None:
    loop = asyncio.get_running_loop()
    while not condition() and loop.time() < deadline:
        await load.changed(_LOOK_SECONDS)


def _end(held: HeldTask) -> None:
    held.stop(Stop.RELEASED)
    held.kill()
