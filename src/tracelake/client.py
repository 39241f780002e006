"""The user API for Python: typed answers, and the platform's own errors when a request is refused.

    with Client("http://127.0.0.1:8600", token) as client:
        client.deploy(Path("chain.yaml").read_bytes())
        client.trigger("chain", "src", cursor=100)
        client.query("SELECT count(*) FROM blocks WHERE block_number >= ?", [100]).to_pandas()

``Client()`` finds the stack as the command line does (``tracelake.stack_address``): by ``TRACELAKE_URL`` and
``TRACELAKE_TOKEN``, or by the home in the current folder. ``query`` needs pyarrow; all else needs nothing more.

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

from tracelake.client_extra import need
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
from tracelake.contracts.dispatcher_api import TriggerResponse
from tracelake.contracts.explain import RangeExplanation, TaskExplanation
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
from tracelake.contracts.user_api import (
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
from tracelake.stack_address import find_stack

if TYPE_CHECKING:
    import pyarrow as pa

    from tracelake.query_result import QueryResult
    from tracelake.query_stream import QueryStream

UNREACHABLE = "StackUnreachable"
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_PIECE = 256 * 1024
_TIMEOUT = httpx.Timeout(35.0, connect=5.0)
_QUERY_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
"""The service has its own limit and says so when it is reached; this one is for a service that says nothing."""
_CLASSES: Mapping[int, type[errors.TracelakeError]] = {
    kind.status: kind
    for kind in (
        errors.Unauthenticated,
        errors.Forbidden,
        errors.NotFound,
        errors.Conflict,
        errors.TooLarge,
        errors.OverQuota,
        errors.Invalid,
        errors.BadRequest,
        errors.Unavailable,
    )
}

T = TypeVar("T")
Params = Sequence[Any] | Mapping[str, Any]


class _FieldProblem(msgspec.Struct, frozen=True):
    field: str = ""
    message: str = ""
    line: int | None = None
    column: int | None = None


class _Problem(msgspec.Struct, frozen=True):
    reason: str
    detail: str
    errors: list[_FieldProblem] | None = None


class Client:
    def __init__(
        self, url: str | None = None, token: str | None = None, *, home: str | Path | None = None
    ) -> None:
        """Without a URL, the stack of ``home``, of the environment or of the current folder."""
        url, token = find_stack(url, token, home)
        self.url = url.rstrip("/")
        try:
            host = httpx.URL(self.url).host
            self._http = httpx.Client(
                base_url=self.url,
                headers={"Authorization": f"Bearer {token}"},
                timeout=_TIMEOUT,
                # A proxy of the environment is for the world outside, never for this machine.
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

        Without a ``limit``, all rows that the service gives at once; if there would have been more, it warns."""
        need("pyarrow")
        from tracelake.query_result import QueryResult, ResultTruncated

        with self.query_stream(sql, params, limit=limit) as answer:
            result = QueryResult(answer.read_all(), truncated=answer.truncated, query_id=answer.query_id)
        if limit is None and result.truncated:
            warnings.warn(ResultTruncated(result.num_rows), stacklevel=2)
        return result

    def query_batches(
        self, sql: str, params: Params | None = None, *, limit: int | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The same piece by piece, for results that needn't be in memory at once."""
        with self.query_stream(sql, params, limit=limit) as answer:
            yield from answer

    @contextmanager
    def query_stream(
        self, sql: str, params: Params | None = None, *, limit: int | None = None
    ) -> Iterator[QueryStream]:
        """An answer that is being read: its schema and how many rows there are, then its batches."""
        need("pyarrow")
        from tracelake.query_stream import QueryStream

        request = _request(sql, params, limit)
        headers = {"Accept": ARROW_STREAM, "Content-Type": "application/json"}
        with self._streamed(USER_QUERY_PATH, msgspec.json.encode(request), headers) as answer:
            if answer.headers.get("content-type", "").partition(";")[0] != ARROW_STREAM:
                raise self._stranger()
            yield QueryStream(answer)

    def query_rows(
        self, sql: str, params: Params | None = None, *, limit: int | None = None
    ) -> QueryResponse:
        """The same as plain values, as ``tracelake.contracts.query_api`` describes them; needs no pyarrow."""
        request = _request(sql, params, limit)
        return self._post(USER_QUERY_PATH, QueryResponse, request, timeout=_QUERY_TIMEOUT)

    def export_query(self, sql: str, params: Params | None = None) -> QueryExported:
        """All rows into a Parquet file that the installation keeps for a day; ``download_export`` fetches it."""
        request = QueryRequest(sql=sql, params=to_wire(params), export=True)
        return self._post(USER_QUERY_PATH, QueryExported, request, timeout=_QUERY_TIMEOUT)

    def download_export(self, exported: QueryExported | UUID, path: str | Path) -> None:
        """The file that ``export_query`` made, as a file of one's own; ``NotFound`` once its time is over."""
        query_id = exported if isinstance(exported, UUID) else exported.query_id
        params = {"query_id": str(query_id)}
        asked = self._http.stream("GET", USER_EXPORTS_PATH, params=params, timeout=_QUERY_TIMEOUT)
        with self._explained(), asked as answer:
            if not answer.is_success:
                answer.read()
                raise self._refusal(answer)
            with open(path, "wb") as file:
                for piece in answer.iter_bytes():
                    file.write(piece)

    def deploy(self, yaml: bytes) -> tuple[DeployResponse, bool]:
        """What is active now, and whether this file was new."""
        answer = self._send("POST", "/v1/dags", content=yaml)
        return self._decoded(answer, DeployResponse), answer.status_code == 201

    def plan(self, yaml: bytes) -> PlanResponse:
        return self._decoded(self._send("POST", "/v1/dags/plan", content=yaml), PlanResponse)

    def dags(self, *, limit: int = 100, after: str | None = None) -> DagPage:
        return self._get("/v1/dags", DagPage, limit=limit, after=after)

    def dag_versions(self, dag: str, *, limit: int = 100, after: int | None = None) -> DagVersionPage:
        return self._get(f"/v1/dags/{quote(dag, '')}/versions", DagVersionPage, limit=limit, after=after)

    def dag_version(self, dag: str, version: int) -> DagVersionDetail:
        """One of a DAG's files as it was deployed."""
        return self._get(f"/v1/dags/{quote(dag, '')}/versions/{version}", DagVersionDetail)

    def push_bundle(self, file: BinaryIO) -> tuple[BundleDetail, bool]:
        """A function's zip file as it is kept, and whether it was new."""
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        answer = self._send(
            "POST",
            "/v1/bundles",
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

    def dataset(self, name: str) -> DatasetDetail:
        return self._get(f"/v1/datasets/{quote(name, '')}", DatasetDetail)

    def buffer(self, name: str) -> BufferDetail:
        """A buffered dataset: its schema, who writes it, and what waits for it."""
        return self._get(f"/v1/buffers/{quote(name, '')}", BufferDetail)

    def partitions(self, name: str, *, limit: int = 100, after: str | None = None) -> PartitionPage:
        return self._get(
            f"/v1/datasets/{quote(name, '')}/partitions", PartitionPage, limit=limit, after=after
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
        query = {"from": start, "to": end, "limit": limit, "after": after}
        return self._get(f"/v1/datasets/{quote(name, '')}/gaps", GapPage, **query)

    def explain_range(
        self, name: str, *, start: int | None = None, end: int | None = None, limit: int = 100
    ) -> RangeExplanation:
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
        """How far a job is with a range of blocks, and the events that would ask for the rest."""
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
    ) -> TriggerResponse:
        scope = {"cursor": cursor, "start": start, "end": end}
        body = {name: value for name, value in scope.items() if value is not None}
        return self._post(f"/v1/sources/{quote(dag, '')}/{quote(job, '')}/trigger", TriggerResponse, body)

    def set_paused(self, dag: str, job: str, paused: bool) -> JobPaused:
        action = "pause" if paused else "resume"
        return self._post(f"/v1/jobs/{quote(dag, '')}/{quote(job, '')}/{action}", JobPaused)

    def failed_deliveries(self, *, limit: int = 100) -> FailedDeliveries:
        return self._get("/v1/outbox/failed", FailedDeliveries, limit=limit)

    def replay(self, outbox_ids: Iterable[int] = ()) -> Replayed:
        """Without ids, everything that was given up."""
        ids = list(outbox_ids)
        return self._post("/v1/outbox/replay", Replayed, {"outbox_ids": ids} if ids else {})

    def buffers(self) -> BufferPage:
        return self._get("/v1/buffers", BufferPage)

    def dead_letters(self, name: str, *, limit: int = 100, after: str | None = None) -> DeadLetterPage:
        return self._get(
            f"/v1/buffers/{quote(name, '')}/dead-letters", DeadLetterPage, limit=limit, after=after
        )

    def dead_letter(self, dead_letter_id: int) -> DeadLetterDetail:
        return self._get(f"/v1/dead-letters/{dead_letter_id}", DeadLetterDetail)

    def replay_dead_letters(self, name: str, ids: Iterable[int] = ()) -> DeadLettersReplayed:
        """Without ids, all of the dataset's."""
        body = ReplayDeadLetters(list(ids) or None)
        return self._post(f"/v1/buffers/{quote(name, '')}/replay", DeadLettersReplayed, body)

    def drop_dead_letters(
        self, name: str, ids: Iterable[int] = (), *, everything: bool = False
    ) -> DeadLettersDropped:
        body = DropDeadLetters(list(ids) or None, everything)
        return self._post(f"/v1/buffers/{quote(name, '')}/drop", DeadLettersDropped, body)

    def check_ready(self) -> datetime | None:
        """Raises unless the stack is ready; the server's own time, if it tells."""
        said = self._send("GET", "/readyz").headers.get("date")
        try:
            return parsedate_to_datetime(said) if said else None
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
            raise self._stranger() from None

    def _refusal(self, answer: httpx.Response) -> errors.TracelakeError:
        try:
            problem = msgspec.json.decode(answer.content, type=_Problem)
        except msgspec.DecodeError:
            return self._stranger()
        found = problem.errors or []
        if problem.reason == "InvalidDag" and found:
            return errors.InvalidDag(
                [errors.DagProblem(e.line or 1, e.column or 1, e.field, e.message) for e in found]
            )
        detail = problem.detail
        if len(found) > 1:
            detail = "; ".join(f"{each.field}: {each.message}" for each in found)
        return _CLASSES.get(answer.status_code, errors.TracelakeError)(problem.reason, detail)

    def _stranger(self) -> errors.Unavailable:
        return errors.Unavailable(UNREACHABLE, f"what answers at {self.url} isn't a Tracelake user port")


def _request(sql: str, params: Params | None, limit: int | None) -> QueryRequest:
    return QueryRequest(sql=sql, params=to_wire(params), limit=MAX_LIMIT if limit is None else limit)
