"""How much a worker takes in hand: as much as it can run, and ahead of that only while tasks are short."""

from __future__ import annotations

import asyncio

from tests.support.worker_tasks import held_task
from tracelake.leases.claim import MAX_AHEAD, Load


async def test_a_fresh_worker_claims_what_it_can_run_at_once() -> None:
    load = Load(3)
    assert load.room == 3
    load.add(held_task())
    assert load.room == 2


async def test_claims_run_ahead_of_tasks_that_take_milliseconds_and_of_no_others() -> None:
    load = Load(2)
    done = held_task()
    load.add(done)
    assert await load.next() is done
    load.ran(done, 0.001)
    assert load.room == 2 + MAX_AHEAD
    load.ran(done, 5.0)
    assert load.room == 2


async def test_what_waits_behind_a_long_task_is_handed_back_and_nothing_more_claimed_ahead() -> None:
    clock = 0.0
    load = Load(1, now=lambda: clock)
    first, second = held_task(), held_task()
    load.add(first)
    load.ran(await load.next(), 0.001)
    load.add(first)
    await load.next()
    load.add(second)
    assert load.room > 0
    assert load.take_overdue() == []
    clock = 2.0
    assert load.take_overdue() == [second]
    assert load.room == 0


async def test_a_runner_that_waits_gets_the_next_task() -> None:
    load = Load(1)
    turn = asyncio.create_task(load.next())
    await asyncio.sleep(0)
    held = held_task()
    load.add(held)
    assert await turn is held
    assert load.running == [held]


async def test_a_runner_that_was_cancelled_takes_no_task_with_it() -> None:
    load = Load(1)
    turn = asyncio.create_task(load.next())
    await asyncio.sleep(0)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)
    held = held_task()
    load.add(held)
    assert await load.next() is held
