"""Completions travel together and are answered each on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from tests.support.worker_tasks import held_task
from tracelake.contracts.dispatcher_api import MAX_BATCH, CompleteRequest, CompleteResponse
from tracelake.domain.errors import Conflict, Invalid, Unavailable
from tracelake.leases.dispatcher_client import Completions, Sent


class Dispatcher:
    """Answers when it is let; ``refused`` by error message."""

    def __init__(self) -> None:
        self.calls: list[list[CompleteRequest]] = []
        self.open = asyncio.Event()

    async def __call__(self, bodies: Sequence[bytes]) -> list[Sent]:
        asked = [msgspec.json.decode(body, type=CompleteRequest) for body in bodies]
        self.calls.append(asked)
        await self.open.wait()
        if len(asked) > 1 and any(each.error_message == "malformed" for each in asked):
            raise Invalid("InvalidRequest", "one of them")
        return [self.answer(each) for each in asked]

    def answer(self, asked: CompleteRequest) -> Sent:
        if asked.error_message == "stale":
            return Conflict("StaleAttempt", "no longer the current one")
        if asked.error_message == "malformed":
            return Invalid("InvalidRequest", "this one")
        return CompleteResponse(asked.task_id, asked.status)


def failed(said: str | None = None) -> CompleteRequest:
    return held_task().completion("Failed", said)


async def test_the_first_goes_out_alone_and_what_comes_meanwhile_goes_together() -> None:
    dispatcher = Dispatcher()
    completions = Completions(dispatcher)
    answers = [completions.submit(failed())]
    await asyncio.sleep(0)
    answers += [completions.submit(failed()) for _ in range(5)]
    await asyncio.sleep(0)
    dispatcher.open.set()
    await asyncio.gather(*answers)
    assert [len(call) for call in dispatcher.calls] == [1, 5]


async def test_a_batch_is_no_larger_than_the_dispatcher_takes_and_a_crowd_gets_a_second_call() -> None:
    dispatcher = Dispatcher()
    completions = Completions(dispatcher)
    answers = [completions.submit(failed())]
    await asyncio.sleep(0)
    answers += [completions.submit(failed()) for _ in range(MAX_BATCH + 1)]
    await asyncio.sleep(0)
    assert [len(call) for call in dispatcher.calls] == [1, MAX_BATCH]
    dispatcher.open.set()
    await asyncio.gather(*answers)
    assert [len(call) for call in dispatcher.calls] == [1, MAX_BATCH, 1]


async def test_each_is_refused_on_its_own() -> None:
    dispatcher = Dispatcher()
    dispatcher.open.set()
    completions = Completions(dispatcher)
    answers = [completions.submit(failed(said)) for said in ("one", "stale", "two")]
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [CompleteResponse, Conflict, CompleteResponse]


async def test_one_that_spoils_its_batch_is_refused_alone() -> None:
    dispatcher = Dispatcher()
    dispatcher.open.set()
    completions = Completions(dispatcher)
    answers = [completions.submit(failed(said)) for said in ("one", "malformed", "two")]
    outcomes = await asyncio.gather(*answers, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [CompleteResponse, Invalid, CompleteResponse]


async def test_what_is_unanswered_at_the_end_is_given_up_and_nobody_waits_for_ever() -> None:
    completions = Completions(Dispatcher())
    answers = [completions.submit(failed()) for _ in range(3)]
    await asyncio.sleep(0)
    await completions.close()
    for answer in (*answers, completions.submit(failed())):
        with pytest.raises(Unavailable):
            await answer


async def test_one_that_follows_from_the_answer_to_another_goes_out_too() -> None:
    dispatcher = Dispatcher()
    dispatcher.open.set()
    completions = Completions(dispatcher)

    async def tell() -> CompleteResponse:
        try:
            return await completions.submit(failed("malformed"))
        except Invalid:
            return await completions.submit(failed("what was refused"))

    async with asyncio.timeout(10):
        await tell()
    assert [call[0].error_message for call in dispatcher.calls] == ["malformed", "what was refused"]
