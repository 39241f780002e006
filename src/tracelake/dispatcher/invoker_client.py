"""One call to an invoker, and what is certain afterwards.

An attempt is handed over at most once, so what matters is whether the invoker may have taken it. It can't have
before it has the whole request, so the head goes first (``Expect: 100-continue``) and the rest only when the
invoker asks for it: until then, whatever breaks, the attempt was not delivered. Connections aren't reused: on one
that the other side was about to close, a call that was never read would look like one whose answer got lost.
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

from tracelake import private_socket
from tracelake.contracts.bundles import INVOKE_PATH, Invocation, function_of
from tracelake.domain.errors import TracelakeError

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 20.0
UNASKED_SECONDS = 1.0
"""After this an invoker at a URL, which may be anybody's, gets the rest without having asked for it."""
_DETAIL = 300
_MAX_ANSWER = 64 * 1024
_encode = msgspec.json.Encoder(uuid_format="canonical").encode


class Handed(StrEnum):
    """``ACCEPTED``: the invoker has it. ``FULL``: no slot right now. ``AWAY``: it was not taken, and the next one
    wouldn't be. ``REJECTED``: this one was not taken. ``UNKNOWN``: it may have been."""

    ACCEPTED = "accepted"
    FULL = "full"
    AWAY = "away"
    REJECTED = "rejected"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HandOver:
    outcome: Handed
    detail: str = ""


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    text: str


class InvokerClient:
    """``tokens`` are the valid worker tokens, the preferred one first: while they are being rotated, an invoker
    may know another one than we would show."""

    def __init__(
        self, tokens: Callable[[], Sequence[str]], *, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        self._tokens = tokens
        self._seconds = answer_seconds

    async def invoke(self, url: str, invocation: Invocation) -> HandOver:
        target = INVOKE_PATH.format(function=function_of(invocation))
        body = _encode(invocation)
        try:
            tokens = self._tokens()
        except (OSError, TracelakeError) as error:
            return HandOver(Handed.AWAY, f"no worker token can be read to show to {url}: {error}")
        for token in tokens:
            call = _Call(url, target, token, body)
            try:
                answer = await call.make(self._seconds)
            except asyncio.CancelledError:
                if call.delivered:
                    raise
                return HandOver(Handed.AWAY, "the Dispatcher was stopped before the invoker asked for it")
            except (OSError, TimeoutError, ValueError, h11.ProtocolError, EOFError) as error:
                if call.delivered:
                    return HandOver(Handed.UNKNOWN, f"the invoker at {url} didn't answer: {_said(error)}")
                return HandOver(Handed.AWAY, f"the invoker at {url} can't be reached: {_said(error)}")
            if answer.status != 401:
                return _read(url, answer)
        return HandOver(Handed.AWAY, f"the invoker at {url} takes none of this Dispatcher's worker tokens")


class _Call:
    """``delivered`` is set before the first byte is sent that could make the request whole."""

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
                ("X-Trace-Worker-Token", token),
                ("X-Amz-Invocation-Type", "Event"),
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
                self.delivered = True
                writer.write(self._http.send(h11.Data(data=self._body)) or b"")
                writer.write(self._http.send(h11.EndOfMessage()) or b"")
                # An invoker that has answered needn't have read all of it.
                with suppress(ConnectionError):
                    await writer.drain()
                while not isinstance(event := await self._next(reader), h11.Response):
                    pass
                return await self._rest(reader, event)
        finally:
            writer.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if _is_private(self._url):
            return await private_socket.connect(self._url)
        parts = urlsplit(self._url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        return await asyncio.open_connection(parts.hostname or "", port, ssl=secure or None)

    async def _until_asked(self, reader: asyncio.StreamReader) -> h11.Response | None:
        """None when the rest is to be sent; an answer when it needn't be."""
        patience = None if _is_private(self._url) else UNASKED_SECONDS
        try:
            async with asyncio.timeout(patience):
                event = await self._next(reader)
        except TimeoutError:
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
        """The text only explains the status, which is what counts."""
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
    return url.startswith(private_socket.SCHEME)


def _read(url: str, answer: _Answer) -> HandOver:
    said = f"the invoker at {url} answered {answer.status}: {answer.text[:_DETAIL]}"
    match answer.status:
        case 200 | 202:
            return HandOver(Handed.ACCEPTED)
        case 429:
            return HandOver(Handed.FULL, said)
        case 503:
            return HandOver(Handed.AWAY, said)
        case status if 400 <= status < 500:
            return HandOver(Handed.REJECTED, said)
        case _:
            return HandOver(Handed.UNKNOWN, said)


def _said(error: Exception) -> str:
    return str(error)[:_DETAIL] or type(error).__name__
