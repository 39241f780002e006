"""Frames over a socket for the side that may not block (``channel`` is the other side's).

Reading goes on by itself until so much is unread that the sender has to wait; writing never waits, and ends the
conversation when the peer lets too much pile up. ``receive`` raises ``StreamEnded`` once everything that came
before the end has been taken.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Sequence

from tracelake.contracts.operator_protocol import MAX_FRAME
from tracelake.worker.operator.channel import HEADER, ChannelBroken, body_length

_CHUNK = 64 * 1024
_UNREAD_FRAMES = 256
_UNREAD_BYTES = 4 * 1024 * 1024
_UNSENT_BYTES = 2 * MAX_FRAME


class StreamEnded(Exception):
    """Says how."""


class StreamBroken(StreamEnded):
    """Not by hanging up: what came was no frame, or what was sent isn't read."""


class FrameStream:
    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._partial = bytearray()
        self._unread: deque[bytes] = deque()
        self._unread_bytes = 0
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._unsent_bytes = 0
        self._arrived: asyncio.Future[None] | None = None
        self._reading = False
        self._close_at_end = False
        self.end: StreamEnded | None = None
        self._read_on()

    @property
    def is_quiet(self) -> bool:
        """Nothing came that wasn't taken."""
        return not self._unread and not self._partial

    async def receive(self) -> bytes:
        """For one caller at a time."""
        while not self._unread:
            if self.end is not None:
                raise self.end
            self._arrived = self._loop.create_future()
            try:
                await self._arrived
            finally:
                self._arrived = None
        body = self._unread.popleft()
        self._unread_bytes -= len(body)
        self._read_on()
        return body

    def send(self, body: bytes, descriptors: Sequence[int] = ()) -> None:
        """The descriptors stay the caller's."""
        if self.end is None and self._unsent_bytes + len(body) > _UNSENT_BYTES:
            self._finish("it doesn't read what it is told", broken=True)
        if self.end is not None:
            raise self.end
        frame = HEADER.pack(len(body)) + body
        sent = 0 if self._unsent else self._send_now(frame, descriptors)
        if sent < len(frame):
            rest = [] if sent else [os.dup(each) for each in descriptors]
            self._unsent.append((memoryview(frame)[sent:], rest))
            self._unsent_bytes += len(frame) - sent
            self._loop.add_writer(self._sock, self._writable)

    def close(self, why: str) -> None:
        self._finish(why)
        self._sock.close()

    def close_at_its_end(self) -> None:
        """The peer is gone, but what it said before may still be on its way."""
        self._close_at_end = True
        if self.end is not None:
            self._sock.close()

    def _finish(self, why: str, *, broken: bool = False) -> None:
        """Nothing more is read or sent. The socket stays, for its end would be noticed by the peer."""
        if self.end is not None:
            return
        self.end = StreamBroken(why) if broken else StreamEnded(why)
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        for _, descriptors in self._unsent:
            _close(descriptors)
        self._unsent.clear()
        if self._close_at_end:
            self._sock.close()
        self._wake()

    def _read_on(self) -> None:
        room = len(self._unread) < _UNREAD_FRAMES and self._unread_bytes < _UNREAD_BYTES
        if room == self._reading or self.end is not None:
            return
        self._reading = room
        if room:
            self._loop.add_reader(self._sock, self._readable)
        else:
            self._loop.remove_reader(self._sock)

    def _readable(self) -> None:
        try:
            # Descriptors that the peer sends along are closed by the kernel.
            part = self._sock.recv(_CHUNK)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._finish(f"its channel failed: {error.strerror}")
            return
        if not part:
            self._finish("it closed its channel" + (" within a message" if self._partial else ""))
            return
        self._partial += part
        try:
            self._split()
        except ChannelBroken as error:
            self._finish(f"it sent {error}", broken=True)
        self._read_on()

    def _split(self) -> None:
        begin = 0
        try:
            while len(self._partial) - begin >= HEADER.size:
                length = body_length(bytes(self._partial[begin : begin + HEADER.size]))
                end = begin + HEADER.size + length
                if len(self._partial) < end:
                    break
                self._unread.append(bytes(self._partial[begin + HEADER.size : end]))
                self._unread_bytes += length
                begin = end
        finally:
            if begin:
                del self._partial[:begin]
                self._wake()

    def _send_now(self, frame: bytes, descriptors: Sequence[int]) -> int:
        """How much of it has gone. Who can't be reached any more is found out by the writer, as always."""
        try:
            return _send(self._sock, frame, descriptors)
        except OSError:
            return 0

    def _writable(self) -> None:
        try:
            while self._unsent:
                frame, descriptors = self._unsent[0]
                sent = _send(self._sock, frame, descriptors)
                self._unsent_bytes -= sent
                _close(descriptors)
                if sent < len(frame):
                    self._unsent[0] = (frame[sent:], [])
                else:
                    self._unsent.popleft()
            self._loop.remove_writer(self._sock)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            # What the peer said before it went is still to be read, so the reader finds the end.
            self._unsent.clear()
            _close(descriptors)
            self._loop.remove_writer(self._sock)
            if not self._reading:
                self._finish(f"its channel failed: {error.strerror}")

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)


def _send(sock: socket.socket, frame: bytes | memoryview, descriptors: Sequence[int]) -> int:
    if not descriptors:
        return sock.send(frame, socket.MSG_NOSIGNAL)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    return sock.sendmsg([frame], rights, socket.MSG_NOSIGNAL)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())
