"""HTTP listeners: uvicorn's HTTP/1.1 server on a bound socket, with limits on what clients may send and hold.

A ``Listener`` binds its socket when it is made, so that a taken port is reported before anything starts. uvicorn
itself keeps everything that a client sends as a head, for as long as it sends. ``BoundedHttp`` answers 431 to a
head that is too large and 408 to one that takes too long, then reads no more, and cuts the connection a moment
later so that the answer can still be read. It also limits the time for bodies, and for answers that the client
doesn't read. A request that arrives in one piece, as nearly all do, starts no timer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import socket
import struct
from collections.abc import Generator
from typing import Any, ClassVar

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tracelake.serving.http_limits import (
    CUT_SECONDS,
    HEAD_TOO_LARGE,
    KIB,
    LATE,
    NO_ROOM,
    NOT_HTTP,
    ConnectionLimiter,
    HttpLimits,
    Peer,
    RequestMeter,
    peer_of,
    tuned,
    within_descriptors,
)
from tracelake.serving.local_sockets import bound, inherited, stop_listening
from tracelake.serving.response import AsgiApp

SHUTDOWN_SECONDS = 4
MOST_UNREAD = 8 * 1024 * 1024
"""Bytes of a body that may still arrive after its request was answered."""
UNREAD_SECONDS = 5.0
MOST_PIPELINED = 32
"""Maximum number of requests that wait behind the one being answered; the bytes behind them aren't parsed yet."""
_PIECE = 2 * KIB
"""Bytes of a head, and of pipelined requests behind it, that are parsed at once: a few dozen requests at most."""


class _Server(uvicorn.Server):
    """Leaves signals to the process, which may have several servers, and sets an event when it listens."""

    def __init__(self, config: uvicorn.Config, listening: asyncio.Event, held: socket.socket | None) -> None:
        super().__init__(config)
        self._listening = listening
        self._held = held

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """A socket that the parent process holds as well would go on listening when it is closed here."""
        if self._held is not None:
            # No more connections are accepted before the socket stops, or accept would fail in a loop.
            for server in self.servers:
                server.close()
            stop_listening(self._held)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Listener:
    def __init__(self, what: str, host: str, port: int, limits: HttpLimits | None = None) -> None:
        """``limits`` are read from the environment by default."""
        self._limits = limits or tuned(HttpLimits(), os.environ)
        given = inherited(what, host, port, os.environ)
        # The duplicate stays valid when the server has closed its own, and can then stop the listening.
        self._held = None if given is None else given.dup()
        self._socket = given or bound(what, host, port)
        self._server: _Server | None = None
        self._listening = asyncio.Event()

    @property
    def url(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}"

    async def serve(self, app: AsgiApp) -> None:
        limits = within_descriptors(self._limits)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=bounded(limits),
            ws="none",
            lifespan="off",
            server_header=False,
            # Such headers are only the client's own claim about its address.
            proxy_headers=False,
            # uvicorn wants whole seconds; rounded down it could be 0.
            timeout_keep_alive=math.ceil(limits.idle_seconds),
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            backlog=1024,
        )
        self._server = _Server(config, self._listening, self._held)
        await self._server.serve(sockets=[self._socket])

    async def started(self) -> None:
        await self._listening.wait()

    def stop(self) -> None:
        """Answer the requests under way and accept no new ones."""
        if self._server is not None:
            self._server.should_exit = True

    def close(self) -> None:
        self._socket.close()
        if self._held is not None:
            self._held.close()


