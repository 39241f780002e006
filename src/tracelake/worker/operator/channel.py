"""Frames over the private socket between wrapper and operator process, for the side that may block and the one
that may not.

A frame is ``HEADER`` (four bytes, the body's length) and the body. ``Run`` carries a descriptor, which the kernel
passes with the frame's first byte. A length above ``MAX_FRAME`` is refused before anything is read for it.
Descriptors that arrive with a broken frame are closed: a hostile or confused peer can't fill the descriptor
table.

The operator side blocks. The wrapper's side, ``FrameStream``, reads by itself until so much is unread that the
sender has to wait; writing never waits, and ends the conversation when the peer lets too much pile up.
``receive`` raises ``StreamEnded`` once everything that came before the end has been read.
"""

from __future__ import annotations

import array
import asyncio
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence

import msgspec

from tracelake.contracts.operator_protocol import MAX_FRAME, FromOperator, ToOperator
from tracelake.domain.errors import TooLarge

HEADER = struct.Struct("!I")
MAX_DESCRIPTORS = 4
_INT = array.array("i").itemsize
_CHUNK = 64 * 1024
_UNREAD_FRAMES = 256
_UNREAD_BYTES = 4 * 1024 * 1024
_UNSENT_BYTES = 2 * MAX_FRAME
_encoder = msgspec.json.Encoder()
_to_operator: msgspec.json.Decoder[ToOperator] = msgspec.json.Decoder(ToOperator)
_from_operator: msgspec.json.Decoder[FromOperator] = msgspec.json.Decoder(FromOperator)


class ChannelClosed(Exception):
    """The other side is gone; nothing more will come."""


class ChannelBroken(Exception):
    """The bytes received are no frame or no message of the protocol; the conversation can't go on."""


def encode(message: ToOperator | FromOperator) -> bytes:
    """The body of a frame. Raises ``TooLarge`` if no frame could hold it, so that the error reaches the sender
    and not the peer."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise TooLarge("MessageTooLarge", f"a message of {len(body)} bytes; at most {MAX_FRAME} are allowed")
    return body


def decode_to_operator(body: bytes) -> ToOperator:
    try:
        return _to_operator.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ChannelBroken(f"not a message to an operator: {error}") from None


def decode_from_operator(body: bytes) -> FromOperator:
    try:
        return _from_operator.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ChannelBroken(f"not a message from an operator: {error}") from None


def body_length(header: bytes) -> int:
    """The length of the body that this header announces."""
    length: int = HEADER.unpack(header)[0]
    if length > MAX_FRAME:
        raise ChannelBroken(f"a frame of {length} bytes; at most {MAX_FRAME} are allowed")
    return length


def write_frame(sock: socket.socket, body: bytes, descriptors: Sequence[int] = ()) -> None:
    frame = HEADER.pack(len(body)) + body
    try:
        sent = 0
        if descriptors:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
            sent = sock.sendmsg([frame], [rights])
        sock.sendall(memoryview(frame)[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise ChannelClosed(str(error)) from None


def read_frame(sock: socket.socket) -> tuple[bytes, list[int]]:
    """The next body and the descriptors that came with it, which now belong to the caller."""
    descriptors: list[int] = []
    try:
        header = _read_exactly(sock, HEADER.size, descriptors, at_boundary=True)
        body = _read_exactly(sock, body_length(header), descriptors)
    except BaseException:
        close_descriptors(descriptors)
        raise
    return body, descriptors


def close_descriptors(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _read_exactly(
    sock: socket.socket, length: int, descriptors: list[int], *, at_boundary: bool = False
) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        try:
            part, ancillary, flags, _ = sock.recvmsg(
                min(length - len(parts), 1 << 20),
                socket.CMSG_SPACE(MAX_DESCRIPTORS * _INT),
                socket.MSG_CMSG_CLOEXEC,
            )
        except ConnectionResetError as error:
            raise ChannelClosed(str(error)) from None
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                rights = array.array("i")
                rights.frombytes(data[: len(data) - len(data) % _INT])
                descriptors.extend(rights)
        if flags & socket.MSG_CTRUNC or len(descriptors) > MAX_DESCRIPTORS:
            raise ChannelBroken(f"more than {MAX_DESCRIPTORS} descriptors in a frame")
        if not part:
            if at_boundary and not parts:
                raise ChannelClosed("the other side closed the channel")
            raise ChannelBroken("the channel ended within a frame")
        parts += part
    return bytes(parts)


class StreamEnded(Exception):
    """The stream has ended; the message says how."""


class StreamBroken(StreamEnded):
    """The stream didn't end by a close: the peer sent something else than frames, or doesn't read."""


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
        """Whether everything that arrived has been read."""
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
        """Send a frame without waiting. The descriptors stay the caller's."""
        if self.end is None and self._unsent_bytes + len(body) > _UNSENT_BYTES:
            self._finish("it doesn't read what is sent to it", broken=True)
        if self.end is not None:
            raise self.end
        frame = HEADER.pack(len(body)) + body
        # A frame must not overtake those that wait.
        sent = 0 if self._unsent else self._send_now(frame, descriptors)
        if sent < len(frame):
            # Copies, since the caller may close its own first. Descriptors
            # go with the first byte, so only if none was sent.
            rest = [] if sent else [os.dup(each) for each in descriptors]
            self._unsent.append((memoryview(frame)[sent:], rest))
            self._unsent_bytes += len(frame) - sent
            self._loop.add_writer(self._sock, self._writable)

    def close(self, why: str) -> None:
        self._finish(why)
        self._sock.close()

    def close_at_its_end(self) -> None:
        """End once everything that the peer sent before it ended has been read."""
        self._close_at_end = True
        if self.end is not None:
            self._sock.close()

    def _finish(self, why: str, *, broken: bool = False) -> None:
        """Stop reading and sending. The socket stays open, since the peer would notice its end."""
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
        """The number of bytes that were sent. The writer finds out that a peer can't be reached any more."""
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
            # Messages that the peer sent before it ended are still to be read, so the reader finds the end.
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
