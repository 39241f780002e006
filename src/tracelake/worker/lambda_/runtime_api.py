"""The AWS Lambda Runtime API of one function environment.

    GET  /2018-06-01/runtime/invocation/next            waits until there is one
    POST /2018-06-01/runtime/invocation/{id}/response   the function's value
    POST /2018-06-01/runtime/invocation/{id}/error      the function raised
    POST /2018-06-01/runtime/init/error                 it couldn't even be loaded

One invocation at a time. The caller is untrusted code: an answer for another id, a second ``next`` before the
answer, or an answer that is too large ends the invocation under way, and the environment isn't used again. There
are no sockets here: the sandbox's gateway parses the requests.

``AttemptToken`` is the one token that a function may use: the one it was invoked with, or one that a heartbeat
renewed. A warm environment has seen other attempts' tokens, and functions may pass tokens to each other, so the
gateway checks it before anything is forwarded. The Dispatcher decides whether a token is genuine: one that is
signed and of this very task and attempt can do no more than the function's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from uuid import UUID, uuid4

from tracelake.contracts.headers import (
    RUNTIME_ARN_HEADER,
    RUNTIME_DEADLINE_HEADER,
    RUNTIME_REQUEST_ID_HEADER,
    RUNTIME_TRACE_HEADER,
)
from tracelake.sandbox.gateway import RUNTIME_PREFIX
from tracelake.serving.small_http import ServedRequest, ServedResponse
from tracelake.tokens.capability import ClaimedAttempt, claimed_attempt

MAX_VALUE_BYTES = 6 * 1024 * 1024
_MAX_ERROR_TEXT = 4000


@dataclass(frozen=True, slots=True)
class RuntimeCall:
    """One invocation as the runtime sees it. ``deadline_ms`` is when the function will be killed, by the wall
    clock, as on AWS; ``token`` is the one that it may use meanwhile."""

    event: bytes = field(repr=False)
    deadline_ms: int
    arn: str
    trace_id: str
    token: AttemptToken | None = None
    request_id: str = field(default_factory=lambda: str(uuid4()))


@dataclass(frozen=True, slots=True)
class Returned:
    value: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Raised:
    """The function's own error, as its runtime reports it."""

    error_type: str
    message: str
    at_start: bool = False


@dataclass(frozen=True, slots=True)
class Broken:
    """The environment ended or broke the protocol. Unless ``started``, the function never got its event."""

    reason: str
    started: bool = True
    retryable: bool = True


Result = Returned | Raised | Broken


