"""The HTTP call that passes an attempt to an invoker, and what is certain after it.

An attempt is passed on at most once, so the question is whether the invoker may have taken it. It can't have before
it has the whole request, so the head goes first (``Expect: 100-continue``) and the body only when the invoker asks
for it: until then the attempt was not delivered, no matter what breaks. Connections aren't reused: on one that the
other side was about to close, a call that was never read would look like one whose answer got lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

import h11
import msgspec

from tracelake.contracts.bundles import INVOKE_PATH, Invocation, function_of
from tracelake.contracts.headers import INVOCATION_TYPE_EVENT, INVOCATION_TYPE_HEADER, WORKER_HEADER
from tracelake.domain.errors import OverQuota, TracelakeError, Unauthenticated, Unavailable
from tracelake.serving import local_sockets

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 20.0
UNASKED_SECONDS = 1.0
"""Time to wait for ``100 Continue`` from an invoker at a URL: not every HTTP server sends it."""
_DETAIL = 300
_MAX_ANSWER = 64 * 1024
_encode = msgspec.json.Encoder(uuid_format="canonical").encode


class InvokeOutcome(StrEnum):
    """``ACCEPTED``: the invoker has the attempt. ``FULL``: it has no slot right now. ``AWAY``: it didn't take this
    attempt, and wouldn't take the next. ``REJECTED``: it refused this one. ``UNKNOWN``: it may have taken it."""

    ACCEPTED = "accepted"
    FULL = "full"
    AWAY = "away"
    REJECTED = "rejected"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class InvokeResult:
    outcome: InvokeOutcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str


class InvokerClient:
    """``tokens`` are the valid worker tokens, the preferred one first: during a rotation an invoker may know
    another one than the preferred."""

    def __init__(
        self, tokens: Callable[[], Sequence[str]], *, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        self._tokens = tokens
        self._seconds = answer_seconds

    async def invoke(self, url: str, invocation: Invocation) -> InvokeResult:
        target = INVOKE_PATH.format(function=function_of(invocation))
        body = _encode(invocation)
        try:
            tokens = self._tokens()
        except (OSError, TracelakeError) as error:
            return InvokeResult(InvokeOutcome.AWAY, f"cannot read a worker token for {url}: {error}")
        for token in tokens:
            call = _Call(url, target, token, body)
            try:
                answer = await call.make(self._seconds)
            except asyncio.CancelledError:
                # The caller counts a cancelled call as unknown. This
                # one certainly wasn't taken, and costs no attempt.
                if call.delivered:
                    raise
                return InvokeResult(
                    InvokeOutcome.AWAY, "the Dispatcher was stopped before the invoker asked for it"
                )
            except (OSError, TimeoutError, ValueError, h11.ProtocolError, EOFError) as error:
                if call.delivered:
                    return InvokeResult(
                        InvokeOutcome.UNKNOWN, f"the invoker at {url} didn't answer: {_text(error)}"
                    )
                return InvokeResult(
                    InvokeOutcome.AWAY, f"the invoker at {url} can't be reached: {_text(error)}"
                )
            # A 401 is a refusal: the attempt wasn't taken, so trying the next token is no second delivery.
            if answer.status != Unauthenticated.status:
                return _read(url, answer)
        return InvokeResult(
            InvokeOutcome.AWAY, f"the invoker at {url} rejects all worker tokens of this Dispatcher"
        )


class _Call:
    """One request. ``delivered`` is set before the first byte is sent that could complete it."""

    def __init__(self, url: str, target: str, token: str, body: bytes) -> None:
        self.delivered = False
        self._url = url
        self._body = body
        self._http = h11.Connection(h11.CLIENT)
        self._head = h11.Request(
            method="POST",
            target=urlsplit(url).path.rstrip("/") + target if not _is_private(url) else target,
            headers=[
                ("Host", "invoker" if _is_private(url) else urlsplit(url).netloc),
                (WORKER_HEADER, token),
                (INVOCATION_TYPE_HEADER, INVOCATION_TYPE_EVENT),
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(body))),
                ("Expect", "100-continue"),
                ("Connection", "close"),
            ],
        )

    async def make(self, seconds: float) -> _Answer:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await self._connect()
        try:
            async with asyncio.timeout(seconds):
                writer.write(self._http.send(self._head) or b"")
                early = await self._until_asked(reader)
                if early is not None:
                    return await self._rest(reader, early)
                # Before the write: a write that fails may still have reached the invoker.
                self.delivered = True
                writer.write(self._http.send(h11.Data(data=self._body)) or b"")
                writer.write(self._http.send(h11.EndOfMessage()) or b"")
                # An invoker that has answered needn't have read all of it.
                with suppress(ConnectionError):
                    await writer.drain()
                # A server may still send the 100 Continue that we gave up waiting for.
                while not isinstance(event := await self._next(reader), h11.Response):
                    pass
                return await self._rest(reader, event)
        finally:
            # A close would first flush a body that the invoker may never read.
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if _is_private(self._url):
            return await local_sockets.connect_privately(self._url)
        parts = urlsplit(self._url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return await asyncio.open_connection(parts.hostname or "", port, ssl=secure or None)

    async def _until_asked(self, reader: asyncio.StreamReader) -> h11.Response | None:
        """None when the body is to be sent; an answer when the invoker doesn't want it."""
        patience = None if _is_private(self._url) else UNASKED_SECONDS
        try:
            async with asyncio.timeout(patience):
                event = await self._next(reader)
        except TimeoutError:
            # An invoker on our own socket always asks. Until it
            # does it has no body, and can't have the attempt.
            if patience is None:
                raise
            return None
        return event if isinstance(event, h11.Response) else None

    async def _next(self, reader: asyncio.StreamReader) -> h11.Response | h11.InformationalResponse:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await reader.read(_MAX_ANSWER))
            elif isinstance(event, h11.Response | h11.InformationalResponse):
                return event
            else:
                raise EOFError("the connection was closed")

    async def _rest(self, reader: asyncio.StreamReader, answer: h11.Response) -> _Answer:
        """Only the status counts; the text explains it, so a broken rest is ignored."""
        text = b""
        with suppress(OSError, TimeoutError, h11.ProtocolError):
            async with asyncio.timeout(CONNECT_SECONDS):
                while len(text) < _MAX_ANSWER:
                    event = self._http.next_event()
                    if event is h11.NEED_DATA:
                        self._http.receive_data(await reader.read(_MAX_ANSWER))
                    elif isinstance(event, h11.Data):
                        text += event.data
                    else:
                        break
        return _Answer(answer.status_code, text.decode("utf-8", "replace"))


def _is_private(url: str) -> bool:
    return url.startswith(local_sockets.SCHEME)


def _read(url: str, answer: _Answer) -> InvokeResult:
    detail = f"the invoker at {url} answered {answer.status}: {answer.text[:_DETAIL]}"
    match answer.status:
        case 200 | 202:
            return InvokeResult(InvokeOutcome.ACCEPTED)
        case OverQuota.status:
            return InvokeResult(InvokeOutcome.FULL, detail)
        case Unavailable.status:
            return InvokeResult(InvokeOutcome.AWAY, detail)
        case status if 400 <= status < 500:
            return InvokeResult(InvokeOutcome.REJECTED, detail)
        # A 500, or a proxy's 502, doesn't say whether the invoker has the attempt.
        case _:
            return InvokeResult(InvokeOutcome.UNKNOWN, detail)


def _text(error: Exception) -> str:
    return str(error)[:_DETAIL] or type(error).__name__
