"""One attempt's conversation: calls beside messages, an end that is asked for before it is forced."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.worker_tasks import Script, ScriptedOperator, held_task
from tracelake.contracts.dispatcher_api import HeartbeatResponse
from tracelake.contracts.operator_protocol import (
    VERSION,
    Call,
    CallProblem,
    Cancel,
    EmitEvents,
    Finished,
    FromOperator,
    Pause,
    Progress,
    Ready,
    Reply,
    Run,
    Token,
    ToOperator,
)
from tracelake.leases.held_task import HeldTask, Stop
from tracelake.worker.host.operator_process import OperatorGone
from tracelake.worker.operator_session import OperatorSession, ProtocolViolation

DONE = Finished(status="Completed")


class Answers:
    """Stands where the calls are carried out; each waits until it is let."""

    def __init__(self, problem: CallProblem | None = None) -> None:
        self.problem = problem
        self.open = asyncio.Event()
        self.asked: list[int] = []

    async def answer(self, call: Call) -> Reply:
        self.asked.append(call.call_id)
        await self.open.wait()
        return Reply(call_id=call.call_id, problem=self.problem)


def converse(
    script: Script, answers: Any = None, grace: float = 30.0
) -> tuple[HeldTask, ScriptedOperator, asyncio.Task[Finished], OperatorSession]:
    held = held_task()
    operator = ScriptedOperator(script)
    conversation = OperatorSession(
        held, operator, answers or Answers(), on_progress=lambda _: None, grace=grace
    )
    run = Run(version=VERSION, task=held.payload, environment={})
    return held, operator, asyncio.create_task(conversation.hold(run, 0)), conversation


def says(*messages: FromOperator | Exception) -> Script:
    return lambda heard: messages if isinstance(heard, Run) else ()


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_an_operator_that_just_finishes_leaves_a_clean_process() -> None:
    _, operator, attempt, conversation = converse(says(DONE))
    assert await attempt == DONE
    assert conversation.clean
    assert not operator.was_killed


async def test_progress_is_kept_for_the_next_heartbeat_the_latest_alone() -> None:
    held, _, attempt, _ = converse(says(Progress({"rows": 1}), Progress({"rows": 2, "nested": {}}), DONE))
    await attempt
    assert held.heartbeat().progress == {"rows": 2}


async def test_a_call_that_waits_keeps_no_cancel_from_getting_through() -> None:
    def script(heard: ToOperator) -> Sequence[FromOperator | Exception]:
        match heard:
            case Run():
                return (Call(1, EmitEvents([])),)
            case Cancel():
                return (Finished(status="Canceled"),)
        return ()

    answers = Answers()
    held, operator, attempt, conversation = converse(script, answers)
    await turns()
    assert answers.asked == [1]
    held.stop(Stop.CANCELED)
    await turns()
    answers.open.set()
    assert (await attempt).status == "Canceled"
    assert not conversation.clean
    assert not operator.was_killed


async def test_an_operator_that_ignores_a_cancel_is_killed() -> None:
    held, operator, attempt, _ = converse(says(), grace=0.01)
    await turns()
    held.stop(Stop.CANCELED)
    with pytest.raises(OperatorGone):
        await attempt
    assert isinstance(operator.received[-1], Cancel)
    assert operator.was_killed


async def test_no_patience_ends_the_grace_at_once() -> None:
    held, operator, attempt, _ = converse(says())
    await turns()
    held.stop(Stop.RELEASED)
    await turns()
    assert not operator.was_killed
    held.kill()
    with pytest.raises(OperatorGone):
        await attempt


@pytest.mark.parametrize("why", [Stop.TIMED_OUT, Stop.SUPERSEDED, Stop.ENGINE_LOST])
async def test_who_has_no_time_left_is_killed_without_being_asked(why: Stop) -> None:
    held, operator, attempt, _ = converse(says())
    await turns()
    held.stop(why)
    with pytest.raises(OperatorGone):
        await attempt
    assert [type(heard) for heard in operator.received] == [Run]


async def test_a_cancel_that_came_before_the_start_is_not_forgotten() -> None:
    held, operator, attempt, _ = converse(says(), grace=0.01)
    held.stop(Stop.CANCELED)
    with pytest.raises(OperatorGone):
        await attempt
    assert operator.was_killed


async def test_pause_and_a_fresh_token_reach_the_operator() -> None:
    held, operator, attempt, _ = converse(lambda heard: (DONE,) if isinstance(heard, Token) else ())
    await turns()
    for _ in range(2):
        held.apply_heartbeat(HeartbeatResponse(None, cancel=False, pause=True))
    held.apply_heartbeat(HeartbeatResponse(None, cancel=False, pause=True, capability_token="fresh"))
    assert await attempt == DONE
    assert operator.received[1:] == [Pause(True), Token("fresh")]
    assert held.token.reveal() == "fresh"


async def test_it_is_not_done_before_its_calls_are_accepted() -> None:
    answers = Answers()
    _, _, attempt, _ = converse(says(Call(1, EmitEvents([])), DONE), answers)
    await turns()
    assert not attempt.done()
    answers.open.set()
    assert await attempt == DONE


async def test_who_finishes_without_waiting_for_a_refusal_has_failed() -> None:
    answers = Answers(CallProblem(403, "NotYourDataset", "that isn't yours"))
    answers.open.set()
    _, _, attempt, _ = converse(says(Call(1, EmitEvents([])), DONE), answers)
    with pytest.raises(ProtocolViolation, match="that isn't yours"):
        await attempt


async def test_a_message_that_makes_no_sense_ends_the_attempt() -> None:
    _, _, attempt, _ = converse(says(Ready(1, [])))
    with pytest.raises(ProtocolViolation, match="Ready"):
        await attempt


async def test_a_flood_of_calls_is_left_unread_until_some_are_answered() -> None:
    answers = Answers()
    calls = [Call(number, EmitEvents([])) for number in range(100)]
    _, _, attempt, _ = converse(says(*calls, DONE), answers)
    await turns()
    assert len(answers.asked) == 32
    answers.open.set()
    assert await attempt == DONE
    assert len(answers.asked) == 100
