"""A slot's process on the service's side: the template, its socket and its proofs.

``start_template`` returns a process once it has sent a ``SlotReady`` whose proof matches the template's pipe.
``Channel`` sends and receives frames without blocking. ``SlotOutput`` drains standard error of all slots and keeps
the end of it to explain a failure; it goes to the log and quotes no query, since a process closes its standard
error before it is given one.
"""

from __future__ import annotations

import asyncio
import hmac
import io
import os
import socket
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from tracelake.domain.errors import Unavailable
from tracelake.query.engine.attach import sealed_file
from tracelake.query.engine.confinement import Confinement, SlotProcess
from tracelake.query.engine.messages import (
    DESCRIPTORS_AT_ONCE,
    HEADER,
    LONGEST_MESSAGE,
    MESSAGE,
    PROOF_BYTES,
    ROWS,
    FromSlot,
    SlotReady,
    ToSlot,
    decode_from_slot,
    frame,
)

_START_SECONDS = 60.0
_KEPT_BYTES = 4096


class Template:
    def __init__(self, process: SlotProcess, channel: Channel, proofs: io.FileIO, turns: io.FileIO) -> None:
        self.process = process
        self.channel = channel
        self._proofs = proofs
        self._turns = turns

    def next_turn(self) -> None:
        """Let the template start the process for the next query: everything was sent to the last one. A process
        that pretends to be done early can't leave input of its own query to the next one. Raises OSError when the
        template is gone."""
        self._turns.write(b"n")

    def is_ready(self, message: FromSlot | bytearray) -> bool:
        """Whether the message is ``SlotReady`` of the new process for the next query. Call it once for each
        process. It never waits: the template writes the proof before it starts the process."""
        if not isinstance(message, SlotReady):
            return False
        proof = self._proofs.read(PROOF_BYTES)
        # A read from an empty pipe gives None, since the pipe doesn't block.
        return proof is not None and hmac.compare_digest(proof, message.proof)

    async def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self.process.kill()
        # Others wait for the same future, so a canceled caller must not cancel it.
        await asyncio.shield(self.process.ended)
        self.close()

    def close(self) -> None:
        self.channel.close()
        self._proofs.close()
        self._turns.close()


async def start_template(confinement: Confinement, output: SlotOutput) -> Template:
    process = await confinement.start(output.write_fd)
    template = Template(process, Channel(process.channel), *_send_handles(process.channel))
    try:
        async with asyncio.timeout(_START_SECONDS):
            if template.is_ready(await template.channel.receive()):
                return template
        raise UnexpectedMessage("not ready")
    except (TimeoutError, EOFError, OSError, UnexpectedMessage, msgspec.MsgspecError) as error:
        await template.end()
        why = output.take() or type(error).__name__
        raise Unavailable("QuerySlotFailed", f"a process for queries could not be started: {why}") from error
    except BaseException:
        # Canceled: the caller never learns of this process, so it is ended here.
        await template.end()
        raise


def _send_handles(channel: socket.socket) -> tuple[io.FileIO, io.FileIO]:
    """Sends the process its ends of the pipes for proofs and turns and the file to warm up with, and returns our
    ends. The process need not run yet: the socket keeps the descriptors."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    their_turns, our_turns = os.pipe2(os.O_CLOEXEC)
    # ``is_ready`` must not wait for a proof that never comes, nor a turn for a template that doesn't read.
    os.set_blocking(ours, False)
    os.set_blocking(our_turns, False)
    rows = sealed_file()
    try:
        # If the process has already ended, the first ``receive`` reports it.
        with suppress(BrokenPipeError):
            socket.send_fds(channel, [b"p"], [theirs, their_turns, rows])
    finally:
        for descriptor in (theirs, their_turns, rows):
            os.close(descriptor)
    return io.FileIO(ours, "rb"), io.FileIO(our_turns, "wb")


class UnexpectedMessage(Exception):
    """The slot sent a message that the protocol doesn't allow here."""


class Channel:
    """The service's end of a slot's socket. Raises EOFError or ConnectionError when the slot is gone."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._socket = connected
        self._loop = asyncio.get_running_loop()

    async def send(self, message: ToSlot) -> None:
        await self._loop.sock_sendall(self._socket, frame(message))

    async def send_descriptors(self, descriptors: Sequence[int]) -> None:
        for start in range(0, len(descriptors), DESCRIPTORS_AT_ONCE):
            some = descriptors[start : start + DESCRIPTORS_AT_ONCE]
            # The loop has no method that sends descriptors, so this waits by hand.
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

    async def receive(self, longest_rows: int = 0) -> FromSlot | bytearray:
        """A message, or rows as one Arrow IPC stream."""
        length, kind = HEADER.unpack(await self._read(HEADER.size))
        if kind not in (MESSAGE, ROWS) or length > (longest_rows if kind == ROWS else LONGEST_MESSAGE):
            raise UnexpectedMessage(f"a frame of kind {kind} with {length} bytes")
        body = await self._read(length)
        return body if kind == ROWS else decode_from_slot(body)

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


class SlotOutput:
    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._kept = b""
        self._loop = asyncio.get_running_loop()
        # A pipe that is never read fills up, and then blocks every slot that writes to it.
        self._loop.add_reader(self._read_fd, self._drain)

    def _drain(self) -> None:
        try:
            self._kept = (self._kept + os.read(self._read_fd, 65536))[-_KEPT_BYTES:]
        except BlockingIOError:
            return

    def take(self) -> str:
        self._drain()
        kept, self._kept = self._kept, b""
        return kept.decode(errors="replace").strip()

    def close(self) -> None:
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)
        os.close(self.write_fd)
