"""Every task that a worker holds is kept alive, and what the Dispatcher says reaches it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.worker_tasks import held_task
from tracelake.contracts.dispatcher_api import HeartbeatRequest, HeartbeatResponse
from tracelake.domain.errors import Conflict, Invalid
from tracelake.leases.held_task import Heartbeats, Stop

FINE = HeartbeatResponse(None, cancel=False, pause=False)


class Dispatcher:
    def __init__(self, *answers: HeartbeatResponse | Exception) -> None:
        self.answers = list(answers)
        self.heard: list[HeartbeatRequest] = []

    async def __call__(self, beat: HeartbeatRequest, _timeout: float) -> HeartbeatResponse:
        self.heard.append(beat)
        answer = self.answers.pop(0) if self.answers else FINE
        if isinstance(answer, Exception):
            raise answer
        return answer


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_it_beats_on_until_the_task_is_let_go_whatever_is_answered() -> None:
    dispatcher = Dispatcher(FINE, Invalid("InvalidRequest", "what is this"))
    heartbeats = Heartbeats(dispatcher)
    held, other = held_task(heartbeat_timeout_seconds=0.04), held_task(heartbeat_timeout_seconds=0.02)
    heartbeats.keep(held)
    heartbeats.keep(other)
    await until(lambda: sum(beat.task_id == held.task_id for beat in dispatcher.heard) >= 3)
    heartbeats.let_go(held)
    count = sum(beat.task_id == held.task_id for beat in dispatcher.heard)
    await until(lambda: sum(beat.task_id == other.task_id for beat in dispatcher.heard) >= 10)
    assert sum(beat.task_id == held.task_id for beat in dispatcher.heard) == count
    heartbeats.close()


async def test_cancel_and_a_stale_fence_stop_the_attempt() -> None:
    for answer, why in (
        (HeartbeatResponse(None, cancel=True, pause=False), Stop.CANCELED),
        (Conflict("StaleAttempt", "there is a newer one"), Stop.SUPERSEDED),
    ):
        heartbeats = Heartbeats(Dispatcher(answer))
        held = held_task(heartbeat_timeout_seconds=0.04)
        heartbeats.keep(held)
        await until(lambda held=held: held.stopped is not None)
        assert held.stopped is why
        heartbeats.close()


async def test_a_task_that_was_reported_is_not_stopped_by_the_answer_to_a_late_heartbeat() -> None:
    dispatcher = Dispatcher(Conflict("StaleLease", "it is over"))
    heartbeats = Heartbeats(dispatcher)
    held = held_task(heartbeat_timeout_seconds=0.04)
    held.reported = True
    heartbeats.keep(held)
    await until(lambda: len(dispatcher.heard) > 1)
    assert held.stopped is None
    heartbeats.close()


async def test_progress_does_not_wait_for_a_quarter_of_the_lease() -> None:
    dispatcher = Dispatcher()
    heartbeats = Heartbeats(dispatcher)
    held = held_task()
    heartbeats.keep(held)
    held.progressed({"rows": 7})
    heartbeats.send_soon(held)
    await until(lambda: bool(dispatcher.heard))
    assert dispatcher.heard[0].progress == {"rows": 7}
    heartbeats.close()


async def test_the_last_progress_is_told_before_the_end() -> None:
    dispatcher = Dispatcher()
    heartbeats = Heartbeats(dispatcher)
    held = held_task()
    heartbeats.keep(held)
    held.progressed({"rows": 8})
    await heartbeats.flush(held)
    assert [beat.progress for beat in dispatcher.heard] == [{"rows": 8}]
    heartbeats.close()


async def test_progress_that_is_on_its_way_is_waited_for() -> None:
    dispatcher = Dispatcher()
    heartbeats = Heartbeats(dispatcher)
    held = held_task()
    heartbeats.keep(held)
    held.progressed({"rows": 9})
    heartbeats.send_soon(held)
    assert heartbeats.has_unsent(held)
    while held.has_progress:
        await asyncio.sleep(0)
    await heartbeats.flush(held)
    assert not heartbeats.has_unsent(held)
    assert [beat.progress for beat in dispatcher.heard] == [{"rows": 9}]
    heartbeats.close()


def test_progress_that_does_not_fit_on_a_row_is_cut_down() -> None:
    held = held_task()
    held.progressed(
        {"text": "x" * 10_000, "list": [1], "nan": float("nan"), "": 1, "ok": True, "big": 10**30}
    )
    progress = held.heartbeat().progress
    assert progress is not None
    assert progress["ok"] is True
    assert len(str(progress["text"])) == 500
    assert not {"list", ""} & progress.keys()
    held.progressed({f"key{number}": "x" * 400 for number in range(100)})
    progress = held.heartbeat().progress
    assert progress is not None
    assert len(progress) < 11
    held.progressed({"only": []})
    assert held.heartbeat().progress is None
