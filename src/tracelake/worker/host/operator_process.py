"""One operator process as the wrapper sees it: a channel to talk over, and a way to end it.

An operator that doesn't listen can't keep the wrapper from killing it: sending never waits. Whatever it says that
isn't a message of the protocol ends the conversation.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path

from tracelake.contracts.operator_protocol import Finished, FromOperator, Ready, Run, ToOperator
from tracelake.domain.errors import Unavailable
from tracelake.worker.host.frame_stream import FrameStream, StreamBroken, StreamEnded
from tracelake.worker.host.hosted import Hosted
from tracelake.worker.host.process_tree import ChildrenFile
from tracelake.worker.operator.channel import ChannelBroken, decode_from_operator, encode

_STATUS_SECONDS = 1.0


class OperatorGone(Unavailable):
    """The process has ended, or can't be talked to any more."""

    def __init__(self, message: str) -> None:
        super().__init__("OperatorGone", message)


class OperatorProcess:
    """``runs`` counts the attempts that it was given; it is ``ready`` when it waits for another. ``source`` is what
    it has loaded operators from, and ``use`` whose it is since its first attempt (``operator_pool``)."""

    def __init__(self, hosted: Hosted, channel: socket.socket, source: str | None = None) -> None:
        self.hosted = hosted
        self.source = source
        self.use: Hashable | None = None
        self.runs = 0
        self.ready = False
        self.children = ChildrenFile(hosted.pid)
        self._stream = FrameStream(channel)
        hosted.gone.add_done_callback(lambda _: self._gone())

    @property
    def pid(self) -> int:
        return self.hosted.pid

    @property
    def folder(self) -> Path:
        """Its own, seen by nobody else."""
        return self.hosted.folder

    @property
    def owner(self) -> int | None:
        """The uid that it runs as; None when it's the wrapper's own user."""
        return None if self.hosted.account is None else self.hosted.account.uid

    async def grant(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Show it folders below the object root, named from there."""
        await self.hosted.grant(reads, writes)

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        """Those in which it has something open for writing: they stay, unless by ``force``."""
        return await self.hosted.withdraw(places, force=force)

    @property
    def alive(self) -> bool:
        return self._stream.end is None and not self.hosted.gone.done()

    async def run(self, run: Run, log_fd: int) -> None:
        """``log_fd`` stays the caller's."""
        self.runs += 1
        self.ready = False
        self._send(encode(run), (log_fd,))

    async def send(self, message: ToOperator) -> None:
        self._send(encode(message))

    async def receive(self) -> FromOperator:
        try:
            body = await self._stream.receive()
        except StreamBroken as broken:
            raise OperatorGone(f"the operator process can't go on: {broken}") from None
        except StreamEnded as ended:
            raise OperatorGone(await self._why(str(ended))) from None
        try:
            message = decode_from_operator(body)
        except ChannelBroken as error:
            self._stream.close(f"it sent {error}")
            raise OperatorGone(f"it sent {error}") from None
        match message:
            case Ready():
                self.ready = self._stream.is_quiet
            case Finished():
                self.ready = message.reusable and not message.tidying and self._stream.is_quiet
        return message

    async def kill(self) -> None:
        """The whole process group and everything that it left behind; returns when all of it is gone."""
        try:
            await self.hosted.kill()
        finally:
            self._stream.close("it was killed")

    def _gone(self) -> None:
        self.children.close()
        self._stream.close_at_its_end()

    def _send(self, body: bytes, descriptors: tuple[int, ...] = ()) -> None:
        try:
            self._stream.send(body, descriptors)
        except StreamEnded as ended:
            raise OperatorGone(str(ended)) from None

    async def _why(self, ended: str) -> str:
        """The channel's end is noticed first, but the process's own end says more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_SECONDS):
                status = await asyncio.shield(self.hosted.gone)
                return f"the operator process ended: {_ending(status)}"
        return f"the operator process can't go on: {ended}"


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out"
    return f"exit code {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
