"""One connection to a gateway: requests of untrusted code that can be read in only one way.

A request is parsed and written anew, never copied: only a plain path passes (no escapes, no dots, no empty parts,
no other host), only listed headers are forwarded, and none of those may occur twice. So the servers behind the
gateway never see bytes that the sandbox chose outside of a value.

``serving.small_http`` reads and answers them within limits. A body is limited by itself and, together with all
other bodies of the same sandbox, by a ``Budget``. The caller can't be authenticated by the head, so a request is
read whole before it is judged. While an answer is made at most one more piece is read, so that a closed connection
is noticed and a caller that goes on sending isn't stored.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine

import h11

from tracelake.contracts.headers import (
    AUTHORIZATION_HEADER,
    CAPABILITY_HEADER,
    QUERY_ID_HEADER,
    ROW_COUNT_HEADER,
    TRUNCATED_HEADER,
    WORKER_HEADER,
)
from tracelake.contracts.problem import problem
from tracelake.domain.errors import BadRequest, MethodNotAllowed, NotFound, TooLarge, TracelakeError
from tracelake.serving.small_http import (
    PIECE,
    ConnectionLimits,
    HungUp,
    ServedConnection,
    ServedRequest,
    ServedResponse,
)

METHODS = frozenset({"GET", "POST"})
FORWARDED_HEADERS = ("accept", "content-type", CAPABILITY_HEADER.lower())
RETURNED_HEADERS = (
    "content-type",
    "retry-after",
    QUERY_ID_HEADER.lower(),
    ROW_COUNT_HEADER.lower(),
    TRUNCATED_HEADER.lower(),
)
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
_NEVER_FORWARDED = frozenset({AUTHORIZATION_HEADER.lower(), "cookie", WORKER_HEADER.lower()})
# No part begins with a dot, so neither `.` nor `..` passes.
_PATH = re.compile(r"(?:/[A-Za-z0-9_~$-][A-Za-z0-9._~$-]*)+")
_QUERY = re.compile(r"[A-Za-z0-9._~!$'()*+,;=:@/?&%-]*")
PARTING_SECONDS = 2.0
HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
"""Maximum time without a further byte."""
IDLE_SECONDS = 600.0


def parse(event: h11.Request, body: bytes) -> ServedRequest:
    if event.http_version not in (b"1.0", b"1.1"):
        raise BadRequest("BadRequest", "only HTTP/1.1 is spoken here")
    framing = {name for name, _ in event.headers} & {b"content-length", b"transfer-encoding"}
    # Two servers would see different ends, and the rest would be smuggled in as another request.
    if len(framing) == 2:
        raise BadRequest("BadRequest", "a request has a length or is sent in chunks, not both")
    method = event.method.decode("ascii")
    if method not in METHODS:
        raise MethodNotAllowed("MethodNotAllowed", "only GET and POST are allowed", METHODS)
    path, _, query = event.target.decode("latin-1").partition("?")
    if _PATH.fullmatch(path) is None or _QUERY.fullmatch(query) is None:
        raise NotFound("NotFound", "the gateway has no such path")
    return ServedRequest(method, path, query, _headers(event), body)


def _headers(event: h11.Request) -> dict[str, str]:
    # Headers that `Connection` names are meant for this hop alone.
    named_hops = {
        name.strip().lower()
        for key, value in event.headers
        if key == b"connection"
        for name in value.decode("latin-1").split(",")
    }
    headers: dict[str, str] = {}
    for key, value in event.headers:
        name = key.decode("ascii")
        if name in _HOP_BY_HOP or name in _NEVER_FORWARDED or name in named_hops:
            continue
        if name in headers:
            # Which of two tokens counts must not depend on who reads them.
            if name in FORWARDED_HEADERS:
                raise BadRequest("BadRequest", f"{name} is given twice")
            continue
        headers[name] = value.decode("latin-1")
    return headers


class Budget:
    """Bytes that one sandbox may have in the worker's memory at a time."""

    def __init__(self, body_bytes: int, total_bytes: int) -> None:
        self.body_bytes = body_bytes
        self._left = total_bytes

    def take(self, already: int, more: int) -> None:
        if already + more > self.body_bytes or more > self._left:
            raise TooLarge(
                "TooLarge", f"a request's body may have {self.body_bytes} bytes, all together some more"
            )
        self._left -= more

    def give_back(self, amount: int) -> None:
        self._left += amount


class GatewayConnection(ServedConnection):
    failure = problem(TracelakeError.status, "InternalError", "the gateway failed; try again later")

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        budget: Budget,
        head_bytes: int,
        answer: Callable[[ServedRequest, GatewayConnection], Coroutine[None, None, None]],
    ) -> None:
        limits = ConnectionLimits(
            head_bytes=head_bytes,
            first_seconds=IDLE_SECONDS,
            idle_seconds=IDLE_SECONDS,
            head_seconds=HEAD_SECONDS,
            pause_seconds=BODY_SECONDS,
            parting_seconds=PARTING_SECONDS,
        )
        super().__init__(reader, writer, limits)
        self._budget = budget
        self._held = 0
        self._answer = answer

    def check_head(self, head: h11.Request) -> None:
        """Refuses nothing: ``parse`` judges whole requests, so that a refusal needn't end the connection."""

    def take_piece(self, already: int, more: int) -> None:
        self._budget.take(already, more)
        self._held += more

    async def answer(self, head: h11.Request, body: bytes) -> None:
        await self._answer(parse(head, body), self)

    def over(self) -> None:
        self._budget.give_back(self._held)
        self._held = 0

    async def while_connected(self, answer: Coroutine[None, None, ServedResponse]) -> ServedResponse:
        """The answer; it is cancelled if the caller closes the connection first."""
        making = asyncio.ensure_future(answer)
        listening = asyncio.ensure_future(self._reader.read(PIECE))
        try:
            await asyncio.wait({making, listening}, return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                piece = listening.result()
                if piece:
                    self._http.receive_data(piece)
                elif not making.done():
                    raise HungUp
            return await making
        finally:
            await _cancel(making)
            await _cancel(listening)


async def _cancel(work: asyncio.Future[ServedResponse] | asyncio.Future[bytes]) -> None:
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        # Retrieved, or asyncio would log it.
        work.exception()
