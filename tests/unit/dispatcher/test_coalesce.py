"""Calls that share a transaction: whoever calls again at once is heard too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tracelake.dispatcher.dispatch import Coalescer


async def test_calls_that_follow_from_answers_of_the_same_moment_are_answered() -> None:
    opened = asyncio.Event()

    async def run(asked: Sequence[int]) -> list[int]:
        await opened.wait()
        return [each + 1 for each in asked]

    coalescer: Coalescer[int, int] = Coalescer(run, max_batch=1, max_running=2)

    async def twice(number: int) -> int:
        return await coalescer.submit(await coalescer.submit(number))

    async with asyncio.timeout(10):
        calls = [asyncio.create_task(twice(number)) for number in (10, 20)]
        await asyncio.sleep(0)
        opened.set()
        assert await asyncio.gather(*calls) == [12, 22]
