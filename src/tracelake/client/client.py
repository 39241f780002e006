"""``Client``: the user API for Python, with typed answers and the platform's own errors.

    with Client("http://127.0.0.1:8600", token) as client:
        client.deploy(Path("chain.yaml").read_bytes())      # folder=…, if the DAG names files
        client.trigger("chain", "src", cursor=100)
        client.query("SELECT count(*) FROM blocks WHERE block_number >= ?", [100]).to_pandas()

``Client()`` finds the stack as the command line does (``tracelake.stack_connection``): by ``TRACELAKE_URL`` and
``TRACELAKE_TOKEN``, or by the home in the current folder. ``query`` needs pyarrow; the other calls need no extra.

A refusal is raised as the class of the error tree that has its HTTP status, with the server's ``reason``; an
invalid DAG as ``InvalidDag`` with every problem. A server that can't be reached, or that isn't a Dispatcher's
user port, is ``Unavailable`` with the reason ``StackUnreachable``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar
from urllib.parse import quote
from uuid import UUID

import httpx
import msgspec

from tracelake.client.dag_files import resolve_files
from tracelake.client.extras import need
from tracelake.contracts.buffers import (
    BufferDetail,
    BufferPage,
    DeadLetterDetail,
    DeadLetterPage,
    DeadLettersDropped,
    DeadLettersReplayed,
    DropDeadLetters,
    ReplayDeadLetters,
)
from tracelake.contracts.bundles import BundleDetail, BundlePage
from tracelake.contracts.coverage import BackfillState, GapPage
from tracelake.contracts.deliveries import (
    DeliveryDetail,
    DeliveryPage,
    DeliveryPaused,
    DropMessages,
    MessagesDropped,
    MessagesReplayed,
    ReplayMessages,
)
from tracelake.contracts.dispatcher_api import TriggerResponse
from tracelake.contracts.explain import RangeExplanation, TaskExplanation
from tracelake.contracts.headers import AUTHORIZATION_HEADER, bearer
from tracelake.contracts.pressure import PressureReport
from tracelake.contracts.problem import read_problem
from tracelake.contracts.query_api import (
    ARROW_STREAM,
    MAX_LIMIT,
    USER_EXPORTS_PATH,
    USER_QUERY_PATH,
    QueryExported,
    QueryRequest,
    QueryResponse,
    to_wire,
)
from tracelake.contracts.sources import DEFAULT_OVERLAP_SECONDS, SourcePage, SourceRan, WebhookSecret
from tracelake.contracts.user_api import (
    ChainPage,
    DagPage,
    DagVersionDetail,
    DagVersionPage,
    DatasetDetail,
    DatasetPage,
    DeployResponse,
    FailedDeliveries,
    JobPaused,
    PartitionPage,
    PlanResponse,
    Replayed,
    TaskChanged,
    TaskDetail,
    TaskPage,
)
from tracelake.domain import errors
from tracelake.stack_connection import StackConnection

if TYPE_CHECKING:
    import pyarrow as pa

    from tracelake.client.results import QueryResult
    from tracelake.client.stream import QueryStream

UNREACHABLE = "StackUnreachable"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PIECE = 256 * 1024
_TIMEOUT = httpx.Timeout(35.0, connect=5.0)
_QUERY_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
"""The service has a limit of its own and reports it; this one is for a service that doesn't answer."""
T = TypeVar("T")
Params = Sequence[Any] | Mapping[str, Any]


