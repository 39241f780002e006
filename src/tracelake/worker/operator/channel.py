"""Frames over the private socket between wrapper and operator process, for the side that may block.

A frame is ``HEADER`` (four bytes, the body's length) and the body; ``Run`` brings a descriptor along, which the
kernel hands over with the frame's first byte. A length above ``MAX_FRAME`` is refused before anything is read
for it. Descriptors that arrive with a broken frame are closed: a hostile or confused peer can't fill the table.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Sequence

import msgspec

from tracelake.contracts.operator_protocol import MAX_FRAME, FromOperator, ToOperator
from tracelake.domain.errors import TooLarge

HEADER = struct.Struct("!I")
MAX_DESCRIPTORS = 4

_encoder = msgspec.json.Encoder()
_to_operator: msgspec.json.Decoder[ToOperator] = msgspec.json.Decoder(ToOperator)
_from_operator: msgspec.json.Decoder[FromOperator] = msgspec.json.Decoder(FromOperator)
_INT = array.array("i").itemsize


class ChannelClosed(Exception):
    """The other side is gone; nothing more will come."""


class ChannelBroken(Exception):
    """What came is no frame or no message of the protocol; the conversation can't go on."""


def encode(message: ToOperator | FromOperator) -> bytes:
    """The body of a frame; ``TooLarge`` if no frame could hold it, so that the sender hears and not the peer."""
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
    """How long the body is that this header announces."""
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
