"""Operators' calls over their channel, done by the wrapper under the attempt's fence.

A refusal goes back to the operator as a problem. A stale fence also ends the attempt, without waiting for the
next heartbeat. So does an input that was invalidated: a reorg is no failure, so the attempt is released and
begins again at once. Calls wait out an outage of the Dispatcher for as long as the attempt may run.

Operators reach the Query Service through the wrapper too, with the attempt's own token. A query changes nothing,
so it is repeated like every other call until it is answered or the attempt's time is over.
"""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, assert_never
from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import (
    MAX_EVENTS,
    EventIn,
    EventOut,
    EventsRequest,
    InputFile,
    OutputIn,
    TaskPayload,
    TaskStateRequest,
)
from tracelake.contracts.headers import CAPABILITY_HEADER
from tracelake.contracts.operator_protocol import (
    MAX_FRAME,
    Action,
    Call,
    CallProblem,
    CommitRows,
    EmitEvents,
    ListFiles,
    PublishRecords,
    Query,
    ReadSourceBody,
    Reply,
    SaveState,
)
from tracelake.contracts.query_api import TASK_QUERY_PATH, QueryRequest
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Conflict, Invalid, TooLarge, TracelakeError, Unavailable
from tracelake.hot.tickets import Ticket
from tracelake.leases.dispatcher_client import DispatcherClient, refusal
from tracelake.leases.held_task import HeldTask, Stop
from tracelake.leases.http_link import HttpResponse, NoAnswer, open_link
from tracelake.leases.until_answered import is_server_fault, until_answered
from tracelake.settings import Secret
from tracelake.worker.data_commit import SendEvents

_MAX_EVENT_BYTES = 768 * 1024
"""Below the Dispatcher's limit for a body, with room for the JSON around the events."""
_ENDS = {
    "Canceled": Stop.CANCELED,
    "StaleAttempt": Stop.SUPERSEDED,
    "StaleLease": Stop.SUPERSEDED,
    "InputChanged": Stop.OUTDATED,
}
Reveal = Callable[[Sequence[InputFile]], Awaitable[None]]
_BACKOFF = Backoff(first=0.05, longest=2.0)
_TRY_SECONDS = 300.0
_ROOM = 1024
"""Bytes of a frame that are reserved for the JSON around an answer."""


class Committer(Protocol):
    """Commits staged rows to the data database; see ``data_commit``."""

    async def begin(self, task: TaskPayload, send: SendEvents) -> None: ...

    async def admit(self, task: TaskPayload) -> Ticket | None: ...

    def dismiss(self, ticket: Ticket) -> None: ...

    async def commit(self, task: TaskPayload, wish: CommitRows, send: SendEvents) -> list[OutputIn]: ...


