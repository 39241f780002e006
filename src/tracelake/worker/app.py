"""A worker process, put together: queue, Dispatcher, operators, and for some runtimes a Spark or an invoker.

Starting waits for a Dispatcher and a queue that aren't there yet, and refuses with a reason what waiting can't
cure. ``stop`` begins the drain, ``hurry`` cuts it short.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import structlog

from tracelake.domain.errors import Unavailable
from tracelake.hot.commit import HotStore
from tracelake.queue.postgres import PostgresQueue
from tracelake.worker.background import Background
from tracelake.worker.data_commit import DataCommitter
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.drain import drain
from tracelake.worker.host.client import HostSpec
from tracelake.worker.host.operator_supply import OperatorSupply
from tracelake.worker.logs.log_sweep import sweep_logs
from tracelake.worker.query_client import QueryClient
from tracelake.worker.rpc_pools import RpcPools
from tracelake.worker.secret_provider import SecretProvider
from tracelake.worker.settings import LAMBDA, SPARK, WorkerSettings
from tracelake.worker.spark.engine import SparkEngine
from tracelake.worker.work_folder import own_work_folder
from tracelake.worker.wrapper import Wrapper

Ready = Callable[[], None]

_QUEUE_PAUSES = (0.1, 5.0)
_POLL_END_SECONDS = 5.0
_WAKE_UPS_SECONDS = 1.0
_SWEEP_SECONDS = 3600.0

_log = structlog.get_logger(__name__)


async def run_worker(
    settings: WorkerSettings, stop: asyncio.Event, hurry: asyncio.Event, on_ready: Ready
) -> None:
    """Until it is stopped, idle for too long, or something that has to go on beside its tasks has ended."""
    if settings.runtime == LAMBDA:
        from tracelake.worker.lambda_.app import run_invoker

        await run_invoker(settings, stop, on_ready, hurry)
        return
    background = Background()
    async with AsyncExitStack() as parts:
        wrapper = await _or_stopped(stop, _start(settings, parts, background))
        if wrapper is None:
            return
        _log.info("worker_ready", runtime=settings.runtime, worker_id=settings.worker_id)
        on_ready()
        await _serve(wrapper, settings, stop, hurry, background)
        background.check()
    _log.info("worker_stopped", worker_id=settings.worker_id)


async def _start(settings: WorkerSettings, parts: AsyncExitStack, background: Background) -> Wrapper:
    secrets = SecretProvider(os.environ, settings.secrets_file)
    rpc_pools = RpcPools(settings.rpc_pools, os.environ, required=settings.rpc_pools_required)
    parts.enter_context(own_work_folder(settings.work_folder))
    settings.log_folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings.log_folder.mkdir(mode=0o700, exist_ok=True)
    client = DispatcherClient(settings.internal_url, settings.worker_token)
    parts.push_async_callback(client.close)
    supply = OperatorSupply(_host_spec(settings), settings.concurrency)
    parts.push_async_callback(supply.close)
    await supply.start()
    engine = None
    if settings.runtime == SPARK:
        engine = await _start_spark(settings, supply, parts, background)
    supply.warm_up()
    await parts.enter_async_context(background.running("the watch over operators", supply.watch()))
    queue = await _open_queue(settings)
    parts.push_async_callback(queue.close)
    await client.check()
    await supply.warmed()
    committer = None
    if settings.data_dsn is not None:
        committer = DataCommitter(HotStore(settings.data_dsn), settings.data_address)
        parts.push_async_callback(committer.close)
        await parts.enter_async_context(background.running("the renewal of logins", committer.keep_tickets()))
    queries = None
    if settings.query_url is not None:
        queries = QueryClient(settings.query_url)
        parts.push_async_callback(queries.close)
    wrapper = Wrapper(
        settings,
        client=client,
        queue=queue,
        operators=supply,
        secrets=secrets,
        committer=committer,
        engine=engine,
        rpc_pools=rpc_pools,
        queries=queries,
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
    hurry: asyncio.Event,
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
        # A claim that is under way is better taken than left to its lease.
        await asyncio.wait([polling], timeout=min(_POLL_END_SECONDS, settings.drain_seconds))
        if not polling.done():
            polling.cancel()
            await asyncio.wait([polling])
        await drain(wrapper, settings.drain_seconds, hurry)
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


def _host_spec(settings: WorkerSettings) -> HostSpec:
    secret = (settings.secrets_file, settings.rpc_pools)
    hidden = (settings.log_folder, *(file for file in secret if file is not None))
    return HostSpec(
        home=settings.home,
        object_root=settings.object_root,
        work_folder=settings.work_folder,
        operators=settings.operators,
        preload_spark=settings.runtime == SPARK,
        hidden=hidden,
    )


async def _open_queue(settings: WorkerSettings) -> PostgresQueue:
    pause, longest = _QUEUE_PAUSES
    said = False
    while True:
        try:
            return await PostgresQueue.open(settings.queue_dsn.reveal())
        except Unavailable as error:
            if not said:
                said = True
                _log.warning("queue_away", queue=settings.queue, error=error.message)
        await asyncio.sleep(pause)
        pause = min(longest, pause * 2)


async def _or_stopped(stop: asyncio.Event, starting: Coroutine[Any, Any, Wrapper]) -> Wrapper | None:
    """None when it was told to stop before it had started."""
    start = asyncio.create_task(starting)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([start, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if start.done():
        return start.result()
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    return None
