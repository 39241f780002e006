"""What a refused call of an operator means for its attempt."""

from __future__ import annotations

from typing import Any

import pytest

from tracelake.contracts.dispatcher_api import EventIn
from tracelake.contracts.operator_protocol import Call, EmitEvents, ListFiles
from tracelake.domain.errors import Conflict, Invalid, TracelakeError
from tracelake.testing.worker_tasks import held_task
from tracelake.worker.calls import Calls
from tracelake.worker.held_task import HeldTask, Stop


class Refusing:
    """A Dispatcher that refuses whatever it is asked."""

    def __init__(self, error: TracelakeError) -> None:
        self._error = error

    async def events(self, *_: Any, **__: Any) -> Any:
        raise self._error

    async def task_inputs(self, *_: Any, **__: Any) -> Any:
        raise self._error


async def refused(error: TracelakeError, action: EmitEvents | ListFiles) -> HeldTask:
    held = held_task()
    client: Any = Refusing(error)
    reply = await Calls(held, client, None, None).answer(Call(call_id=1, action=action))
    assert reply.problem is not None
    assert reply.problem.reason == error.reason
    return held


@pytest.mark.parametrize(
    ("reason", "why"),
    [
        ("Canceled", Stop.CANCELED),
        ("StaleAttempt", Stop.SUPERSEDED),
        ("StaleLease", Stop.SUPERSEDED),
        ("InputChanged", Stop.OUTDATED),
    ],
)
@pytest.mark.parametrize("action", [EmitEvents(events=[EventIn(cursor=7)]), ListFiles(input_index=0)])
async def test_an_attempt_that_no_longer_counts_is_stopped(
    reason: str, why: Stop, action: EmitEvents | ListFiles
) -> None:
    """After a reorg above all: the attempt is handed back at once, and isn't a failure that is waited after."""
    assert (await refused(Conflict(reason, "no"), action)).stopped is why


async def test_any_other_refusal_is_the_operators_to_deal_with() -> None:
    held = await refused(Invalid("BadEvent", "no"), EmitEvents(events=[EventIn(cursor=7)]))
    assert held.stopped is None
