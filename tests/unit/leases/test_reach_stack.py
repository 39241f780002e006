"""How a worker finds the stack at its start: the Dispatcher first, then the queue."""

from __future__ import annotations

import asyncio
from typing import cast

from tracelake.domain.errors import Invalid, Unavailable
from tracelake.leases.claim import reach_stack
from tracelake.leases.dispatcher_client import DispatcherClient
from tracelake.queue.base import Queue


class _StartingDispatcher:
    def __init__(self) -> None:
        self.ready = asyncio.Event()

    async def check(self) -> None:
        await self.ready.wait()


async def test_the_queue_is_opened_once_the_dispatcher_answers_since_it_makes_the_login() -> None:
    dispatcher = _StartingDispatcher()
    opened = cast(Queue, object())

    async def open_queue() -> Queue:
        if not dispatcher.ready.is_set():
            raise Invalid("QueueRefused", "the queue's database refuses the login")
        return opened

    reaching = asyncio.create_task(reach_stack(cast(DispatcherClient, dispatcher), open_queue, "ecs_spark"))
    done, _ = await asyncio.wait([reaching], timeout=0.05)
    assert not done
    dispatcher.ready.set()
    assert await reaching is opened


async def test_a_queue_that_is_away_is_opened_when_it_is_back() -> None:
    dispatcher = _StartingDispatcher()
    dispatcher.ready.set()
    opened = cast(Queue, object())
    answers = iter([Unavailable("QueueUnavailable", "no answer"), opened])

    async def open_queue() -> Queue:
        answer = next(answers)
        if isinstance(answer, Unavailable):
            raise answer
        return cast(Queue, answer)

    assert await reach_stack(cast(DispatcherClient, dispatcher), open_queue, "sink") is opened
