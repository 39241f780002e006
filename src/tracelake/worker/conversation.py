"""The wrapper's side of one attempt's conversation with its operator process.

Messages are read one after another; what takes time, the operator's calls and its end, happens beside, so that a
call that waits for the Dispatcher never keeps a cancel from getting through. An operator that must stop is asked
first, unless its time is over, and killed a moment later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from tracelake.contracts.operator_protocol import (
    Call,
    Cancel,
    Finished,
    FromOperator,
    Pause,
    Progress,
    Reply,
    Run,
    Token,
    ToOperator,
)
from tracelake.secret import Secret
from tracelake.worker.calls import Calls
from tracelake.worker.held_task import HeldTask, Stop
from tracelake.worker.host.operator_process import OperatorGone

CANCEL_GRACE = 2.0
_MAX_CALLS = 32
"""Calls of one operator under way at once; more are left unread until one is answered."""
_ASKED_FIRST = (Stop.CANCELED, Stop.RELEASED, Stop.OUTDATED, Stop.POOL_CHANGED)


class Process(Protocol):
    """An operator process; see ``operator_process``. ``owner`` is the uid that it runs as, None for the wrapper's
    own; what it sees of the objects it is granted, by names from their root."""

    @property
    def owner(self) -> int | None: ...

    async def grant(self, reads: Sequence[str], writes: Sequence[str]) -> None: ...

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]: ...

    async def run(self, run: Run, log_fd: int) -> None: ...

    async def receive(self) -> FromOperator: ...

    async def send(self, message: ToOperator) -> None: ...

    async def kill(self) -> None: ...


class OperatorMisbehaved(Exception):
    """It said something that makes no sense at this point."""


class Conversation:
    """Also the ``Control`` of its task: the heartbeats' word reaches the operator through it."""

    def __init__(
        self,
        held: HeldTask,
        process: Process,
        calls: Calls,
        *,
        on_progress: Callable[[HeldTask], None],
        grace: float = CANCEL_GRACE,
    ) -> None:
        self._held = held
        self._process = process
        self._calls = calls
        self._on_progress = on_progress
        self._grace = grace
        self._answering: set[asyncio.Task[Reply]] = set()
        self._telling: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._impatient = asyncio.Event()
        self._killing = False
        self.clean = False

    async def hold(self, run: Run, log_fd: int) -> Finished:
        """Until the operator has finished. Raises ``OperatorGone`` or ``OperatorMisbehaved`` when it doesn't."""
        await self._process.run(run, log_fd)
        self._held.controlled_by(self)
        if self._held.stopped is not None:
            self.stop(self._held.stopped)
        elif self._held.paused:
            self.pause(True)
        try:
            finished = await self._read()
            await self._all_accepted()
            return finished
        finally:
            self._held.controlled_by(None)
            await self._end()

    async def _read(self) -> Finished:
        receive = self._process.receive
        while True:
            message = await receive()
            match message:
                case Progress():
                    self._held.progressed(message.fields)
                    self._on_progress(self._held)
                case Call():
                    await self._begin_call(message)
                case Finished():
                    return message
                case _:
                    raise OperatorMisbehaved(f"it said {type(message).__name__} in the middle of an attempt")

    def stop(self, why: Stop) -> None:
        self._stopping = asyncio.create_task(self._stop(why))

    def kill(self) -> None:
        self._impatient.set()

    def pause(self, paused: bool) -> None:
        self._tell(Pause(paused))

    def renew(self, token: Secret) -> None:
        self._tell(Token(token.reveal()))

    async def _stop(self, why: Stop) -> None:
        if why in _ASKED_FIRST:
            # One that doesn't listen gets no longer than one that does.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace):
                    await self._send(Cancel(str(why)))
                    await self._impatient.wait()
        self._killing = True
        await self._process.kill()

    async def _begin_call(self, call: Call) -> None:
        if len(self._answering) >= _MAX_CALLS:
            await asyncio.wait(self._answering, return_when=asyncio.FIRST_COMPLETED)
        task = asyncio.create_task(self._answer(call))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answer(self, call: Call) -> Reply:
        reply = await self._calls.answer(call)
        await self._send(reply)
        return reply

    async def _all_accepted(self) -> None:
        """A task is completed only after all that it said was accepted, whether it waited for that or not."""
        for reply in await asyncio.gather(*self._answering):
            if reply.problem is not None:
                raise OperatorMisbehaved(
                    f"it finished without waiting for a call that was refused: {reply.problem.message}"
                )

    async def _send(self, message: ToOperator) -> None:
        # Who has gone is noticed by the reader.
        with suppress(OperatorGone):
            await self._process.send(message)

    def _tell(self, message: ToOperator) -> None:
        telling = asyncio.create_task(self._send(message))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _end(self) -> None:
        """A kill that has begun is carried through. Half a message leaves a process that nobody can speak to."""
        if self._stopping is not None:
            if not self._killing:
                self._stopping.cancel()
            await asyncio.wait([self._stopping])
        for answering in self._answering:
            answering.cancel()
        if self._telling:
            await asyncio.wait(self._telling, timeout=self._grace)
        unsaid = [*self._answering, *self._telling]
        self.clean = self._stopping is None and not unsaid
        for task in unsaid:
            task.cancel()
        await asyncio.gather(*unsaid, return_exceptions=True)
