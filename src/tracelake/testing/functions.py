"""Functions for tests: bundles from source text, events that the Dispatcher would send, and an invoker that runs
them in real sandboxes while a list takes the Dispatcher's place."""

from __future__ import annotations

import asyncio
import hashlib
import io
import stat
import zipfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec

from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import CompleteRequest, CompleteResponse, FetchResponse
from tracelake.domain.errors import NotFound, TracelakeError
from tracelake.secret import Secret
from tracelake.testing.worker_tasks import payload
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.lambda_.bundle_cache import BundleCache
from tracelake.worker.lambda_.environment_pool import EnvironmentPool
from tracelake.worker.lambda_.function_layer import build_layer
from tracelake.worker.lambda_.invoker import Invoker
from tracelake.worker.lambda_.journal import Journal
from tracelake.worker.lambda_.start_environment import EnvironmentStarter
from tracelake.worker.sandbox import Sandbox

PATIENCE = 180.0
NOWHERE = "http://127.0.0.1:9"


def zip_of(files: Mapping[str, str | bytes]) -> bytes:
    """``bootstrap`` is executable; everything else is a plain file."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            entry.external_attr = (0o100755 if name == "bootstrap" else 0o100644) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return packed.getvalue()


def link_in_zip(name: str, target: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        entry = zipfile.ZipInfo(name)
        entry.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(entry, target)
    return packed.getvalue()


def python_bundle(source: str) -> bytes:
    """Its entrypoint is ``main.handler``."""
    return zip_of({"main.py": source})


def sha256_of(bundle: bytes) -> str:
    return hashlib.sha256(bundle).hexdigest()


def invocation(bundle: bytes | None, entrypoint: str = "main.handler", **changes: Any) -> Invocation:
    """Without a bundle, a no-op."""
    udf = {"bundle": f"sha256:{sha256_of(bundle)}", "entrypoint": entrypoint} if bundle is not None else None
    given = {
        "runtime": "lambda",
        "operator": "udf" if udf else "noop",
        "udf": udf,
        "timeout_seconds": 30,
        **changes,
    }
    expires = datetime.now(UTC) + timedelta(seconds=90)
    return Invocation.of(payload(**given), uuid4(), expires, "capability-of-the-attempt")


class RecordedDispatcher(DispatcherClient):
    """Takes every completion and remembers it, unless ``refuse`` has something to say about the task."""

    def __init__(self) -> None:
        super().__init__(NOWHERE, Secret("w" * 40))
        self.told: dict[UUID, list[CompleteRequest]] = {}
        self.refuse: dict[UUID, TracelakeError] = {}
        self.fetched: dict[UUID, FetchResponse] = {}
        self._changed = asyncio.Condition()

    def complete(self, completion: CompleteRequest) -> asyncio.Future[CompleteResponse]:
        return asyncio.ensure_future(self._complete(completion))

    async def _complete(self, completion: CompleteRequest) -> CompleteResponse:
        async with self._changed:
            self.told.setdefault(completion.task_id, []).append(completion)
            self._changed.notify_all()
        if completion.task_id in self.refuse:
            raise self.refuse.pop(completion.task_id)
        return CompleteResponse(completion.task_id, completion.status, completion.attempt)

    async def fetch(self, task_id: UUID, *, until: float | None = None) -> FetchResponse:
        if task_id not in self.fetched:
            raise NotFound("UnknownTask", f"there is no task {task_id}")
        return self.fetched[task_id]

    async def end_of(self, task_id: UUID, number: int = 1) -> CompleteRequest:
        """What was told about a task, the n-th time."""
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: len(self.told.get(task_id, ())) >= number)
        return self.told[task_id][number - 1]


class TestInvoker:
    """An invoker with everything real but the Dispatcher."""

    __test__ = False

    def __init__(self, invoker: Invoker, dispatcher: RecordedDispatcher, logs: Path) -> None:
        self.invoker = invoker
        self.dispatcher = dispatcher
        self.bundles: dict[str, bytes] = {}
        self._logs = logs

    def take(self, task: Invocation) -> None:
        self.invoker.take(task, msgspec.json.encode(task))

    async def run(self, bundle: bytes | None, entrypoint: str = "main.handler", **changes: Any) -> Ran:
        task = invocation(bundle, entrypoint, **changes)
        if bundle is not None:
            self.bundles[sha256_of(bundle)] = bundle
        self.take(task)
        return Ran(task, await self.dispatcher.end_of(task.task_id), self.log_of(task))

    def log_of(self, task: Invocation) -> str:
        path = self._logs / str(task.task_id) / f"{task.attempt}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


class Ran(msgspec.Struct, frozen=True):
    task: Invocation
    completion: CompleteRequest
    log: str

    @property
    def status(self) -> str:
        return self.completion.status

    @property
    def error(self) -> str:
        return self.completion.error_message or ""


@asynccontextmanager
async def open_test_invoker(
    folder: Path,
    *,
    concurrency: int = 2,
    idle_seconds: float = 60.0,
    internal_url: str = NOWHERE,
    **more: Any,
) -> AsyncIterator[TestInvoker]:
    sandbox = await Sandbox.open()
    dispatcher = RecordedDispatcher()
    bundles: dict[str, bytes] = {}

    async def fetch(sha256: str) -> AsyncIterator[bytes]:
        if sha256 not in bundles:
            raise NotFound("UnknownBundle", f"there is no bundle sha256:{sha256}")
        yield bundles[sha256]

    build_layer(folder / "layer")
    starter = EnvironmentStarter(
        sandbox,
        BundleCache(folder / "bundles", fetch),
        layer=folder / "layer",
        folder=folder / "environments",
        internal_url=internal_url,
    )
    pool = EnvironmentPool(starter.start, starter.still_good, max_idle=concurrency, idle_seconds=idle_seconds)
    journal = Journal(folder / "journal")
    invoker = Invoker(dispatcher, pool, journal, log_folder=folder / "logs", concurrency=concurrency, **more)
    tested = TestInvoker(invoker, dispatcher, folder / "logs")
    tested.bundles = bundles
    try:
        yield tested
    finally:
        await invoker.stop(0)
        await pool.close()
        await sandbox.close()
        await dispatcher.close()
        journal.close()
