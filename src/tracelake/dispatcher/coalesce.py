"""Calls that come at once share a transaction, so that they share its commit.

A call that finds nobody waiting runs at once and alone; under load the next transaction takes everything that
has gathered meanwhile. Each call gets its own answer or its own error; when a whole batch fails for a reason
that may be one call's alone, each is tried by itself.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from tracelake.domain.errors import TracelakeError, Unavailable

Q = TypeVar("Q")
A = TypeVar("A")


class Coalescer(Generic[Q, A]):
    """``run`` answers a batch in order, a refused call with the error that it gets."""

    def __init__(
        self,
        run: Callable[[Sequence[Q]], Awaitable[Sequence[A | TracelakeError]]],
        *,
        max_batch: int = 64,
        max_running: int = 2,
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self._max_running = max_running
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, request: Q) -> A:
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if len(self._running) < self._max_running:
            self._running.add(asyncio.create_task(self._drain()))
        return await future

    async def _drain(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        try:
            while self._waiting:
                size = min(len(self._waiting), self._max_batch)
                batch = [self._waiting.popleft() for _ in range(size)]
                await self._answer(batch)
        finally:
            # Here and not by a callback, which comes later: whoever hears an answer may call again at once, and
            # must not count one that has stopped looking.
            self._running.discard(worker)

    async def _answer(self, batch: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._run([request for request, _ in batch])
        except Unavailable as error:
            _fail(batch, error)
        except Exception as error:
            if len(batch) == 1:
                _fail(batch, error)
            for entry in batch if len(batch) > 1 else ():
                await self._answer([entry])
        except BaseException as error:
            _fail(batch, error)
            raise
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, TracelakeError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


def _fail(batch: Sequence[tuple[Q, asyncio.Future[A]]], error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
