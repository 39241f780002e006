"""The wrapper's side of one attempt's conversation with its operator process.

Messages are read one after another. Calls and the end of the attempt take time, so they run beside the reader: a
call that waits for the Dispatcher never delays a cancel. An operator that must stop is asked first, unless its
time is over, and killed a moment later.
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
from tracelake.leases.held_task import HeldTask, Stop
from tracelake.settings import Secret
from tracelake.worker.calls import Calls
from tracelake.worker.host.operator_process import OperatorGone

CANCEL_GRACE = 2.0
_MAX_CALLS = 32
"""Concurrent calls of one operator; further ones stay unread until one is answered."""
_ASKED_FIRST = (Stop.CANCELED, Stop.RELEASED, Stop.OUTDATED, Stop.POOL_CHANGED)


class AttemptProcess(Protocol):
    """An operator process; see ``operator_process``. ``owner`` is the uid that it runs as, None for the wrapper's
    own. Objects are granted by their names relative to the object root."""

    @property
    def owner(self) -> int | None: ...

    async def grant(self, reads: Sequence[str], writes: Sequence[str]) -> None: ...

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]: ...

    async def run(self, run: Run, log_fd: int) -> None: ...

    async def receive(self) -> FromOperator: ...

    async def send(self, message: ToOperator) -> None: ...

    async def kill(self) -> None: ...


class ProtocolViolation(Exception):
    """The operator sent a message that isn't allowed at this point."""


class OperatorSession:
    """Runs one conversation; as the ``Control`` of its task it passes heartbeat answers on to the operator."""

    def __init__(
        self,
        held: HeldTask,
        process: AttemptProcess,
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
        self._sending: set[asyncio.Task[None]] = set()
        self._stopping: asyncio.Task[None] | None = None
        self._impatient = asyncio.Event()
        self._killing = False
        self.clean = False

    async def hold(self, run: Run, log_fd: int) -> Finished:
        """Run until the operator has finished. Raises ``OperatorGone`` or ``ProtocolViolation`` if it doesn't."""
        await self._process.run(run, log_fd)
        self._held.controlled_by(self)
        # It may have been stopped or paused while its process was being prepared.
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
                    raise ProtocolViolation(f"it sent {type(message).__name__} in the middle of an attempt")

    def stop(self, why: Stop) -> None:
        self._stopping = asyncio.create_task(self._stop(why))

    def kill(self) -> None:
        self._impatient.set()

    def pause(self, paused: bool) -> None:
        self._post(Pause(paused))

    def renew(self, token: Secret) -> None:
        self._post(Token(token.reveal()))

    async def _stop(self, why: Stop) -> None:
        if why in _ASKED_FIRST:
            # An operator that doesn't read gets no more time than one that does.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._grace):
                    await self._send(Cancel(str(why)))
                    await self._impatient.wait()
        # Before the kill: `_end` must wait for it and not cancel it half-way.
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
        """Wait until all events of the attempt are accepted, whether or not the operator waited for them."""
        for reply in await asyncio.gather(*self._answering):
            if reply.problem is not None:
                raise ProtocolViolation(
                    f"it finished without waiting for a call that was refused: {reply.problem.message}"
                )

    async def _send(self, message: ToOperator) -> None:
        # The reader notices a process that has ended.
        with suppress(OperatorGone):
            await self._process.send(message)

    def _post(self, message: ToOperator) -> None:
        sending = asyncio.create_task(self._send(message))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _end(self) -> None:
        """Wait for a kill that has begun; a message that was sent in part leaves a process that can't be talked
        to."""
        if self._stopping is not None:
            if not self._killing:
                self._stopping.cancel()
            await asyncio.wait([self._stopping])
        for answering in self._answering:
            answering.cancel()
        if self._sending:
            await asyncio.wait(self._sending, timeout=self._grace)
        unsent = [*self._answering, *self._sending]
        self.clean = self._stopping is None and not unsent
        for task in unsent:
            task.cancel()
        await asyncio.gather(*unsent, return_exceptions=True)