class Client:
    def __init__(
        self, url: str | None = None, token: str | None = None, *, home: str | Path | None = None
    ) -> None:
        """Without a URL, the stack of ``home``, of the environment or of the current folder."""
        url, token = StackConnection.from_env_or_home(url, token, home)
        self.url = url.rstrip("/")
        try:
            host = httpx.URL(self.url).host
            self._http = httpx.Client(
                base_url=self.url,
                headers={AUTHORIZATION_HEADER: bearer(token)},
                timeout=_TIMEOUT,
                # A proxy that the environment names is for other machines, never for this one.
                trust_env=host not in _LOOPBACK,
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise errors.BadRequest("InvalidUrl", f"{url!r} with this token can't be used: {error}") from None

    def __repr__(self) -> str:
        return f"Client({self.url})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def query(self, sql: str, params: Params | None = None, *, limit: int | None = None) -> QueryResult:
        """One SELECT over published datasets, as a ``pyarrow.Table`` (with ``to_pandas`` and ``to_polars``).

        Without a ``limit``, the result has as many rows as the service allows; if there are more, it warns."""
        need("pyarrow")
        from tracelake.client.results import QueryResult, ResultTruncated

        with self.query_stream(sql, params, limit=limit) as answer:
            result = QueryResult(answer.read_all(), truncated=answer.truncated, query_id=answer.query_id)
        if limit is None and result.truncated:
            warnings.warn(ResultTruncated(result.num_rows), stacklevel=2)
        return result

    def query_batches(
        self, sql: str, params: Params | None = None, *, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The same in batches, for results that needn't be in memory at once."""
        with self.query_stream(sql, params, limit=limit) as answer:
            yield from answer

    @contextmanager
    def query_stream(
        self, sql: str, params: Params | None = None, *, limit: int | None = None
    ) -> Iterator[QueryStream]:
        """A streamed answer: its schema and number of rows first, then its batches."""
        need("pyarrow")
        from tracelake.client.stream import QueryStream

        request = _request(sql, params, limit)
        headers = {"Accept": ARROW_STREAM, "Content-Type": "application/json"}
        with self._streamed(USER_QUERY_PATH, msgspec.json.encode(request), headers) as answer:
            if answer.headers.get("content-type", "").partition(";")[0] != ARROW_STREAM:
                raise self._not_tracelake()
            yield QueryStream(answer)

    def query_rows(
        self, sql: str, params: Params | None = None, *, limit: int | None = None
    ) -> QueryResponse:
        """The same as plain values, described in ``tracelake.contracts.query_api``; needs no pyarrow."""
        request = _request(sql, params, limit)
        return self._post(USER_QUERY_PATH, QueryResponse, request, timeout=_QUERY_TIMEOUT)

    def export_query(self, sql: str, params: Params | None = None) -> QueryExported:
        """Write all rows into a Parquet file that is kept for a day; ``download_export`` fetches it."""
        request = QueryRequest(sql=sql, params=to_wire(params), export=True)
        return self._post(USER_QUERY_PATH, QueryExported, request, timeout=_QUERY_TIMEOUT)

    def download_export(self, exported: QueryExported | UUID, path: str | Path) -> None:
        """Download the file that ``export_query`` wrote; ``NotFound`` once it has expired."""
        query_id = exported if isinstance(exported, UUID) else exported.query_id
        params = {"query_id": str(query_id)}
        asked = self._http.stream("GET", USER_EXPORTS_PATH, params=params, timeout=_QUERY_TIMEOUT)
        with self._explained(), asked as answer:
            if not answer.is_success:
                # A streamed answer has no body until it is read, and the body has the reason.
                answer.read()
                raise self._refusal(answer)
            with open(path, "wb") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)

    def deploy(self, yaml: bytes, *, folder: str | Path | None = None) -> tuple[DeployResponse, bool]:
        """Deploy a DAG file. Returns the active version, and whether the file was new.

        Files that the DAG names are read from ``folder``, and become a part of the deployed version."""
        answer = self._send_dag("/v1/dags", yaml, folder)
        return self._decoded(answer, DeployResponse), answer.status_code == 201

    def plan(self, yaml: bytes, *, folder: str | Path | None = None) -> PlanResponse:
        return self._decoded(self._send_dag("/v1/dags/plan", yaml, folder), PlanResponse)

    def dags(self, *, limit: int = 100, after: str | None = None) -> DagPage:
        return self._get("/v1/dags", DagPage, limit=limit, after=after)

    def dag_versions(self, dag: str, *, limit: int = 100, after: int | None = None) -> DagVersionPage:
        return self._get(f"/v1/dags/{quote(dag, '')}/versions", DagVersionPage, limit=limit, after=after)

    def dag_version(self, dag: str, version: int) -> DagVersionDetail:
        """A version of a DAG with its file, as it was deployed."""
        return self._get(f"/v1/dags/{quote(dag, '')}/versions/{version}", DagVersionDetail)

    def push_bundle(self, file: BinaryIO) -> tuple[BundleDetail, bool]:
        """Push a function's zip file. Returns the stored bundle, and whether it was new."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        answer = self._send(
            "POST",
            "/v1/bundles",
            # Pieces keep memory small; with a length given, httpx doesn't use chunked encoding.
            content=iter(partial(file.read, _PIECE), b""),
            headers={"Content-Type": "application/zip", "Content-Length": str(size)},
        )
        return self._decoded(answer, BundleDetail), answer.status_code == 201

    def bundles(self, *, limit: int = 100, after: str | None = None) -> BundlePage:
        return self._get("/v1/bundles", BundlePage, limit=limit, after=after)

    def bundle(self, reference: str) -> BundleDetail:
        return self._get(f"/v1/bundles/{quote(reference, '')}", BundleDetail)

    def tasks(
        self,
        *,
        dag: str | None = None,
        job: str | None = None,
        status: str | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> TaskPage:
        return self._get("/v1/tasks", TaskPage, dag=dag, job=job, status=status, limit=limit, after=after)

    def task(self, task_id: UUID) -> TaskDetail:
        return self._get(f"/v1/tasks/{task_id}", TaskDetail)

    def explain_task(self, task_id: UUID, *, depth: int = 20) -> TaskExplanation:
        return self._get(f"/v1/tasks/{task_id}/explain", TaskExplanation, depth=depth)

    def cancel(self, task_id: UUID) -> TaskChanged:
        return self._post(f"/v1/tasks/{task_id}/cancel", TaskChanged)

    def retry(self, task_id: UUID) -> TaskChanged:
        return self._post(f"/v1/tasks/{task_id}/retry", TaskChanged)

    def datasets(
        self, *, dag: str | None = None, job: str | None = None, limit: int = 100, after: str | None = None
    ) -> DatasetPage:
        return self._get("/v1/datasets", DatasetPage, dag=dag, job=job, limit=limit, after=after)

    def chains(self) -> ChainPage:
        """The followers of chains, how far they are, and what keeps them."""
        return self._get("/v1/chains", ChainPage)

    def dataset(self, name: str) -> DatasetDetail:
        return self._get(f"/v1/datasets/{quote(name, '')}", DatasetDetail)

    def buffer(self, name: str) -> BufferDetail:
        """A buffered dataset: its schema, its writers and its waiting messages."""
        return self._get(f"/v1/buffers/{quote(name, '')}", BufferDetail)

    def partitions(
        self,
        name: str,
        *,
        start: int | None = None,
        end: int | None = None,
        details: bool = False,
        limit: int = 100,
        after: str | None = None,
    ) -> PartitionPage:
        """Committed partitions, or those of a range; ``details`` lists their files with sizes and hashes."""
        return self._get(
            f"/v1/datasets/{quote(name, '')}/partitions",
            PartitionPage,
            start=start,
            end=end,
            details="true" if details else None,
            limit=limit,
            after=after,
        )

    def gaps(
        self,
        name: str,
        *,
        start: int | None = None,
        end: int | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> GapPage:
        # ``from`` is a Python keyword, so it can't be a keyword argument.
        query = {"from": start, "to": end, "limit": limit, "after": after}
        return self._get(f"/v1/datasets/{quote(name, '')}/gaps", GapPage, **query)

    def explain_range(
        self, name: str, *, start: int | None = None, end: int | None = None, limit: int = 100
    ) -> RangeExplanation:
        # ``from`` is a Python keyword, so it can't be a keyword argument.
        query = {"from": start, "to": end, "limit": limit}
        return self._get(f"/v1/datasets/{quote(name, '')}/explain", RangeExplanation, **query)

    def backfill(
        self,
        dag: str,
        job: str,
        *,
        start: int,
        end: int,
        chunk: int | None = None,
        order: str = "oldest",
        limit: int = 1000,
    ) -> BackfillState:
        """The progress of a job with a range of blocks, and the events that would request the rest."""
        query = {"from": start, "to": end, "chunk": chunk, "order": order, "limit": limit}
        return self._get(f"/v1/jobs/{quote(dag, '')}/{quote(job, '')}/backfill", BackfillState, **query)

    def trigger(
        self,
        dag: str,
        job: str,
        *,
        cursor: int | None = None,
        start: int | None = None,
        end: int | None = None,
        priority: str | None = None,
    ) -> TriggerResponse:
        scope = {"cursor": cursor, "start": start, "end": end, "priority": priority}
        body = {name: value for name, value in scope.items() if value is not None}
        return self._post(f"/v1/sources/{quote(dag, '')}/{quote(job, '')}/trigger", TriggerResponse, body)

    def pressure(self) -> PressureReport:
        """What waits in jobs with thresholds, and which jobs are held because of them."""
        return self._get("/v1/pressure", PressureReport)

    def sources(self) -> SourcePage:
        """All active sources."""
        found = self._get("/v1/sources", SourcePage, limit=1000)
        while found.next is not None:
            more = self._get("/v1/sources", SourcePage, limit=1000, after=found.next)
            found = SourcePage(more.now, [*found.sources, *more.sources], more.next)
        return found

    def run_source(self, dag: str, job: str) -> SourceRan:
        """Make a tick of a cron source now."""
        return self._post(f"/v1/sources/{quote(dag, '')}/{quote(job, '')}/run", SourceRan)

    def webhook_secret(
        self, dag: str, job: str, *, rotate: bool = False, overlap_seconds: int = DEFAULT_OVERLAP_SECONDS
    ) -> WebhookSecret:
        """A webhook's secret, which is shown once; with ``rotate`` a new one, beside which those before are
        accepted for ``overlap_seconds`` more at most, and with 0 not at all."""
        body = {"rotate": rotate, "overlap_seconds": overlap_seconds}
        return self._post(f"/v1/sources/{quote(dag, '')}/{quote(job, '')}/secret", WebhookSecret, body)

    def set_paused(self, dag: str, job: str, paused: bool) -> JobPaused:
        action = "pause" if paused else "resume"
        return self._post(f"/v1/jobs/{quote(dag, '')}/{quote(job, '')}/{action}", JobPaused)

    def failed_deliveries(self, *, limit: int = 100) -> FailedDeliveries:
        return self._get("/v1/outbox/failed", FailedDeliveries, limit=limit)

    def replay(self, outbox_ids: Iterable[int] = ()) -> Replayed:
        """Retry deliveries that were given up: all without ids."""
        ids = list(outbox_ids)
        return self._post("/v1/outbox/replay", Replayed, {"outbox_ids": ids} if ids else {})

    def buffers(self) -> BufferPage:
        return self._get("/v1/buffers", BufferPage)

    def deliveries(self) -> DeliveryPage:
        return self._get("/v1/deliveries", DeliveryPage)

    def delivery(self, dag: str, name: str, *, state: str | None = None, limit: int = 20) -> DeliveryDetail:
        """A delivery with its newest messages, of one ``state`` or all."""
        return self._get(_delivery(dag, name), DeliveryDetail, state=state, limit=limit)

    def pause_delivery(self, dag: str, name: str) -> DeliveryPaused:
        return self._post(f"{_delivery(dag, name)}/pause", DeliveryPaused)

    def resume_delivery(self, dag: str, name: str) -> DeliveryPaused:
        """Also after the receiver answered that it wants no more."""
        return self._post(f"{_delivery(dag, name)}/resume", DeliveryPaused)

    def replay_delivery(
        self, dag: str, name: str, message_ids: Iterable[int] | None = None
    ) -> MessagesReplayed:
        """Send dead letters again, these or all."""
        ids = list(message_ids) if message_ids is not None else None
        return self._post(f"{_delivery(dag, name)}/replay", MessagesReplayed, ReplayMessages(ids))

    def drop_messages(
        self, dag: str, name: str, message_ids: Iterable[int] = (), *, everything: bool = False
    ) -> MessagesDropped:
        """Give up dead letters of a delivery for good."""
        body = DropMessages(list(message_ids) or None, everything)
        return self._post(f"{_delivery(dag, name)}/drop", MessagesDropped, body)

    def dead_letters(self, name: str, *, limit: int = 100, after: str | None = None) -> DeadLetterPage:
        return self._get(
            f"/v1/buffers/{quote(name, '')}/dead-letters", DeadLetterPage, limit=limit, after=after
        )

    def dead_letter(self, dead_letter_id: int) -> DeadLetterDetail:
        return self._get(f"/v1/dead-letters/{dead_letter_id}", DeadLetterDetail)

    def replay_dead_letters(self, name: str, ids: Iterable[int] = ()) -> DeadLettersReplayed:
        """Send dead letters to the sink again: all of the dataset without ids."""
        body = ReplayDeadLetters(list(ids) or None)
        return self._post(f"/v1/buffers/{quote(name, '')}/replay", DeadLettersReplayed, body)

    def drop_dead_letters(
        self, name: str, ids: Iterable[int] = (), *, everything: bool = False
    ) -> DeadLettersDropped:
        body = DropDeadLetters(list(ids) or None, everything)
        return self._post(f"/v1/buffers/{quote(name, '')}/drop", DeadLettersDropped, body)

    def check_ready(self) -> datetime | None:
        """Raise unless the stack is ready; returns the server's own time if its answer has one."""
        date = self._send("GET", "/readyz").headers.get("date")
        try:
            return parsedate_to_datetime(date) if date else None
        except ValueError:
            return None

    def _get(self, path: str, kind: type[T], **query: object) -> T:
        params = {name: str(value) for name, value in query.items() if value is not None}
        return self._decoded(self._send("GET", path, params=params), kind)

    def _post(self, path: str, kind: type[T], body: Any = None, **more: Any) -> T:
        content = b"" if body is None else msgspec.json.encode(body)
        return self._decoded(self._send("POST", path, content=content, **more), kind)

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        with self._explained():
            answer = self._http.request(method, path, **more)
        if not answer.is_success:
            raise self._refusal(answer)
        return answer

    @contextmanager
    def _streamed(self, path: str, content: bytes, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        asked = self._http.stream("POST", path, content=content, headers=headers, timeout=_QUERY_TIMEOUT)
        with self._explained(), asked as answer:
            if not answer.is_success:
                # A streamed answer has no body until it is read, and the body has the reason.
                answer.read()
                raise self._refusal(answer)
            yield answer

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise errors.BadRequest("InvalidUrl", f"{self.url!r} is no usable URL: {error}") from None
        except httpx.TimeoutException:
            raise errors.Unavailable(UNREACHABLE, f"{self.url} doesn't answer in time") from None
        except httpx.TransportError as error:
            raise errors.Unavailable(UNREACHABLE, f"{self.url} can't be reached ({error})") from None

    def _decoded(self, answer: httpx.Response, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError:
            # Another program may listen there and answer with a page of its own.
            raise self._not_tracelake() from None

    def _send_dag(self, path: str, yaml: bytes, folder: str | Path | None) -> httpx.Response:
        if folder is None:
            return self._send("POST", path, content=yaml)
        dag = resolve_files(yaml, Path(folder))
        try:
            return self._send("POST", path, content=dag.yaml)
        except errors.InvalidDag as refused:
            raise errors.InvalidDag([dag.in_file(each) for each in refused.problems]) from None

    def _refusal(self, answer: httpx.Response) -> errors.TracelakeError:
        problem = read_problem(answer.content)
        if problem is None:
            return self._not_tracelake()
        found = problem.errors or []
        if problem.reason == "InvalidDag" and found:
            return errors.InvalidDag(
                [errors.DagProblem(e.line or 1, e.column or 1, e.field, e.message) for e in found]
            )
        if len(found) > 1:
            detail = "; ".join(f"{each.field}: {each.message}" for each in found)
            return errors.error_of(answer.status_code, problem.reason, detail)
        return problem.error(answer.status_code)

    def _not_tracelake(self) -> errors.Unavailable:
        return errors.Unavailable(UNREACHABLE, f"the server at {self.url} is not a Tracelake user port")


def _delivery(dag: str, name: str) -> str:
    return f"/v1/deliveries/{quote(dag, '')}/{quote(name, '')}"


def _request(sql: str, params: Params | None, limit: int | None) -> QueryRequest:
    return QueryRequest(sql=sql, params=to_wire(params), limit=MAX_LIMIT if limit is None else limit)