class RuntimeApi:
    def __init__(self) -> None:
        self._waiting: RuntimeCall | None = None
        self._running: RuntimeCall | None = None
        self._offered = asyncio.Event()
        self._result: asyncio.Future[Result] | None = None
        self._asks = 0
        self._asked = asyncio.Event()
        self._ended: Broken | Raised | None = None
        self.healthy = True
        self.on_ask: Callable[[], None] | None = None

    @property
    def busy(self) -> bool:
        """The function has its event and hasn't answered yet."""
        return self._running is not None

    @property
    def token(self) -> AttemptToken | None:
        """The token that the function with the current event may use."""
        return None if self._running is None else self._running.token

    async def invoke(self, invocation: RuntimeCall) -> Result:
        """Give the runtime this invocation as its next one, and wait for the result."""
        if self._ended is not None:
            return self._ended
        self._waiting = invocation
        self._result = asyncio.get_running_loop().create_future()
        self._offered.set()
        try:
            return await self._result
        finally:
            self._waiting = self._running = self._result = None
            self._offered.clear()

    async def until_asked(self, seconds: float) -> bool:
        """Whether, within that time, the runtime waits for its next invocation."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._asked.wait()
        return self.healthy and self._asked.is_set()

    def end(self, reason: str) -> None:
        """End the environment, and with it the invocation under way."""
        self.healthy = False
        self._finish(Broken(reason, started=self._running is not None))
        # An error of its start says more than the end that follows.
        self._ended = self._ended or Broken(reason, started=False)
        self._offered.set()
        self._asked.set()

    async def handle(self, request: ServedRequest) -> ServedResponse:
        body = request.body
        match request.method, request.path.removeprefix(RUNTIME_PREFIX).split("/"):
            case "GET", ["invocation", "next"]:
                return await self._next()
            case "POST", ["invocation", request_id, "response"]:
                return self._respond(request_id, Returned(body))
            case "POST", ["invocation", request_id, "error"]:
                return self._respond(request_id, _error(body))
            case "POST", ["init", "error"]:
                return self._failed_to_start(_error(body, at_start=True))
            case _:
                return _refusal(
                    404, "NotFound", f"the Runtime API has no {request.method} {request.path[:200]}"
                )

    async def _next(self) -> ServedResponse:
        if self._running is not None:
            self._violate("it asked for the next invocation before it had answered this one")
        if self._asks:
            return _refusal(
                403, "InvalidStateTransition", "another request is already waiting for the next invocation"
            )
        if self.on_ask is not None:
            self.on_ask()
        self._asks += 1
        self._asked.set()
        try:
            await self._offered.wait()
        finally:
            self._asks -= 1
            self._asked.clear()
        invocation, self._waiting = self._waiting, None
        if invocation is None or not self.healthy:
            return _refusal(403, "InvalidStateTransition", "this environment is shutting down")
        self._running = invocation
        self._offered.clear()
        return ServedResponse(
            200,
            {
                "Content-Type": "application/json",
                RUNTIME_REQUEST_ID_HEADER: invocation.request_id,
                RUNTIME_DEADLINE_HEADER: str(invocation.deadline_ms),
                RUNTIME_ARN_HEADER: invocation.arn,
                RUNTIME_TRACE_HEADER: invocation.trace_id,
            },
            invocation.event,
        )

    def _respond(self, request_id: str, result: Result) -> ServedResponse:
        if self._running is None or request_id != self._running.request_id:
            return _refusal(400, "InvalidRequestID", "there is no such invocation")
        if isinstance(result, Returned) and len(result.value) > MAX_VALUE_BYTES:
            self._violate(f"it returned {len(result.value)} bytes; {MAX_VALUE_BYTES} are the limit", False)
            return _refusal(413, "RequestEntityTooLarge", f"a value has at most {MAX_VALUE_BYTES} bytes")
        # Before the result: from here on the attempt's token isn't accepted any more.
        self._running = None
        self._finish(result)
        return _accepted()

    def _failed_to_start(self, error: Raised) -> ServedResponse:
        """Accepted once per environment, and only before its first invocation; the environment then ends by
        itself."""
        if self._running is not None or self._ended is not None:
            return _refusal(403, "InvalidStateTransition", "initialization has already ended")
        self.healthy = False
        self._ended = error
        self._finish(error)
        return _accepted()

    def _violate(self, reason: str, retryable: bool = True) -> None:
        self.healthy = False
        self._finish(Broken(reason, retryable=retryable))

    def _finish(self, result: Result) -> None:
        if self._result is not None and not self._result.done():
            self._result.set_result(result)


def _accepted() -> ServedResponse:
    return ServedResponse(202, {"Content-Type": "application/json"}, b'{"status":"OK"}')


def _refusal(status: int, kind: str, message: str) -> ServedResponse:
    body = json.dumps({"errorType": kind, "errorMessage": message}).encode()
    return ServedResponse(status, {"Content-Type": "application/json"}, body)


def _error(body: bytes, *, at_start: bool = False) -> Raised:
    """The error that the runtime reported, in its own words if they can be decoded."""
    try:
        report = json.loads(body)
        kind, message = str(report["errorType"]), str(report.get("errorMessage") or "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        kind, message = "Error", body[:_MAX_ERROR_TEXT].decode("utf-8", "replace")
    return Raised(kind[:200], message[:_MAX_ERROR_TEXT], at_start)


@dataclass(frozen=True, slots=True)
class AttemptToken:
    token: str = field(repr=False)
    task_id: UUID
    attempt: int

    def is_own(self, presented: str) -> bool:
        # As bytes: compare_digest refuses text that isn't ASCII.
        if hmac.compare_digest(presented.encode(), self.token.encode()):
            return True
        return claimed_attempt(presented) == ClaimedAttempt(self.task_id, self.attempt)
