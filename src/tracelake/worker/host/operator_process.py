"""One process that the operator host runs for the wrapper: its keeper, its channel and its end.

``HostedProcess`` holds a pidfd of the keeper, so that a kill never hits another process that got the same number;
the process ends with its keeper. ``OperatorProcess`` adds the channel. Sending never waits, so an operator that
doesn't read can't prevent its kill. Bytes that are no message of the protocol end the conversation.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from tracelake.contracts.operator_protocol import Finished, FromOperator, Ready, Run, ToOperator
from tracelake.domain.errors import Unavailable
from tracelake.kernel import ChildrenFile
from tracelake.sandbox.accounts import Account
from tracelake.worker.host.protocol import (
    Done,
    FromKeeper,
    Grant,
    ProcessEnded,
    ProcessStarted,
    ToKeeper,
    Withdraw,
    read_from_keeper,
    send_packet,
)
from tracelake.worker.operator.channel import (
    ChannelBroken,
    FrameStream,
    StreamBroken,
    StreamEnded,
    decode_from_operator,
    encode,
)

_T = TypeVar("_T")
HOST_GONE = -int(signal.SIGKILL)
"""The exit status of a process that ended together with its host."""
_STATUS_SECONDS = 1.0


class HostedProcess:
    """``gone`` gets the exit status once the process and everything that it left behind has ended."""

    def __init__(
        self,
        key: int,
        handle: int,
        line: socket.socket,
        order_kill: Callable[[int], None],
        *,
        account: Account | None,
        folder: Path,
    ) -> None:
        self.key = key
        self.pid = 0
        self.account = account
        self.folder = folder
        self.born: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._handle = handle
        self._order_kill = order_kill
        self._line = line
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Done]] = {}
        self._status: int | None = None
        line.setblocking(False)
        self._loop.add_reader(line, self._readable)

    async def kill(self) -> None:
        """Kill the process. Idempotent; once begun it is carried out even if the caller stops waiting."""
        if not self.gone.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            # Also through the host, which is ended itself if the process doesn't go.
            self._order_kill(self.key)
        await asyncio.shield(self.gone)

    async def grant(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Make folders below the object root, named relative to it, visible to the process."""
        await self._ask(Grant(next(self._numbers), list(reads), list(writes)))

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        """Withdraw folders; the result are those with a file open for writing, which stay unless ``force`` is
        set."""
        return (await self._ask(Withdraw(next(self._numbers), list(places), force))).busy

    async def over(self) -> None:
        """Record that the keeper has ended, also when the host can't report it."""
        seen = asyncio.Event()
        self._loop.add_reader(self._handle, seen.set)
        try:
            await seen.wait()
        finally:
            self._loop.remove_reader(self._handle)

    def ended(self, status: int) -> None:
        if self.gone.done():
            return
        # The keeper's last message, the exit status of the process itself, may still be unread.
        self._readable()
        self._loop.remove_reader(self._line)
        self._line.close()
        os.close(self._handle)
        gone = Unavailable("OperatorGone", "the process has ended")
        _fail(self.born, gone)
        for answer in self._asked.values():
            _fail(answer, gone)
        self.gone.set_result(status if self._status is None else self._status)

    async def _ask(self, order: ToKeeper) -> Done:
        if self.gone.done():
            raise Unavailable("OperatorGone", "the process has ended")
        answer: asyncio.Future[Done] = self._loop.create_future()
        self._asked[order.number] = answer
        try:
            send_packet(self._line, order)
            done = await answer
        except OSError as error:
            raise Unavailable("OperatorGone", f"sending to its keeper failed: {error.strerror}") from None
        finally:
            del self._asked[order.number]
        if done.problem is not None:
            raise Unavailable("ObjectsNotShown", f"objects can't be shown to the process: {done.problem}")
        return done

    def _readable(self) -> None:
        with suppress(BlockingIOError):
            while True:
                try:
                    received = read_from_keeper(self._line)
                except (ConnectionError, msgspec.MsgspecError):
                    received = None
                if received is None:
                    # The host reports the end once everything is gone.
                    self._loop.remove_reader(self._line)
                    return
                self._take(*received)

    def _take(self, message: FromKeeper, handles: list[int]) -> None:
        match message:
            case ProcessStarted():
                self.pid = _number(handles[0]) if handles else 0
                if not self.born.done():
                    self.born.set_result(None)
            case Done(number=number):
                if (answer := self._asked.get(number)) is not None and not answer.done():
                    answer.set_result(message)
            case ProcessEnded(status):
                self._status = status
        for handle in handles:
            os.close(handle)


class HostedProgram:
    def __init__(self, hosted: HostedProcess) -> None:
        self._hosted = hosted

    @property
    def pid(self) -> int:
        return self._hosted.pid

    @property
    def account(self) -> Account | None:
        return self._hosted.account

    async def grant(self, writes: Sequence[str]) -> None:
        await self._hosted.grant([], writes)

    async def withdraw(self, writes: Sequence[str], *, force: bool = False) -> list[str]:
        return await self._hosted.withdraw(writes, force=force)

    async def kill(self) -> None:
        await self._hosted.kill()

    async def wait(self) -> int:
        """The exit code, negative for a signal."""
        return await asyncio.shield(self._hosted.gone)


def _fail(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        # The future may have no waiter, which is no reason for a warning.
        future.exception()


def _number(handle: int) -> int:
    """The process's number in our namespace, which differs from its own; 0 if unknown."""
    try:
        with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return 0
    return max(0, int(fields.get("Pid", "0")))


class OperatorGone(Unavailable):
    """The process has ended, or can't be talked to any more."""

    def __init__(self, message: str) -> None:
        super().__init__("OperatorGone", message)


class OperatorProcess:
    """``runs`` counts its attempts; it is ``ready`` when it waits for another. ``source`` is where its operators
    were loaded from, and ``use`` the job that it belongs to since its first attempt (``operator_pool``)."""

    def __init__(self, hosted: HostedProcess, channel: socket.socket, source: str | None = None) -> None:
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
        """The process's own folder, which no other process sees."""
        return self.hosted.folder

    @property
    def owner(self) -> int | None:
        """The uid that it runs as; None for the wrapper's own user."""
        return None if self.hosted.account is None else self.hosted.account.uid

    async def grant(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Make folders below the object root, named relative to it, visible to the process."""
        await self.hosted.grant(reads, writes)

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        """Withdraw folders; the result are those with a file open for writing, which stay unless ``force`` is
        set."""
        return await self.hosted.withdraw(places, force=force)

    @property
    def alive(self) -> bool:
        return self._stream.end is None and not self.hosted.gone.done()

    async def run(self, run: Run, log_fd: int) -> None:
        """Send an attempt; ``log_fd`` stays the caller's."""
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
                # Bytes behind the message would be taken for a part of the next attempt.
                self.ready = self._stream.is_quiet
            case Finished():
                self.ready = message.reusable and not message.tidying and self._stream.is_quiet
        return message

    async def kill(self) -> None:
        """Kill the process group and everything that it left behind; returns when all of it has ended."""
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
        """The channel's end is noticed first, but the process's exit status says more."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_STATUS_SECONDS):
                status = await asyncio.shield(self.hosted.gone)
                return f"the operator process ended: {_ending(status)}"
        return f"the operator process can't go on: {ended}"


def _ending(status: int) -> str:
    if status == -signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out"
    return f"exit code {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
