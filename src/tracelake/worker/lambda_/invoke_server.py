"""The invoke endpoint, shaped like AWS Lambda's, and the server that it runs on.

Only the Dispatcher may call it, with a worker token. 202: the attempt was taken, now or before. 429: no slot.
503: not now. Other 4xx: the attempt can't be run as it was sent, and wasn't taken.

``serving.small_http`` reads requests and answers them within limits. The caller is authenticated by the head,
before a body is read: until then its connection is the first to go when there is no room
(``serving.http_limits``).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol
from urllib.parse import unquote

import h11
import msgspec
import structlog

from tracelake.contracts.bundles import INVOKE_PATH, Invocation, function_of
from tracelake.contracts.headers import INVOCATION_TYPE_EVENT, INVOCATION_TYPE_HEADER, WORKER_HEADER
from tracelake.contracts.problem import problem
from tracelake.domain import errors
from tracelake.domain.bundles import REFERENCE
from tracelake.domain.operators.catalog import NOOP
from tracelake.serving.http_limits import NO_ROOM, ConnectionLimiter, HttpLimits, Peer, peer_of
from tracelake.serving.local_sockets import uid_of_socket_peer
from tracelake.serving.small_http import (
    ServedConnection,
    ServedRequest,
    ServedResponse,
    SmallHttpServer,
    connection_limits,
    problem_response,
)
from tracelake.settings import Secret

MAX_EVENT_BYTES = 6 * 1024 * 1024
MAX_CONNECTIONS = 256
BODY_SECONDS = 20.0
"""For a whole body."""
GRACE_SECONDS = 2.0
"""For requests that are under way when the server closes."""
LIMITS = HttpLimits(connections=MAX_CONNECTIONS, peer_connections=MAX_CONNECTIONS, body_seconds=BODY_SECONDS)

_log = structlog.get_logger(__name__)

_BEFORE, _AFTER = INVOKE_PATH.split("{function}")
_decoder = msgspec.json.Decoder(Invocation)


class AttemptReceiver(Protocol):
    """The part of an invoker that its endpoint uses."""

    def take(self, task: Invocation, event: bytes) -> None: ...


class InvokeEndpoint:
    def __init__(self, invoker: AttemptReceiver, worker_token: Secret) -> None:
        self._invoker = invoker
        self._token = _digest(worker_token.reveal())

    def admit(self, request: ServedRequest) -> None:
        """Check the head, before any byte of the body is read; raises for a request that is refused."""
        self._check(request)

    async def handle(self, request: ServedRequest) -> ServedResponse:
        function = self._check(request)
        self._invoker.take(_parse(request.body, function), request.body)
        return ServedResponse(202)

    def _check(self, request: ServedRequest) -> str:
        """The function that the path names."""
        presented = request.headers.get(WORKER_HEADER.lower(), "")
        # Digests have one length, so the comparison shows nothing of the token, not even its length.
        if not hmac.compare_digest(_digest(presented), self._token):
            raise errors.Unauthenticated("WorkerTokenInvalid", "the worker token is missing or invalid")
        function = request.path.removeprefix(_BEFORE).removesuffix(_AFTER)
        if request.path != f"{_BEFORE}{function}{_AFTER}" or request.method != "POST":
            raise errors.NotFound("NotFound", "the only call is POST " + INVOKE_PATH)
        if request.headers.get(INVOCATION_TYPE_HEADER.lower()) != INVOCATION_TYPE_EVENT:
            wanted = f"{INVOCATION_TYPE_HEADER} must be {INVOCATION_TYPE_EVENT}"
            raise errors.BadRequest("InvalidInvocationType", wanted)
        return unquote(function)


def _parse(body: bytes, function: str) -> Invocation:
    try:
        task = _decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise errors.BadRequest("InvalidInvocation", f"not an invocation: {error}") from None
    if task.udf is None:
        if task.operator != NOOP:
            raise errors.Invalid(
                "UnknownOperator", f"{task.operator[:200]} is no function, and no udf is given"
            )
    elif not _is_udf(task.udf):
        raise errors.Invalid("InvalidUdf", "udf must be {bundle: 'sha256:…', entrypoint}")
    if function_of(task) != function:
        raise errors.Invalid("WrongFunction", "the path names another function than the payload")
    if task.timeout_seconds < 1 or task.attempt < 1:
        raise errors.Invalid("InvalidInvocation", "timeout_seconds and attempt are at least 1")
    return task


def _is_udf(udf: object) -> bool:
    return (
        isinstance(udf, dict)
        and isinstance(bundle := udf.get("bundle"), str)
        and REFERENCE.match(bundle) is not None
        and isinstance(entrypoint := udf.get("entrypoint"), str)
        and 0 < len(entrypoint) <= 500
        and entrypoint.isprintable()
    )


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


HandleRequest = Callable[[ServedRequest], Awaitable[ServedResponse]]
AdmitRequest = Callable[[ServedRequest], None]


class InvokeConnection(ServedConnection):
    """One caller's connection, as ``ConnectionLimiter`` counts it."""

    failure = problem(errors.TracelakeError.status, "InternalError", "the invoker failed")

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: InvokeServer
    ) -> None:
        super().__init__(reader, writer, connection_limits(server.limits))
        self._server = server
        self._request: ServedRequest | None = None
        self.known = False
        self.uid = uid_of_socket_peer(writer)
        addresses = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
        self.peer = peer_of(*addresses) if self.uid is None else Peer("local", self.uid)

    def evict(self) -> None:
        self.writer.transport.abort()

    async def serve(self) -> None:
        try:
            await super().serve()
        finally:
            self._server.limiter.leave(self)

    def check_head(self, head: h11.Request) -> None:
        path, _, query = head.target.decode("latin-1").partition("?")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
        request = self._request = ServedRequest(head.method.decode("ascii"), path, query, headers)
        if self._server.admit is not None:
            self._server.admit(request)
        self.known = True
        length = headers.get("content-length", "0")
        # Few digits first: int() takes long for, or refuses, thousands of them.
        if len(length) > 18 or int(length) > self._server.max_body:
            raise self._too_large()

    def take_piece(self, already: int, more: int) -> None:
        if already + more > self._server.max_body:
            raise self._too_large()

    def _too_large(self) -> errors.TooLarge:
        return errors.TooLarge("TooLarge", f"a body has at most {self._server.max_body} bytes")

    def over(self) -> None:
        self._request = None

    async def answer(self, head: h11.Request, body: bytes) -> None:
        assert self._request is not None
        request = replace(self._request, body=body)
        try:
            response = await self._server.handler(request)
        except errors.TracelakeError:
            raise
        except Exception:
            _log.exception("request_failed", path=request.path)
            response = problem_response(self.failure)
        await self.send(response)


class InvokeServer:
    """``admit`` gets each request without its body, and may refuse it by raising."""

    def __init__(
        self,
        handler: HandleRequest,
        *,
        max_body: int,
        admit: AdmitRequest | None = None,
        limits: HttpLimits = LIMITS,
    ) -> None:
        self.handler = handler
        self.admit = admit
        self.max_body = max_body
        self.limits = limits
        self.limiter = ConnectionLimiter(limits)
        self._server = SmallHttpServer(self._accept, lambda: _log.exception("connection_failed"))

    async def start(self, listener: socket.socket) -> None:
        """Start serving. A socket file accepts connections of its own user and of root alone."""
        await self._server.listen(listener)

    async def close(self) -> None:
        # An attempt whose delivery ends without an answer may have been taken, and counts as failed.
        await self._server.close(GRACE_SECONDS)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> InvokeConnection | None:
        connection = InvokeConnection(reader, writer, self)
        if connection.uid not in (None, 0, os.getuid()):
            writer.transport.abort()
            return None
        if not self.limiter.enter(connection):
            writer.write(NO_ROOM)
            writer.close()
            return None
        return connection
