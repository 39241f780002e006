"""The service's end of a slot's socket: frames out and in, descriptors out. Waits for the slot, never blocks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from tracelake.query.engine.messages import (
    DESCRIPTORS_AT_ONCE,
    HEADER,
    LONGEST_MESSAGE,
    ROWS,
    TOLD,
    Asked,
    Said,
    decode_said,
    frame,
)


class Garbled(Exception):
    """The slot said something that it has no reason to say."""


class Channel:
    """Raises EOFError or ConnectionError when the slot is gone."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    async def say(self, message: Asked) -> None:
        await self._loop.sock_sendall(self._socket, frame(message))

    async def pass_on(self, descriptors: Sequence[int]) -> None:
        for start in range(0, len(descriptors), DESCRIPTORS_AT_ONCE):
            some = descriptors[start : start + DESCRIPTORS_AT_ONCE]
            while not self._sent(some):
                await self._until_writable()

    def _sent(self, descriptors: Sequence[int]) -> bool:
        try:
            return socket.send_fds(self._socket, [b"d"], list(descriptors)) == 1
        except BlockingIOError:
            return False

    async def _until_writable(self) -> None:
        writable = asyncio.Event()
        self._loop.add_writer(self._socket, writable.set)
        try:
            await writable.wait()
        finally:
            self._loop.remove_writer(self._socket)

    async def hear(self, longest_rows: int = 0) -> Said | bytearray:
        """A message, or rows as one Arrow IPC stream."""
        length, kind = HEADER.unpack(await self._read(HEADER.size))
        if kind not in (TOLD, ROWS) or length > (longest_rows if kind == ROWS else LONGEST_MESSAGE):
            raise Garbled(f"a frame of kind {kind} with {length} bytes")
        body = await self._read(length)
        return body if kind == ROWS else decode_said(body)

    async def _read(self, size: int) -> bytearray:
        content = bytearray(size)
        view, done = memoryview(content), 0
        while done < size:
            count = await self._loop.sock_recv_into(self._socket, view[done:])
            if count == 0:
                raise EOFError
            done += count
        return content

    def close(self) -> None:
        self._socket.close()
