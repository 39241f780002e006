"""A process that the operator host runs for us, its keeper, and its end.

The handle is a descriptor of the keeper itself, so that killing it never hits another process that got its number;
with its keeper a process ends.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from tracelake.accounts import Account
from tracelake.domain.errors import Unavailable
from tracelake.worker.host.protocol import (
    Born,
    Done,
    Ended,
    FromKeeper,
    Grant,
    ToKeeper,
    Withdraw,
    read_from_keeper,
    send_packet,
)

_T = TypeVar("_T")

HOST_GONE = -int(signal.SIGKILL)
"""The status of what ended together with its host."""


class Hosted:
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
        """Idempotent. Once begun it is carried through, also when the caller doesn't wait for it."""
        if not self.gone.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            self._order_kill(self.key)
        await asyncio.shield(self.gone)

    async def grant(self, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Folders below the object root, named from there, become visible to the process."""
        await self._ask(Grant(next(self._numbers), list(reads), list(writes)))

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        """Those in which something is open for writing: they stay, unless by ``force``."""
        return (await self._ask(Withdraw(next(self._numbers), list(places), force))).busy

    async def over(self) -> None:
        """The keeper has ended, whether somebody says so or not."""
        seen = asyncio.Event()
        self._loop.add_reader(self._handle, seen.set)
        try:
            await seen.wait()
        finally:
            self._loop.remove_reader(self._handle)

    def ended(self, status: int) -> None:
        if self.gone.done():
            return
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
            raise Unavailable("OperatorGone", f"its keeper doesn't listen: {error.strerror}") from None
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
                    # The host says that it is gone, once everything is.
                    self._loop.remove_reader(self._line)
                    return
                self._take(*received)

    def _take(self, message: FromKeeper, handles: list[int]) -> None:
        match message:
            case Born():
                self.pid = _number(handles[0]) if handles else 0
                if not self.born.done():
                    self.born.set_result(None)
            case Done(number=number):
                if (answer := self._asked.get(number)) is not None and not answer.done():
                    answer.set_result(message)
            case Ended(status):
                self._status = status
        for handle in handles:
            os.close(handle)


class HostedProgram:
    def __init__(self, hosted: Hosted) -> None:
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
        # Nobody may be waiting, which is no reason for a warning.
        future.exception()


def _number(handle: int) -> int:
    """The process's number here, which isn't the one that it has in its own namespace; 0 if nobody tells."""
    try:
        with open(f"/proc/self/fdinfo/{handle}", encoding="ascii") as file:
            told = dict(line.split(":", 1) for line in file if ":" in line)
    except OSError:
        return 0
    return max(0, int(told.get("Pid", "0")))
