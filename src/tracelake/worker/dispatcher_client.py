"""The Dispatcher as workers see it: every call is repeated until it is answered.

All of these calls may be repeated safely: a claim has its key, a completion is answered again like the first
time, events and records are at-least-once. So an outage, a restart or a lost response is waited out with growing
pauses, and said once in the log. What was refused is raised as the class of the error tree that has its status.

``until`` is a time of the event loop's clock after which a call gives up with ``Unavailable``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode
from uuid import UUID

import msgspec
import structlog

from tracelake.contracts.buffers import BufferSchemaResponse, DeadLetterRequest, DeadLetterResponse
from tracelake.contracts.dispatcher_api import (
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
)
from tracelake.domain import errors
from tracelake.secret import Secret
from tracelake.worker.completions import Completions, Sent
from tracelake.worker.http_link import HttpAnswer, NoAnswer, open_link

UNREACHABLE = "DispatcherUnreachable"
CAPABILITY_HEADER = "X-Trace-Task-Capability"
_WORKER_HEADER = "X-Trace-Worker-Token"
_PAUSES = (0.05, 2.0)
_TRY_SECONDS = 35.0
_CLASSES: Mapping[int, type[errors.TracelakeError]] = {
    kind.status: kind
    for kind in (
        errors.Unauthenticated,
        errors.Forbidden,
        errors.NotFound,
        errors.Conflict,
        errors.TooLarge,
        errors.Invalid,
        errors.BadRequest,
        errors.Unavailable,
    )
}
_OVERLOADED = 429

_log = structlog.get_logger(__name__)
T = TypeVar("T")


class _Refusal(msgspec.Struct, frozen=True):
    reason: str
    detail: str = ""


class DispatcherClient:
    def __init__(self, internal_url: str, worker_token: Secret) -> None:
        self.url = internal_url.rstrip("/")
        self._link = open_link(self.url, {_WORKER_HEADER: worker_token.reveal()})
        self._away = False
        self._completions = Completions(self._send_completions)

    def __repr__(self) -> str:
        return f"DispatcherClient({self.url})"

    async def close(self) -> None:
        await self._completions.close()
        await self._link.close()

    async def check(self) -> None:
        """Returns once the Dispatcher answers and takes the worker's token; ``Unauthenticated`` if it doesn't."""
        try:
            await self._call(
                "GET", f"/internal/task-fetch?task_id={UUID(int=0)}", FetchResponse, forgiving=False
            )
        except errors.NotFound:
            return

    async def claim(
        self, claims: Sequence[ClaimRequest], *, until: float | None = None
    ) -> list[ClaimResponse]:
        """One answer per claim, in order."""
        if len(claims) == 1:
            body = msgspec.json.encode(claims[0])
            return [await self._call("POST", "/internal/task-claim", ClaimResponse, body, until=until)]
        body = msgspec.json.encode({"claims": claims})
        batch = await self._call("POST", "/internal/task-claim-batch", ClaimBatchResponse, body, until=until)
        return batch.claims

    async def fetch(self, task_id: UUID, *, until: float | None = None) -> FetchResponse:
        return await self._call("GET", f"/internal/task-fetch?task_id={task_id}", FetchResponse, until=until)

    async def heartbeat(
        self, beat: HeartbeatRequest, *, until: float | None = None, timeout: float | None = None
    ) -> HeartbeatResponse:
        """``timeout`` bounds each try: a lease can't wait for a connection that has gone silent."""
        body = msgspec.json.encode(beat)
        return await self._call(
            "POST", "/internal/heartbeat", HeartbeatResponse, body, until=until, timeout=timeout
        )

    def complete(self, completion: CompleteRequest) -> asyncio.Future[CompleteResponse]:
        """Completions that come while others are under way travel together; each is answered on its own."""
        return self._completions.submit(completion)

    async def events(self, events: EventsRequest, *, until: float | None = None) -> EventsResponse:
        body = msgspec.json.encode(events)
        return await self._call("POST", "/internal/events", EventsResponse, body, until=until)

    async def task_state(self, request: TaskStateRequest, *, until: float | None = None) -> None:
        await self._call(
            "POST", "/internal/task-state", TaskStateResponse, msgspec.json.encode(request), until=until
        )

    async def task_inputs(
        self, task_id: UUID, attempt: int, input_index: int, after: str | None, *, until: float | None = None
    ) -> TaskInputsResponse:
        query: dict[str, str | int] = {
            "task_id": str(task_id),
            "attempt": attempt,
            "input_index": input_index,
        }
        if after is not None:
            query["after"] = after
        path = f"/internal/task-inputs?{urlencode(query)}"
        return await self._call("GET", path, TaskInputsResponse, until=until)

    async def publish(
        self, body: Mapping[str, Any], capability_token: Secret, *, until: float | None = None
    ) -> Any:
        headers = {CAPABILITY_HEADER: capability_token.reveal()}
        content = msgspec.json.encode(body)
        return await self._call(
            "POST", "/v1/task/buffer-publish", dict[str, Any], content, until=until, headers=headers
        )

    async def buffer_schema(self, dataset_uuid: UUID, *, until: float | None = None) -> BufferSchemaResponse:
        path = f"/internal/buffer-schema?dataset_uuid={dataset_uuid}"
        return await self._call("GET", path, BufferSchemaResponse, until=until)

    async def buffer_dead_letter(
        self, request: DeadLetterRequest, *, until: float | None = None
    ) -> DeadLetterResponse:
        body = msgspec.json.encode(request)
        return await self._call("POST", "/internal/buffer-dead-letter", DeadLetterResponse, body, until=until)

    async def _send_completions(self, bodies: Sequence[bytes]) -> list[Sent]:
        if len(bodies) == 1:
            try:
                return [await self._call("POST", "/internal/task-complete", CompleteResponse, bodies[0])]
            except errors.TracelakeError as refusal:
                return [refusal]
        body = b'{"completions":[' + b",".join(bodies) + b"]}"
        batch = await self._call("POST", "/internal/task-complete-batch", CompleteBatchResponse, body)
        return [
            entry.accepted
            if entry.accepted is not None
            else _error(entry.code, entry.reason or "Refused", entry.detail or "")
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
    ) -> T:
        """``forgiving``: a refused worker token is waited out too, for it may be in the middle of a change."""
        pause, longest = _PAUSES
        while True:
            found = await self._try(method, path, body, timeout, headers)
            if isinstance(found, HttpAnswer):
                if 200 <= found.status < 300:
                    self._is_back()
                    return msgspec.json.decode(found.body, type=kind)
                found = refusal(found)
                waits = isinstance(found, errors.Unavailable) or found.status >= 500
                if not waits and not (forgiving and _is_worker_token(found, headers)):
                    self._is_back()
                    raise found
            self._is_away(path, found)
            wait = pause * random.uniform(0.5, 1.5)
            if until is not None and asyncio.get_running_loop().time() + wait > until:
                raise errors.Unavailable(UNREACHABLE, f"the Dispatcher didn't answer in time: {found}")
            await asyncio.sleep(wait)
            pause = min(longest, pause * 2)

    async def _try(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeout: float | None,
        headers: Mapping[str, str] | None,
    ) -> HttpAnswer | errors.TracelakeError:
        try:
            return await self._link.request(
                method, path, body, seconds=_TRY_SECONDS if timeout is None else timeout, headers=headers
            )
        except NoAnswer as error:
            return errors.Unavailable(UNREACHABLE, f"{self.url}: {error}")

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


def _is_worker_token(error: errors.TracelakeError, headers: Mapping[str, str] | None) -> bool:
    return isinstance(error, errors.Unauthenticated) and headers is None


def refusal(answer: HttpAnswer) -> errors.TracelakeError:
    try:
        said = msgspec.json.decode(answer.body, type=_Refusal)
    except msgspec.DecodeError:
        said = _Refusal("Unexpected", f"status {answer.status} without a problem")
    return _error(answer.status, said.reason, said.detail)


def _error(status: int, reason: str, detail: str) -> errors.TracelakeError:
    if status == _OVERLOADED:
        return errors.Unavailable(reason, detail)
    return _CLASSES.get(status, errors.TracelakeError)(reason, detail)
