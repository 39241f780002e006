"""Functions for tests: bundles from source text, events, and two invokers.

``TestInvoker`` runs functions in real sandboxes with everything real but the Dispatcher, whose completions
``RecordedDispatcher`` keeps. ``ScriptedInvoker`` speaks real HTTP to a Dispatcher: it accepts tasks or not, as its
script of answers says, and records the requests; after the script, ``then`` is the answer to everything.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import stat
import zipfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal
from uuid import UUID, uuid4

import msgspec

from tests.support.worker_tasks import payload
from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import CompleteRequest, CompleteResponse, FetchResponse
from tracelake.domain.errors import NotFound, TracelakeError
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.sandbox.sandbox import Sandbox
from tracelake.settings import Secret
from tracelake.worker.lambda_.bundle_cache import BundleCache
from tracelake.worker.lambda_.environment import EnvironmentPool
from tracelake.worker.lambda_.function_program import build_layer
from tracelake.worker.lambda_.invoker import Invoker
from tracelake.worker.lambda_.journal import Journal
from tracelake.worker.lambda_.start_environment import EnvironmentStarter

PATIENCE = 180.0
NOWHERE = "http://127.0.0.1:9"
Answer = int | Literal["lose", "hang", "cut"]
"""A status; or the request is taken and the connection cut, or never answered; or cut before it is asked for."""


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
    """Records every completion; ``refuse`` has the errors to raise, by task."""

    def __init__(self) -> None:
        super().__init__(NOWHERE, Secret("w" * 40))
        self.completions: dict[UUID, list[CompleteRequest]] = {}
        self.refuse: dict[UUID, TracelakeError] = {}
        self.fetched: dict[UUID, FetchResponse] = {}
        self._changed = asyncio.Condition()

    def complete(self, completion: CompleteRequest) -> asyncio.Future[CompleteResponse]:
        return asyncio.ensure_future(self._complete(completion))

    async def _complete(self, completion: CompleteRequest) -> CompleteResponse:
        async with self._changed:
            self.completions.setdefault(completion.task_id, []).append(completion)
            self._changed.notify_all()
        if completion.task_id in self.refuse:
            raise self.refuse.pop(completion.task_id)
        return CompleteResponse(completion.task_id, completion.status, completion.attempt)

    async def fetch(self, task_id: UUID, *, until: float | None = None) -> FetchResponse:
        if task_id not in self.fetched:
            raise NotFound("UnknownTask", f"there is no task {task_id}")
        return self.fetched[task_id]

    async def end_of(self, task_id: UUID, number: int = 1) -> CompleteRequest:
        """The n-th completion of a task."""
        async with asyncio.timeout(PATIENCE), self._changed:
            await self._changed.wait_for(lambda: len(self.completions.get(task_id, ())) >= number)
        return self.completions[task_id][number - 1]


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


class ScriptedInvoker:
    def __init__(
        self, script: Iterable[Answer] = (), *, then: Answer = 202, token: str | None = None
    ) -> None:
        self.then = then
        self.token = token
        self.asked: list[Invocation] = []
        self.functions: list[str] = []
        self.taken: list[Invocation] = []
        self.at_once = 0
        self.most_at_once = 0
        self.changed = asyncio.Condition()
        self._script = iter(script)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def attempts_taken(self) -> Counter[tuple[str, int]]:
        """How often each attempt was, or may have been, taken."""
        return Counter((str(each.task_id), each.attempt) for each in self.taken)

    async def start(self) -> None:
        """On the port that it had before, if it had one."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await self._server.wait_closed()

    async def until_taken(self, count: int, patience: float = 20.0) -> list[Invocation]:
        async with asyncio.timeout(patience), self.changed:
            await self.changed.wait_for(lambda: len(self.taken) >= count)
        return self.taken

    async def until_asked(self, count: int, patience: float = 20.0) -> list[Invocation]:
        async with asyncio.timeout(patience), self.changed:
            await self.changed.wait_for(lambda: len(self.asked) >= count)
        return self.asked

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = await self._read(reader, writer)
            if answer == "hang":
                await reader.read()
            elif answer not in ("lose", "cut"):
                body = b"{}"
                head = (
                    f"HTTP/1.1 {answer} Scripted\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.at_once -= 1
            self._open.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        assert headers["expect"] == "100-continue"
        if self.then == "cut":
            return "cut"
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(int(headers["content-length"]))
        if self.token is not None and headers["x-trace-worker-token"] != self.token:
            return 401
        assert headers["x-amz-invocation-type"] == "Event"
        invocation = msgspec.json.decode(body, type=Invocation)
        answer = next(self._script, self.then)
        async with self.changed:
            self.asked.append(invocation)
            self.functions.append(request.split("/")[3])
            if answer in (200, 202, 500, "lose", "hang"):
                self.taken.append(invocation)
            self.changed.notify_all()
        return answer


@asynccontextmanager
async def scripted_invoker(
    *script: Answer, then: Answer = 202, token: str | None = None
) -> AsyncIterator[ScriptedInvoker]:
    invoker = ScriptedInvoker(script, then=then, token=token)
    await invoker.start()
    try:
        yield invoker
    finally:
        await invoker.stop()
