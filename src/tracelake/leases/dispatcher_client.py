"""The Dispatcher's internal API as lease holders use it: every call is repeated until it is answered.

All of these calls may be repeated safely: a claim has a key, a repeated completion gets the first answer again,
events and records are at-least-once, an invoker registers again and again. So an outage, a restart or a lost
response is waited out with growing delays and logged once. A refusal is raised as the class of the error tree that
has its status.

``until`` is a time of the event loop's clock after which a call gives up with ``Unavailable``.

Completions travel in batches: those that become ready while others are under way share the next call. The first is
sent at once, so a lone task doesn't wait; under load a batch grows to what became ready during one round trip. Each
completion is answered by a future of its own. A batch that is refused as a whole, for example because of one
malformed member, is sent again one by one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlencode
from uuid import UUID

import msgspec
import structlog

from tracelake.contracts.buffers import (
    BUFFER_SCHEMA_PATH,
    DEAD_LETTER_PATH,
    PUBLISH_PATH,
    BufferSchemaResponse,
    DeadLetterRequest,
    DeadLetterResponse,
)
from tracelake.contracts.bundles import (
    BUNDLE_CONTENT_PATH,
    INVOKER_PATH,
    InvokerRegistered,
    InvokerRegistration,
)
from tracelake.contracts.deliveries import (
    LOAD_PATH,
    PLAN_PATH,
    REPORT_PATH,
    DeliveryLoad,
    DeliveryLoaded,
    DeliveryPlan,
    DeliveryPlanned,
    DeliveryReport,
    DeliveryReported,
)
from tracelake.contracts.dispatcher_api import (
    CLAIM_BATCH_PATH,
    CLAIM_PATH,
    COMPLETE_BATCH_PATH,
    COMPLETE_PATH,
    EVENTS_PATH,
    FETCH_PATH,
    HEARTBEAT_PATH,
    MAX_BATCH,
    TASK_INPUTS_PATH,
    TASK_STATE_PATH,
    WORKER_PATH,
    ClaimBatchResponse,
    ClaimRequest,
    ClaimResponse,
    CompleteBatchResponse,
    CompleteRequest,
    CompleteResponse,
    EventsRequest,
    EventsResponse,
    FetchResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    TaskInputsResponse,
    TaskStateRequest,
    TaskStateResponse,
    WorkerRegistered,
    WorkerRegistration,
)
from tracelake.contracts.headers import CAPABILITY_HEADER, WORKER_HEADER
from tracelake.contracts.problem import ReceivedProblem, read_problem
from tracelake.contracts.sources import (
    SCHEDULES_PATH,
    SOURCE_BODY_PATH,
    TICKS_PATH,
    SchedulesRequest,
    SchedulesResponse,
    TickIn,
    TickOut,
    TicksRequest,
    TicksResponse,
)
from tracelake.domain import errors
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.leases.http_link import HttpDownload, HttpResponse, NoAnswer, open_link
from tracelake.leases.until_answered import is_server_fault, until_answered
from tracelake.settings import Secret

UNREACHABLE = "DispatcherUnreachable"
_BACKOFF = Backoff(first=0.05, longest=2.0)
# Shorter: functions wait for their invoker, and the Dispatcher forgets one that is late.
_REGISTER_BACKOFF = Backoff(first=0.2, longest=0.7)
# Longer than the Dispatcher's own limit for a request, so that its answer comes first.
_TRY_SECONDS = 35.0
_DOWNLOAD_SECONDS = 30.0
_LANES = 2
_WORTH_A_LANE = 32
"""Number of waiting completions that justify a second call while the first is under way."""
_GATHER_SECONDS = 0.003
_MAX_BYTES = 8 * 1024 * 1024
_CLOSED = "the worker ends before the Dispatcher answered"

T = TypeVar("T")
Sent = CompleteResponse | TracelakeError
AnswerFuture = asyncio.Future[CompleteResponse]

_log = structlog.get_logger(__name__)


class DispatcherClient:
    def __init__(self, internal_url: str, worker_token: Secret) -> None:
        self.url = internal_url.rstrip("/")
        self._link = open_link(self.url, {WORKER_HEADER: worker_token.reveal()})
        self._away = False
        self._completions = Completions(self._send_completions)

    def __repr__(self) -> str:
        return f"DispatcherClient({self.url})"

    async def close(self) -> None:
        # Completions first: their calls use the link.
        await self._completions.close()
        await self._link.close()

    async def check(self) -> None:
        """Wait until the Dispatcher answers. Raises ``Unauthenticated`` if it refuses the worker token."""
        # A task that can't exist: NotFound means that the token was accepted.
        try:
            await self._call("GET", f"{FETCH_PATH}?task_id={UUID(int=0)}", FetchResponse, forgiving=False)
        except errors.NotFound:
            return

    async def claim(
        self, claims: Sequence[ClaimRequest], *, until: float | None = None
    ) -> list[ClaimResponse]:
        """One answer per claim, in order."""
        if len(claims) == 1:
            body = msgspec.json.encode(claims[0])
            return [await self._call("POST", CLAIM_PATH, ClaimResponse, body, until=until)]
        body = msgspec.json.encode({"claims": claims})
        batch = await self._call("POST", CLAIM_BATCH_PATH, ClaimBatchResponse, body, until=until)
        return batch.claims

    async def fetch(self, task_id: UUID, *, until: float | None = None) -> FetchResponse:
        return await self._call("GET", f"{FETCH_PATH}?task_id={task_id}", FetchResponse, until=until)

    async def heartbeat(
        self, beat: HeartbeatRequest, *, until: float | None = None, timeout: float | None = None
    ) -> HeartbeatResponse:
        """``timeout`` bounds each try: a lease can't wait for a connection that has gone silent."""
        body = msgspec.json.encode(beat)
        return await self._call("POST", HEARTBEAT_PATH, HeartbeatResponse, body, until=until, timeout=timeout)

    def complete(self, completion: CompleteRequest) -> asyncio.Future[CompleteResponse]:
        """Completions that come while others are under way travel together; each is answered on its own."""
        return self._completions.submit(completion)

    async def events(self, events: EventsRequest, *, until: float | None = None) -> EventsResponse:
        body = msgspec.json.encode(events)
        return await self._call("POST", EVENTS_PATH, EventsResponse, body, until=until)

    async def task_state(self, request: TaskStateRequest, *, until: float | None = None) -> None:
        await self._call(
            "POST", TASK_STATE_PATH, TaskStateResponse, msgspec.json.encode(request), until=until
        )

    async def task_inputs(
        self,
        task_id: UUID,
        attempt: int,
        input_index: int,
        after: str | None,
        *,
        margin: int = 0,
        until: float | None = None,
    ) -> TaskInputsResponse:
        query: dict[str, str | int] = {
            "task_id": str(task_id),
            "attempt": attempt,
            "input_index": input_index,
        }
        if after is not None:
            query["after"] = after
        if margin:
            query["margin"] = margin
        path = f"{TASK_INPUTS_PATH}?{urlencode(query)}"
        return await self._call("GET", path, TaskInputsResponse, until=until)

    async def source_body(self, task_id: UUID, *, until: float | None = None) -> bytes:
        """The body of the delivery that a task is for, as it came."""
        path = f"{SOURCE_BODY_PATH}?task_id={task_id}"
        attempt = partial(self._try, "GET", path, None, _TRY_SECONDS, None)
        return (await self._until_answered(path, attempt, _is_outage, until=until)).body

    async def publish(
        self, body: Mapping[str, Any], capability_token: Secret, *, until: float | None = None
    ) -> Any:
        headers = {CAPABILITY_HEADER: capability_token.reveal()}
        content = msgspec.json.encode(body)
        return await self._call("POST", PUBLISH_PATH, dict[str, Any], content, until=until, headers=headers)

    async def buffer_schema(self, dataset_uuid: UUID, *, until: float | None = None) -> BufferSchemaResponse:
        path = f"{BUFFER_SCHEMA_PATH}?dataset_uuid={dataset_uuid}"
        return await self._call("GET", path, BufferSchemaResponse, until=until)

    async def buffer_dead_letter(
        self, request: DeadLetterRequest, *, until: float | None = None
    ) -> DeadLetterResponse:
        body = msgspec.json.encode(request)
        return await self._call("POST", DEAD_LETTER_PATH, DeadLetterResponse, body, until=until)

    async def register_worker(self, registration: WorkerRegistration) -> None:
        await self._call("POST", WORKER_PATH, WorkerRegistered, msgspec.json.encode(registration))

    async def load_delivery(self, request: DeliveryLoad) -> DeliveryLoaded:
        return await self._call("POST", LOAD_PATH, DeliveryLoaded, msgspec.json.encode(request))

    async def plan_delivery(self, request: DeliveryPlan) -> DeliveryPlanned:
        return await self._call("POST", PLAN_PATH, DeliveryPlanned, msgspec.json.encode(request))

    async def report_delivery(self, request: DeliveryReport) -> DeliveryReported:
        return await self._call("POST", REPORT_PATH, DeliveryReported, msgspec.json.encode(request))

    async def schedules(self, scheduler_id: str, *, release: bool = False) -> SchedulesResponse:
        body = msgspec.json.encode(SchedulesRequest(scheduler_id, release))
        return await self._call("POST", SCHEDULES_PATH, SchedulesResponse, body)

    async def send_ticks(self, ticks: Sequence[TickIn]) -> list[TickOut]:
        """One answer per tick, in order."""
        body = msgspec.json.encode(TicksRequest(list(ticks)))
        return (await self._call("POST", TICKS_PATH, TicksResponse, body)).ticks

    async def register_invoker(self, url: str, concurrency: int) -> None:
        """To be repeated every ``REGISTER_SECONDS``; ``concurrency`` of 0 unregisters."""
        body = msgspec.json.encode(InvokerRegistration(url, concurrency))
        await self._call("POST", INVOKER_PATH, InvokerRegistered, body, backoff=_REGISTER_BACKOFF)

    async def fetch_bundle(self, sha256: str) -> AsyncIterator[bytes]:
        """The zip's bytes in parts, unverified. This waits while the Dispatcher can't be reached; the caller has a
        deadline."""
        path = f"{BUNDLE_CONTENT_PATH}?{urlencode({'sha256': sha256})}"
        answer = await self._until_answered(path, partial(self._try_download, path), _is_outage)
        try:
            async for part in answer.parts():
                yield part
        # A part was passed on already, so the download can't begin again here.
        except NoAnswer as error:
            why = f"the bundle sha256:{sha256} broke off on its way: {error}"
            raise Unavailable("BundleNotFetched", why) from None
        finally:
            await answer.close()

    async def _send_completions(self, bodies: Sequence[bytes]) -> list[Sent]:
        if len(bodies) == 1:
            try:
                return [await self._call("POST", COMPLETE_PATH, CompleteResponse, bodies[0])]
            except errors.TracelakeError as refusal:
                return [refusal]
        # Each body was encoded when it was submitted; joining them saves encoding all of it again.
        body = b'{"completions":[' + b",".join(bodies) + b"]}"
        batch = await self._call("POST", COMPLETE_BATCH_PATH, CompleteBatchResponse, body)
        return [
            entry.accepted
            if entry.accepted is not None
            else _worth_waiting(errors.error_of(entry.code, entry.reason or "Refused", entry.detail or ""))
            for entry in batch.completions
        ]

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: bytes | None = None,
        *,
        until: float | None = None,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
        forgiving: bool = True,
        backoff: Backoff = _BACKOFF,
    ) -> T:
        """``forgiving``: wait out a refused worker token too, since it may be in the middle of a rotation."""
        attempt = partial(
            self._try, method, path, body, _TRY_SECONDS if timeout is None else timeout, headers
        )
        # Calls with headers of their own carry a capability token, and a refusal may be about that one.
        is_outage = _is_outage if forgiving and headers is None else is_server_fault
        answer = await self._until_answered(path, attempt, is_outage, until=until, backoff=backoff)
        return msgspec.json.decode(answer.body, type=kind)

    async def _until_answered(
        self,
        path: str,
        attempt: Callable[[], Awaitable[T]],
        is_outage: Callable[[TracelakeError], bool],
        *,
        until: float | None = None,
        backoff: Backoff = _BACKOFF,
    ) -> T:
        try:
            return await until_answered(
                attempt,
                backoff,
                until=until,
                is_outage=is_outage,
                on_away=partial(self._is_away, path),
                on_back=self._is_back,
            )
        except TracelakeError as error:
            if not is_outage(error):
                raise
            raise Unavailable(UNREACHABLE, f"the Dispatcher didn't answer in time: {error}") from None

    async def _try(
        self, method: str, path: str, body: bytes | None, seconds: float, headers: Mapping[str, str] | None
    ) -> HttpResponse:
        try:
            answer = await self._link.request(method, path, body, seconds=seconds, headers=headers)
        except NoAnswer as error:
            raise Unavailable(UNREACHABLE, f"{self.url}: {error}") from None
        if not 200 <= answer.status < 300:
            raise refusal(answer)
        return answer

    async def _try_download(self, path: str) -> HttpDownload:
        try:
            answer = await self._link.download(path, seconds=_DOWNLOAD_SECONDS)
            if 200 <= answer.status < 300:
                return answer
            try:
                raise refusal(await answer.read())
            finally:
                await answer.close()
        except NoAnswer as error:
            raise Unavailable(UNREACHABLE, f"{self.url}: {error}") from None

    def _is_away(self, path: str, error: errors.TracelakeError) -> None:
        if not self._away:
            self._away = True
            _log.warning(
                "dispatcher_away", path=path.partition("?")[0], reason=error.reason, error=str(error)
            )

    def _is_back(self) -> None:
        if self._away:
            self._away = False
            _log.info("dispatcher_back", url=self.url)


