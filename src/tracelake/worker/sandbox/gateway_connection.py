"""One connection to a gateway: HTTP/1.1 spoken with somebody who may say anything.

Sizes are bounded before anything is kept: a head by itself, a body by itself and, with all other bodies of the same
sandbox, by a ``Budget``; so is the time to send them. Whatever is said gets an answer, if one can still be sent,
and what goes wrong here ends this connection alone. While an answer is made at most one more piece is read, so
that a caller who hangs up is noticed and one who goes on sending is not stored.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

import h11

from tracelake.domain.errors import BadRequest, TooLarge, TracelakeError
from tracelake.worker.sandbox.gateway_messages import GatewayRequest, GatewayResponse, parse, problem

_PIECE = 65536
_FINISH_SECONDS = 2.0
HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
"""Without a further byte."""
IDLE_SECONDS = 600.0


class HungUp(Exception):
    """The caller is gone."""


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


class GatewayConnection:
    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: Budget, head_bytes: int
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._budget = budget
        self._held = 0
        self._head_bytes = head_bytes
        self._asked_for_head = False
        self._began: float | None = None
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=head_bytes)

    async def serve(
        self, answer: Callable[[GatewayRequest, GatewayConnection], Coroutine[None, None, None]]
    ) -> None:
        """Request after request, until the caller hangs up or makes no sense."""
        with contextlib.suppress(HungUp, ConnectionError):
            while True:
                try:
                    request = await self._next_request()
                    if request is None:
                        return
                    await answer(request, self)
                except TracelakeError as error:
                    await self._refuse(error)
                except (HungUp, ConnectionError):
                    raise
                except Exception:
                    await self._refuse(TracelakeError("InternalError", "the gateway failed; try again later"))
                    raise
                finally:
                    self._budget.give_back(self._held)
                    self._held = 0
                if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
                    return
                self._http.start_next_cycle()

    async def _refuse(self, error: TracelakeError) -> None:
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        await self.send(problem(error))
        if self._http.their_state is not h11.DONE:
            await self._let_finish()

    async def _let_finish(self) -> None:
        """Closing at once would take the answer away from a caller who still sends."""
        with contextlib.suppress(TimeoutError, OSError, RuntimeError):
            self._writer.write_eof()
            async with asyncio.timeout(_FINISH_SECONDS):
                while await self._reader.read(_PIECE):
                    pass

    async def _next_request(self) -> GatewayRequest | None:
        head: h11.Request | None = None
        body = bytearray()
        self._asked_for_head = False
        self._began = asyncio.get_running_loop().time() if self._http.trailing_data[0] else None
        while True:
            event = await self._next_event()
            match event:
                case h11.Request():
                    head = event
                    self._asked_for_head = head.method == b"HEAD"
                    if _size(head) > self._head_bytes:
                        raise self._too_large()
                case h11.Data():
                    self._budget.take(len(body), len(event.data))
                    self._held += len(event.data)
                    body += event.data
                case h11.EndOfMessage() if head is not None:
                    return parse(head, bytes(body))
                case _:
                    return None

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED] | None:
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                if error.error_status_hint == 431:
                    raise self._too_large() from error
                raise BadRequest("BadRequest", f"this is no HTTP request: {error}") from error
            if event is not h11.NEED_DATA:
                return event
            if self._http.they_are_waiting_for_100_continue:
                go_on = h11.InformationalResponse(status_code=100, headers=[])
                self._writer.write(self._http.send(go_on) or b"")
            piece = await self._read()
            if not piece and self._http.their_state is h11.IDLE:
                return None
            self._http.receive_data(piece)

    async def _read(self) -> bytes:
        """The next piece. A head must come as a whole in time, a body must go on."""
        now = asyncio.get_running_loop().time()
        in_body = self._http.their_state is h11.SEND_BODY
        if in_body:
            until = now + BODY_SECONDS
        else:
            until = now + IDLE_SECONDS if self._began is None else self._began + HEAD_SECONDS
        try:
            async with asyncio.timeout_at(until):
                piece = await self._reader.read(_PIECE)
        except TimeoutError:
            if self._began is None and not in_body:
                return b""
            raise BadRequest("RequestTimeout", "the request didn't come in time") from None
        if self._began is None:
            self._began = asyncio.get_running_loop().time()
        return piece

    def _too_large(self) -> BadRequest:
        return BadRequest("HeadTooLarge", f"a request's head may have {self._head_bytes} bytes")

    async def while_connected(self, answer: Coroutine[None, None, GatewayResponse]) -> GatewayResponse:
        """The answer, unless the caller hangs up first: then it is cancelled."""
        making = asyncio.ensure_future(answer)
        listening = asyncio.ensure_future(self._reader.read(_PIECE))
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

    async def send(self, response: GatewayResponse) -> None:
        headers = {**response.headers, "content-length": str(len(response.body))}
        body = b"" if self._asked_for_head else response.body
        self._write(self._head(response.status, headers), h11.Data(data=body), h11.EndOfMessage())
        await self._writer.drain()

    async def send_pieces(
        self, status: int, headers: Mapping[str, str], pieces: AsyncIterator[bytes]
    ) -> None:
        """Piece by piece, no faster than the caller takes them."""
        self._write(self._head(status, headers))
        async for piece in pieces:
            self._write(h11.Data(data=piece))
            await self._writer.drain()
        self._write(h11.EndOfMessage())
        await self._writer.drain()

    def _head(self, status: int, headers: Mapping[str, str]) -> h11.Response:
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        return h11.Response(status_code=status, headers=lines)

    def _write(self, *events: h11.Event) -> None:
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))


def _size(head: h11.Request) -> int:
    return len(head.target) + sum(len(name) + len(value) + 4 for name, value in head.headers)


async def _cancel(work: asyncio.Future[GatewayResponse] | asyncio.Future[bytes]) -> None:
    work.cancel()
    await asyncio.wait({work})
    if not work.cancelled():
        work.exception()