class Calls:
    """The calls of one attempt; ``until`` is the end of its time on the event loop's clock."""

    def __init__(
        self,
        held: HeldTask,
        client: DispatcherClient,
        committer: Committer | None,
        until: float | None,
        queries: QueryClient | None = None,
    ) -> None:
        self._held = held
        self._client = client
        self._committer = committer
        self._until = until
        self._queries = queries
        self.reveal: Reveal = _reveal_nothing
        """Makes files that the operator was given visible to it; settable."""

    async def answer(self, call: Call) -> Reply:
        try:
            return Reply(call_id=call.call_id, value=await self._do(call.action))
        except TracelakeError as error:
            if isinstance(error, Conflict) and error.reason in _ENDS:
                self._held.log.warning("call_refused", reason=error.reason)
                self._held.stop(_ENDS[error.reason])
            return Reply(call_id=call.call_id, problem=CallProblem(error.status, error.reason, error.message))
        except Exception as error:
            self._held.log.exception("call_failed", call=type(call.action).__name__)
            message = f"{type(error).__name__} in the worker: {error}"
            return Reply(call_id=call.call_id, problem=CallProblem(500, "Internal", message))

    async def begin(self) -> None:
        """Write the fence of the Postgres outputs, before the operator runs."""
        if self._committer is not None:
            await self._committer.begin(self._held.payload, self._send_pending)

    async def send(self, events: Sequence[EventIn]) -> None:
        """Return once the Dispatcher has accepted all events.

        An event from an older revision than its scope has now doesn't count: the attempt doesn't know what was
        invalidated in its outputs meanwhile, so it is released to begin again with the current revisions.
        """
        if any(became.state == "old_revision" for became in await self._send_events(events)):
            self._held.log.warning("outputs_invalidated_by_others")
            self._held.stop(Stop.OUTDATED)

    async def _send_pending(self, events: Sequence[EventIn]) -> None:
        """Send pending events of an earlier attempt. One that was invalidated since is already known to this
        attempt's claim and no reason to begin again."""
        for event, became in zip(events, await self._send_events(events), strict=True):
            if event.invalidate is not None:
                self._held.payload = _raised(self._held.payload, event.dataset_version, became.revision)

    async def _send_events(self, events: Sequence[EventIn]) -> list[EventOut]:
        """Send events; the result says for each whether it counted."""
        became: list[EventOut] = []
        for chunk in chunks(events):
            request = EventsRequest(self._held.task_id, self._held.attempt, chunk, self._held.lease_token)
            answer = await self._client.events(request, until=self._until)
            became += answer.events
            # A source that produces too much stops at once; only a heartbeat lets it go on.
            if answer.pause:
                self._held.pause(True)
        return became

    async def _do(self, action: Action) -> Any:
        match action:
            case EmitEvents():
                await self.send(action.events)
                return {"accepted": len(action.events)}
            case PublishRecords():
                return await self._publish(action)
            case Query():
                if self._queries is None:
                    raise Invalid(
                        "NotServed", "no Query Service is configured for this worker (TRACELAKE_QUERY_URL)"
                    )
                return await self._queries.ask(action.request, self._held.token, until=self._until)
            case SaveState():
                held = self._held
                request = TaskStateRequest(held.task_id, held.attempt, held.lease_token, action.state)
                await self._client.task_state(request, until=self._until)
                return None
            case ListFiles():
                return await self._list_files(action.input_index, action.margin)
            case ReadSourceBody():
                body = await self._client.source_body(self._held.task_id, until=self._until)
                return base64.b64encode(body).decode()
            case CommitRows():
                if self._committer is None:
                    raise Invalid(
                        "NoDataDatabase",
                        "this worker has no data database to commit to: set TRACELAKE_DATA_WRITE_DSN for it",
                    )
                return msgspec.to_builtins(
                    await self._committer.commit(self._held.payload, action, self.send)
                )
            case _:
                assert_never(action)

    async def _publish(self, action: PublishRecords) -> Any:
        body: dict[str, Any] = {
            "task_id": self._held.task_id,
            "attempt": self._held.attempt,
            "lease_token": self._held.lease_token,
            "dataset": action.dataset,
            "records": action.records,
        }
        if action.schema_hash is not None:
            body["schema_hash"] = action.schema_hash
        return await self._client.publish(body, self._held.token, until=self._until)

    async def _list_files(self, input_index: int, margin: int) -> Any:
        files: list[InputFile] = []
        after: str | None = None
        size = 0
        while True:
            page = await self._client.task_inputs(
                self._held.task_id, self._held.attempt, input_index, after, margin=margin, until=self._until
            )
            files += page.files
            size += len(msgspec.json.encode(page.files))
            if size > MAX_FRAME - 1024:
                raise TooLarge(
                    "TooManyFiles", f"input {input_index} has over {len(files)} files in its scope"
                )
            if page.next is None:
                # Before the answer: the operator may open them at once.
                await self.reveal(files)
                return msgspec.to_builtins(files)
            after = page.next


async def _reveal_nothing(files: Sequence[InputFile]) -> None:
    """For operators that see every file anyway."""


def _raised(task: TaskPayload, version: UUID | None, revision: int) -> TaskPayload:
    """The payload with an output's new revision if that is the very next one.

    Otherwise another invalidation came in between, and the attempt must not pass for one that knows of it.
    """
    outputs = [
        msgspec.structs.replace(output, revision=revision)
        if (output.dataset_version, output.revision + 1) == (version, revision)
        else output
        for output in task.outputs
    ]
    return msgspec.structs.replace(task, outputs=outputs)


def chunks(events: Sequence[EventIn]) -> list[list[EventIn]]:
    """The events in order, in batches that fit into one request."""
    found: list[list[EventIn]] = []
    room = 0
    for event in events:
        size = len(msgspec.json.encode(event)) + 1
        if not found or len(found[-1]) == MAX_EVENTS or size > room:
            found.append([])
            room = _MAX_EVENT_BYTES
        found[-1].append(event)
        room -= size
    return found


class QueryClient:
    def __init__(self, query_url: str) -> None:
        self.url = query_url.rstrip("/")
        self._link = open_link(self.url, {"Content-Type": "application/json"})

    async def close(self) -> None:
        await self._link.close()

    async def ask(self, query: QueryRequest, token: Secret, *, until: float | None = None) -> Any:
        """Ask the Query Service; the result is a ``QueryResponse`` as plain JSON types."""
        body = msgspec.json.encode(query)
        answer = await until_answered(
            partial(self._try, body, token), _BACKOFF, until=until, is_outage=is_server_fault
        )
        return _within_a_frame(answer)

    async def _try(self, body: bytes, token: Secret) -> HttpResponse:
        headers = {CAPABILITY_HEADER: token.reveal()}
        try:
            answer = await self._link.request(
                "POST", TASK_QUERY_PATH, body, seconds=_TRY_SECONDS, headers=headers
            )
        except NoAnswer as error:
            raise Unavailable("QueryServiceUnreachable", f"{self.url}: {error}") from None
        if not 200 <= answer.status < 300:
            raise refusal(answer)
        return answer


def _within_a_frame(answer: HttpResponse) -> Any:
    if len(answer.body) > MAX_FRAME - _ROOM:
        raise TooLarge(
            "ResultTooLarge",
            f"the result has {len(answer.body):,} bytes: ask for less, or read the input itself",
        )
    return msgspec.json.decode(answer.body)
