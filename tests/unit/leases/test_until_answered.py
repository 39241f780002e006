"""A call is repeated while there is an outage, until it is answered or its time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Conflict, TracelakeError, Unavailable
from tracelake.leases.until_answered import is_server_fault, until_answered

QUICK = Backoff(0.001, 0.002)


def answers(*found: str | TracelakeError) -> Callable[[], asyncio.Future[str]]:
    left = list(found)

    def call() -> asyncio.Future[str]:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        match left.pop(0):
            case str() as text:
                answer.set_result(text)
            case error:
                answer.set_exception(error)
        return answer

    return call


async def test_an_outage_is_waited_out_and_its_begin_and_end_are_reported() -> None:
    seen: list[str] = []
    call = answers(Unavailable("Away", "first"), Unavailable("Away", "second"), "here")
    answer = await until_answered(
        call, QUICK, on_away=lambda error: seen.append(error.message), on_back=lambda: seen.append("back")
    )
    assert answer == "here"
    assert seen == ["first", "second", "back"]


async def test_a_refusal_is_an_answer() -> None:
    seen: list[str] = []
    with pytest.raises(Conflict):
        await until_answered(answers(Conflict("Stale", "no")), QUICK, on_back=lambda: seen.append("back"))
    assert seen == ["back"]


async def test_clients_also_wait_out_failures_of_the_server() -> None:
    broken = TracelakeError("Unexpected", "status 500 without a problem")
    with pytest.raises(TracelakeError, match="status 500"):
        await until_answered(answers(broken, "here"), QUICK)
    assert await until_answered(answers(broken, "here"), QUICK, is_outage=is_server_fault) == "here"


async def test_no_wait_begins_that_would_end_too_late() -> None:
    now = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match="once"):
        await until_answered(answers(Unavailable("Away", "once"), "late"), Backoff(60, 60), until=now + 1)
    assert asyncio.get_running_loop().time() - now < 1