def _is_outage(error: TracelakeError) -> bool:
    return is_server_fault(error) or isinstance(error, errors.Unauthenticated)


def refusal(answer: HttpResponse) -> errors.TracelakeError:
    """The error that a response other than 2xx stands for."""
    problem = read_problem(answer.body)
    if problem is None:
        problem = ReceivedProblem("Unexpected", f"status {answer.status} without a problem")
    return _worth_waiting(problem.error(answer.status))


def _worth_waiting(error: errors.TracelakeError) -> errors.TracelakeError:
    """Too many requests, or one that was too slow, are waited out as a service that is away is."""
    if isinstance(error, errors.OverQuota | errors.RequestTimeout):
        return errors.Unavailable(error.reason, error.message)
    return error


class Completions:
    """Sends completions in batches over at most two calls at a time."""

    def __init__(self, send: Callable[[Sequence[bytes]], Awaitable[list[Sent]]]) -> None:
        self._send = send
        self._waiting: deque[tuple[bytes, AnswerFuture]] = deque()
        self._lanes: set[asyncio.Task[None]] = set()
        self._closed = False

    def submit(self, completion: CompleteRequest) -> AnswerFuture:
        answer: AnswerFuture = asyncio.get_running_loop().create_future()
        if self._closed:
            answer.set_exception(Unavailable("Closed", _CLOSED))
            return answer
        self._waiting.append((msgspec.json.encode(completion), answer))
        if not self._lanes or (len(self._lanes) < _LANES and len(self._waiting) >= _WORTH_A_LANE):
            self._lanes.add(asyncio.create_task(self._run_lane()))
        return answer

    async def close(self) -> None:
        """Give up the completions that haven't been answered."""
        self._closed = True
        for lane in tuple(self._lanes):
            lane.cancel()
        await asyncio.gather(*self._lanes, return_exceptions=True)
        for _, answer in self._waiting:
            _give_up(answer)
        self._waiting.clear()

    async def _run_lane(self) -> None:
        lane = asyncio.current_task()
        assert lane is not None
        try:
            while self._waiting:
                await self._deliver_next()
                # A few may be joined by others within a moment; a large batch needs no company.
                if 0 < len(self._waiting) < _WORTH_A_LANE:
                    await asyncio.sleep(_GATHER_SECONDS)
        finally:
            # Here and not in a done callback, which runs later: the receiver of an answer may submit its next
            # completion at once, and must not rely on a lane that has stopped looking.
            self._lanes.discard(lane)

    async def _deliver_next(self) -> None:
        batch = self._next_batch()
        try:
            await self._deliver(batch)
        finally:
            # Also after a cancellation: each of these answers has a waiter.
            for _, answer in batch:
                _give_up(answer)

    def _next_batch(self) -> list[tuple[bytes, AnswerFuture]]:
        batch: list[tuple[bytes, AnswerFuture]] = []
        size = 0
        while self._waiting and len(batch) < MAX_BATCH:
            size += len(self._waiting[0][0])
            # The first always goes, however large: it would hold up all others for ever.
            if batch and size > _MAX_BYTES:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _deliver(self, batch: Sequence[tuple[bytes, AnswerFuture]]) -> None:
        try:
            sent = await self._send([body for body, _ in batch])
        except TracelakeError as error:
            if len(batch) == 1:
                sent = [error]
            else:
                for each in batch:
                    await self._deliver([each])
                return
        for (_, answer), outcome in zip(batch, sent, strict=True):
            # Its waiter may have been cancelled.
            if answer.done():
                continue
            if isinstance(outcome, CompleteResponse):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)


def _give_up(answer: AnswerFuture) -> None:
    if not answer.done():
        answer.set_exception(Unavailable("Closed", _CLOSED))
