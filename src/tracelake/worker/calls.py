"""What operators ask for over their channel, done by the wrapper under the attempt's fence.

A refusal goes back to the operator as a problem; a fence that no longer holds also ends the attempt, without
waiting for the next heartbeat to say so, and so does an input that was invalidated: a reorg is nobody's failure,
and the attempt is handed back to begin again at once. Calls wait out an outage of the Dispatcher for as long as
the attempt may run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
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
from tracelake.contracts.operator_protocol import (
    MAX_FRAME,
    Action,
    Call,
    CommitRows,
    EmitEvents,
    ListFiles,
    Problem,
    PublishRecords,
    Query,
    Reply,
    SaveState,
)
from tracelake.domain.errors import Conflict, Invalid, TooLarge, TracelakeError
from tracelake.hot.tickets import Ticket
from tracelake.worker.data_commit import Say
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.held_task import HeldTask, Stop
from tracelake.worker.query_client import QueryClient

_MAX_EVENT_BYTES = 768 * 1024
"""Below the Dispatcher's limit for a body, with room for what stands around the events."""
_ENDS = {
    "Canceled": Stop.CANCELED,
    "StaleAttempt": Stop.SUPERSEDED,
    "StaleLease": Stop.SUPERSEDED,
    "InputChanged": Stop.OUTDATED,
}


Reveal = Callable[[Sequence[InputFile]], Awaitable[None]]


class Committer(Protocol):
    """Commits staged rows to the data database; see ``data_commit``."""

    async def begin(self, task: TaskPayload, say: Say) -> None: ...

    async def admit(self, task: TaskPayload) -> Ticket | None: ...

    def dismiss(self, ticket: Ticket) -> None: ...

    async def commit(self, task: TaskPayload, wish: CommitRows, say: Say) -> list[OutputIn]: ...


class Calls:
    """The calls of one attempt; ``until`` is when its time is over, on the event loop's clock."""

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
        """Shows the operator the files that it is told of; settable."""

    async def answer(self, call: Call) -> Reply:
        try:
            return Reply(call_id=call.call_id, value=await self._do(call.action))
        except TracelakeError as error:
            if isinstance(error, Conflict) and error.reason in _ENDS:
                self._held.log.warning("call_refused", reason=error.reason)
                self._held.stop(_ENDS[error.reason])
            return Reply(call_id=call.call_id, problem=Problem(error.status, error.reason, error.message))
        except Exception as error:
            self._held.log.exception("call_failed", call=type(call.action).__name__)
            told = f"{type(error).__name__} in the worker: {error}"
            return Reply(call_id=call.call_id, problem=Problem(500, "Internal", told))

    async def begin(self) -> None:
        """Before the operator runs: the fence of its Postgres outputs."""
        if self._committer is not None:
            await self._committer.begin(self._held.payload, self._say_what_was_left)

    async def say(self, events: Sequence[EventIn]) -> None:
        """Returns once the Dispatcher has accepted all of them. One that comes of an older revision than its
        scope has now doesn't count: the attempt doesn't know what others have said of its outputs, and is handed
        back to begin again with that."""
        if any(became.state == "old_revision" for became in await self._tell(events)):
            self._held.log.warning("outputs_invalidated_by_others")
            self._held.stop(Stop.OUTDATED)

    async def _say_what_was_left(self, events: Sequence[EventIn]) -> None:
        """By an earlier attempt. What that one had taken back is news to the claim, and no reason to begin anew."""
        for event, became in zip(events, await self._tell(events), strict=True):
            if event.invalidate is not None:
                self._held.payload = _raised(self._held.payload, event.dataset_version, became.revision)

    async def _tell(self, events: Sequence[EventIn]) -> list[EventOut]:
        """What became of each."""
        became: list[EventOut] = []
        for chunk in chunks(events):
            request = EventsRequest(self._held.task_id, self._held.attempt, chunk, self._held.lease_token)
            became += (await self._client.events(request, until=self._until)).events
        return became

    async def _do(self, action: Action) -> Any:
        match action:
            case EmitEvents():
                await self.say(action.events)
                return {"accepted": len(action.events)}
            case PublishRecords():
                return await self._publish(action)
            case Query():
                if self._queries is None:
                    raise Invalid(
                        "NotServed", "this worker knows of no Query Service: set TRACELAKE_QUERY_URL for it"
                    )
                return await self._queries.ask(action.request, self._held.token, until=self._until)
            case SaveState():
                held = self._held
                request = TaskStateRequest(held.task_id, held.attempt, held.lease_token, action.state)
                await self._client.task_state(request, until=self._until)
                return None
            case ListFiles():
                return await self._list_files(action.input_index)
            case CommitRows():
                if self._committer is None:
                    raise Invalid(
                        "NoDataDatabase",
                        "this worker has no data database to commit to: set TRACELAKE_DATA_DSN for it",
                    )
                return msgspec.to_builtins(await self._committer.commit(self._held.payload, action, self.say))
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

    async def _list_files(self, input_index: int) -> Any:
        files: list[InputFile] = []
        after: str | None = None
        size = 0
        while True:
            page = await self._client.task_inputs(
                self._held.task_id, self._held.attempt, input_index, after, until=self._until
            )
            files += page.files
            size += len(msgspec.json.encode(page.files))
            if size > MAX_FRAME - 1024:
                raise TooLarge(
                    "TooManyFiles", f"input {input_index} has over {len(files)} files in its scope"
                )
            if page.next is None:
                await self.reveal(files)
                return msgspec.to_builtins(files)
            after = page.next


async def _reveal_nothing(files: Sequence[InputFile]) -> None:
    """For who sees everything."""


def _raised(task: TaskPayload, version: UUID | None, revision: int) -> TaskPayload:
    """The payload with an output's new revision, if that is the very next one: otherwise others have invalidated
    something too, and the attempt must not pass for one that knows of it."""
    outputs = [
        msgspec.structs.replace(output, revision=revision)
        if (output.dataset_version, output.revision + 1) == (version, revision)
        else output
        for output in task.outputs
    ]
    return msgspec.structs.replace(task, outputs=outputs)


def chunks(events: Sequence[EventIn]) -> list[list[EventIn]]:
    """As many at a time as one request may carry, in their order."""
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
