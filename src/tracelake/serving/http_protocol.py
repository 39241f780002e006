"""uvicorn's HTTP/1.1 with limits: on the head, on the time for head and body, on answers that nobody reads.

uvicorn keeps whatever a client sends as a head, for as long as it sends. Here a head that is too large is answered
431 and one that takes too long 408, and then no more is read; the connection is cut a moment later, so that the
answer can still be read. Nothing is done per request that needn't be: a request that comes in one piece, as nearly
all do, starts no timer.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any, ClassVar

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tracelake.serving.http_limits import (
    CUT_SECONDS,
    KIB,
    Door,
    HttpLimits,
    Peer,
    RequestMeter,
    peer_of,
    refusal,
)

MOST_UNREAD = 8 * 1024 * 1024
"""Of a body whose request is answered already."""
UNREAD_SECONDS = 5.0
MOST_PIPELINED = 32
"""Requests that wait behind the one that is being answered; what comes behind them isn't looked at yet."""
_PIECE = 2 * KIB
"""What is parsed at once of a head, and of what comes behind it: no more than a few dozen requests."""


class _Flow(FlowControl):
    """An application that asks for its body, or has answered, would have more read: not while that is ``held``."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class BoundedHttp(HttpToolsProtocol):
    """One connection. ``limits`` and ``door`` are the listener's: see ``bounded``."""

    limits: ClassVar[HttpLimits]
    door: ClassVar[Door]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.peer = Peer("")
        self._meter = RequestMeter(self.limits.head_bytes)
        self._known = False
        self._over = False
        self._answered: RequestResponseCycle | None = None
        self._unparsed = b""
        self._unread = 0
        self._body_began = self._body_moved = 0.0
        self._body_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._unwritten = 0

    @property
    def known(self) -> bool:
        return self._known or (self.cycle is not None and self.cycle.scope["state"].get("stays", False))

    def turn_out(self) -> None:
        self._over = True
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = self._flow = _Flow(transport)
        self.peer = peer_of(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))
        if self.door.enter(self):
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)
        else:
            self._end(503)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self.door.leave(self)
        self._stop_timers()
        self._give_up_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._unparsed:
            self._unparsed += data
            return
        meter = self._meter
        if len(data) <= min(meter.room, _PIECE):
            self._feed(data)
        else:
            self._feed_in_pieces(data)
        if not self._over:
            self._watch(len(data))

    def _feed_in_pieces(self, data: bytes) -> None:
        """As far as there are not too many requests waiting; the rest is parsed when some were answered."""
        meter = self._meter
        left = memoryview(data)
        while left and not self._over:
            if len(self.pipeline) >= MOST_PIPELINED:
                self._unparsed = bytes(left)
                self._flow.held = True
                self.flow.pause_reading()
                return
            size = meter.room if meter.in_body else min(meter.room, _PIECE)
            self._feed(left[:size])
            left = left[size:]

    def _parse_on(self) -> None:
        data, self._unparsed = self._unparsed, b""
        if self._over or not data:
            return
        self._flow.held = False
        self._feed_in_pieces(data)
        if not self._over:
            self._watch(0)
            if not self._unparsed and not self.pipeline:
                self.flow.resume_reading()

    def _feed(self, piece: bytes | memoryview) -> None:
        if self._over:
            return
        self._unset_keepalive_if_required()
        in_body = self._meter.in_body
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            # Nobody has to take an offer to speak another protocol: the request is answered as it is.
            pass
        except httptools.HttpParserError:
            self._end(400)
            return
        self._meter.fed(len(piece), in_body)
        if self._meter.too_large:
            self._end(431)

    def _watch(self, size: int) -> None:
        """Time runs while a request is only half here."""
        meter = self._meter
        if meter.in_body:
            self._watch_body(size)
        elif self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        if meter.head:
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)
        elif self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_body(self, size: int) -> None:
        now = self.loop.time()
        if self._body_timer is None:
            self._body_began, self._body_bytes, self._unread = now, 0, 0
            self._body_timer = self.loop.call_later(self.limits.body_seconds, self._body_is_late)
        self._body_moved = now
        self._body_bytes += size
        if self.cycle is not None and self.cycle.response_complete:
            self._unread += size
            if self._unread > MOST_UNREAD:
                self._end(None)

    def on_headers_complete(self) -> None:
        self._meter.headers_complete()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        # What comes behind a body is no part of the head that was judged.
        if not self._meter.in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._meter.body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._meter.message_complete()
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        self._known = self.known
        super().on_response_complete()
        if self._unparsed and len(self.pipeline) < MOST_PIPELINED:
            self.loop.call_soon(self._parse_on)
        if self.transport.get_write_buffer_size() and self._write_timer is None:
            self._watch_writing()
        if self._meter.in_body and not self._over:
            self.loop.call_later(UNREAD_SECONDS, self._end_if_still_sending, self.cycle)

    def _end_if_still_sending(self, cycle: object) -> None:
        if self.cycle is cycle and self._meter.in_body and not self._over:
            self._end(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._watch_writing()

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        # An answer that wasn't taken in all that time would keep a closed connection open.
        self.transport.abort()

    def _watch_writing(self) -> None:
        self._unwritten = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.limits.body_seconds, self._look_at_writing)

    def _look_at_writing(self) -> None:
        self._write_timer = None
        left = self.transport.get_write_buffer_size()
        if left and left == self._unwritten:
            # With a reset: otherwise the kernel would go on offering what it still holds.
            connected: socket.socket = self.transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.turn_out()
        elif left:
            self._watch_writing()

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_held():
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)
        else:
            self._end(408 if self._meter.head else None)

    def _body_is_late(self) -> None:
        now = self.loop.time()
        if self._is_held():
            self._body_moved = self._body_began = now
        seconds = self.limits.body_seconds
        due = min(
            self._body_moved + seconds,
            self._body_began + seconds + self._body_bytes / self.limits.body_rate,
        )
        if due > now:
            self._body_timer = self.loop.call_at(due, self._body_is_late)
        else:
            self._body_timer = None
            self._end(408)

    def _is_held(self) -> bool:
        """Whether it is us who don't read."""
        return self.flow.read_paused

    def _end(self, status: int | None) -> None:
        """Read no more; say why, if nothing is being said already; and cut the connection soon."""
        self._over = True
        self._stop_timers()
        self._unset_keepalive_if_required()
        answered = self._answered
        is_answering = answered is not None and answered.response_started and not answered.response_complete
        self._give_up_requests()
        if status is not None and not is_answering:
            self.transport.write(refusal(status))
        self.flow.pause_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(CUT_SECONDS, self.transport.abort)

    def _give_up_requests(self) -> None:
        """Nothing is written for them any more, those that wait aren't begun, and whoever waits for the rest of one
        learns that it won't come."""
        waiting = [cycle for cycle, _ in self.pipeline]
        self.pipeline.clear()
        self._unparsed = b""
        for cycle in (self._answered, self.cycle, *waiting):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._body_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._body_timer = self._write_timer = None


def bounded(of: HttpLimits) -> type[BoundedHttp]:
    """The protocol of one listener."""

    class _Bounded(BoundedHttp):
        limits = of
        door = Door(of)

    return _Bounded