class _Flow(FlowControl):
    """Ignores requests to resume reading while ``held``: uvicorn resumes whenever an application asks for its body
    or has answered."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class BoundedHttp(HttpToolsProtocol):
    """One connection. ``limits`` and ``limiter`` belong to the listener: see ``bounded``."""

    limits: ClassVar[HttpLimits]
    limiter: ClassVar[ConnectionLimiter]

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

    def evict(self) -> None:
        self._over = True
        self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # After uvicorn's own, which this replaces before anything is read.
        self.flow = self._flow = _Flow(transport)
        self.peer = peer_of(transport.get_extra_info("peername"), transport.get_extra_info("sockname"))
        if self.limiter.enter(self):
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)
        else:
            self._end(NO_ROOM)

    def connection_lost(self, exc: Exception | None) -> None:
        self._over = True
        self.limiter.leave(self)
        self._stop_timers()
        self._give_up_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # Parsed in the order of arrival; reading is paused, so this is at most what was already on its way.
        if self._unparsed:
            self._unparsed += data
            return
        meter = self._meter
        # The usual request fits, and costs no copy and no loop.
        if len(data) <= min(meter.room, _PIECE):
            self._feed(data)
        else:
            self._feed_in_pieces(data)
        if not self._over:
            self._watch(len(data))

    def _feed_in_pieces(self, data: bytes) -> None:
        """Stops when too many requests wait; the rest is parsed after some were answered."""
        meter = self._meter
        left = memoryview(data)
        while left and not self._over:
            # Each waiting request is an object with its headers,
            # of which a client could send thousands at once.
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
            # A server need not accept an upgrade: the request is answered as it is.
            pass
        except httptools.HttpParserError:
            self._end(NOT_HTTP)
            return
        # The state from before the piece: the parser has changed it by its callbacks meanwhile.
        self._meter.fed(len(piece), in_body)
        if self._meter.too_large:
            self._end(HEAD_TOO_LARGE)

    def _watch(self, size: int) -> None:
        """Run the timers while a request has arrived only in part."""
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
        # The answer is out, so these bytes are read for nothing; a refused upload must not go on for ever.
        if self.cycle is not None and self.cycle.response_complete:
            self._unread += size
            if self._unread > MOST_UNREAD:
                self._end(None)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["peer"] = self.peer.group

    def on_headers_complete(self) -> None:
        self._meter.headers_complete()
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        # A trailer behind a body is no part of the head that was checked.
        if not self._meter.in_body:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._meter.body(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._meter.message_complete()
        super().on_message_complete()
        # Of a request that came in one piece this is set before its application begins.
        self.scope["state"]["came"] = len(self.cycle.body)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        # Remembered for the connection, since the next request brings a scope of its own.
        self._known = self.known
        super().on_response_complete()
        if self._unparsed and len(self.pipeline) < MOST_PIPELINED:
            # Not at once: this is called from within the answer of a request, and parsing may start another.
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
        # An answer that wasn't read in all that time would keep a closed connection open.
        self.transport.abort()

    def _watch_writing(self) -> None:
        self._unwritten = self.transport.get_write_buffer_size()
        self._write_timer = self.loop.call_later(self.limits.body_seconds, self._look_at_writing)

    def _look_at_writing(self) -> None:
        self._write_timer = None
        left = self.transport.get_write_buffer_size()
        # Slow is allowed, standing still is not.
        if left and left == self._unwritten:
            # With a reset: otherwise the kernel would go on offering what it still holds.
            connected: socket.socket = self.transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.evict()
        elif left:
            self._watch_writing()

    def _head_is_late(self) -> None:
        self._head_timer = None
        # The client couldn't send while we didn't read, so its time begins anew.
        if self._is_held():
            self._head_timer = self.loop.call_later(self.limits.head_seconds, self._head_is_late)
        else:
            # A client that sent nothing expects no answer.
            self._end(LATE if self._meter.head else None)

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
            self._end(LATE)

    def _is_held(self) -> bool:
        """Whether this side has stopped reading, so that the client isn't to blame."""
        return self.flow.read_paused

    def _end(self, refusal: bytes | None) -> None:
        """Stop reading, send ``refusal`` unless an answer is being sent already, and cut the connection soon."""
        self._over = True
        self._stop_timers()
        self._unset_keepalive_if_required()
        answered = self._answered
        is_answering = answered is not None and answered.response_started and not answered.response_complete
        self._give_up_requests()
        # In the middle of another answer it would be read as a part of that one.
        if refusal is not None and not is_answering:
            self.transport.write(refusal)
        self.flow.pause_reading()
        if self.transport.can_write_eof():
            # The client sees the end at once, and the moment until the cut lets it read the
            # answer: a close with unread data would send a reset, which may destroy it.
            self.transport.write_eof()
        self.loop.call_later(CUT_SECONDS, self.transport.abort)

    def _give_up_requests(self) -> None:
        """Nothing more is written for them, waiting ones aren't started, and applications that wait for the rest of
        a body get a disconnect."""
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
    """A protocol class with one listener's limits: uvicorn makes an instance per connection."""

    class _Bounded(BoundedHttp):
        limits = of
        limiter = ConnectionLimiter(of)

    return _Bounded
