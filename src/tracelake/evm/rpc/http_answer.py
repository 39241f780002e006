"""An HTTP/1.1 answer, read from a socket piece by piece, with every wait under one deadline."""

from __future__ import annotations

import socket
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from tracelake.evm.rpc.problem import Kind, Problem

MAX_BODY = 128 * 1024 * 1024
"""Several times what nodes send at most; parsed, it takes up to twenty times as much memory."""
_MAX_HEAD = 64 * 1024
_PIECE = 256 * 1024


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """``keeps``: another request may follow on the same connection."""

    status: int
    headers: Mapping[str, str]
    body: bytes | bytearray
    keeps: bool = True


class AnswerReader:
    """For one connection; what came beyond an answer is kept for the next."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._unread = b""

    def read(self, deadline: float) -> HttpAnswer:
        while True:
            status, headers = self._read_head(deadline)
            if status >= 200:
                break
        body: bytes | bytearray
        sized = True
        if "chunked" in headers.get("transfer-encoding", "").lower():
            body = self._read_chunks(deadline)
        elif (length := headers.get("content-length")) is not None:
            body = self._read_exactly(_size(length), deadline)
        else:
            body, sized = self._read_to_end(deadline), False
        if headers.get("content-encoding", "").lower() in ("gzip", "x-gzip"):
            body = _unzip(body)
        keeps = sized and headers.get("connection", "").lower() != "close"
        return HttpAnswer(status, headers, body, keeps)

    def _receive(self, deadline: float) -> bytes:
        self._socket.settimeout(left_until(deadline))
        return self._socket.recv(_PIECE)

    def _read_head(self, deadline: float) -> tuple[int, dict[str, str]]:
        head = self._unread
        while (end := head.find(b"\r\n\r\n")) < 0:
            if len(head) > _MAX_HEAD:
                raise Problem(Kind.GARBLED, "an HTTP head without an end")
            if not (piece := self._receive(deadline)):
                raise Problem(
                    Kind.TRANSPORT, "the connection was cut" if head else "the connection was closed"
                )
            head += piece
        self._unread = head[end + 4 :]
        first, *lines = head[:end].decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise Problem(Kind.GARBLED, "an answer that isn't HTTP")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return int(rest[:3]), headers

    def _read_exactly(self, size: int, deadline: float) -> bytearray | bytes:
        held = self._unread
        if len(held) >= size:
            self._unread = held[size:]
            return held[:size]
        body = bytearray(size)
        body[: len(held)] = held
        self._unread = b""
        filled = len(held)
        with memoryview(body) as view:
            while filled < size:
                self._socket.settimeout(left_until(deadline))
                if not (count := self._socket.recv_into(view[filled:], min(size - filled, _PIECE * 4))):
                    raise Problem(Kind.TRANSPORT, f"the connection was cut after {filled} of {size} bytes")
                filled += count
        return body

    def _read_chunks(self, deadline: float) -> bytearray:
        body = bytearray()
        while True:
            size = _size(self._read_line(deadline).partition(b";")[0].strip().decode("latin-1"), 16)
            if size == 0:
                break
            if len(body) + size > MAX_BODY:
                raise Problem(Kind.TOO_MUCH, "an answer larger than any could be")
            body += self._read_exactly(size, deadline)
            self._read_line(deadline)
        while self._read_line(deadline):
            pass
        return body

    def _read_line(self, deadline: float) -> bytes:
        while (end := self._unread.find(b"\r\n")) < 0:
            if len(self._unread) > _MAX_HEAD:
                raise Problem(Kind.GARBLED, "a chunk without a size")
            if not (piece := self._receive(deadline)):
                raise Problem(Kind.TRANSPORT, "the connection was cut within a chunk")
            self._unread += piece
        line, self._unread = self._unread[:end], self._unread[end + 2 :]
        return line

    def _read_to_end(self, deadline: float) -> bytearray:
        body = bytearray(self._unread)
        self._unread = b""
        while piece := self._receive(deadline):
            body += piece
            if len(body) > MAX_BODY:
                raise Problem(Kind.TOO_MUCH, "an answer larger than any could be")
        return body


def left_until(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _size(text: str, base: int = 10) -> int:
    try:
        size = int(text, base)
    except ValueError:
        raise Problem(Kind.GARBLED, "an answer of no length") from None
    if not 0 <= size <= MAX_BODY:
        raise Problem(Kind.TOO_MUCH, "an answer larger than any could be")
    return size


def _unzip(body: bytes | bytearray) -> bytes:
    unpacking = zlib.decompressobj(31)
    try:
        plain = unpacking.decompress(body, MAX_BODY)
    except zlib.error:
        raise Problem(Kind.GARBLED, "an answer that can't be unpacked") from None
    if unpacking.unconsumed_tail or not unpacking.eof:
        raise Problem(Kind.GARBLED, "an answer that is packed badly")
    return plain
