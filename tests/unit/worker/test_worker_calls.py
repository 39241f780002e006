"""What a refused call of an operator means for its attempt."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.worker_tasks import held_task
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.contracts.operator_protocol import Call, EmitEvents, ListFiles, PublishRecords, Query
from tracelake.contracts.query_api import QueryRequest
from tracelake.domain.errors import Conflict, Invalid, TracelakeError
from tracelake.leases.held_task import HeldTask, Stop
from tracelake.worker.calls import Calls


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


class Heard:
    """A Dispatcher that takes what is published, and a Query Service that answers."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, str]] = []

    async def publish(self, body: Any, token: Any, **_: Any) -> Any:
        self.heard.append((body, token.reveal()))
        return {"accepted": len(body["records"]), "batch_id": None}

    async def ask(self, query: Any, token: Any, **_: Any) -> Any:
        self.heard.append((query, token.reveal()))
        return {"rows": [[1]]}


async def test_records_are_published_under_the_attempts_fence_and_by_its_token() -> None:
    held, platform = held_task(), Heard()
    client: Any = platform
    calls = Calls(held, client, None, None)
    for schema_hash in (None, "sha256:0"):
        action = PublishRecords(dataset="alerts", records=[{"a": 1}], schema_hash=schema_hash)
        reply = await calls.answer(Call(call_id=1, action=action))
        assert reply.value == {"accepted": 1, "batch_id": None}
    [(first, token), (second, _)] = platform.heard
    fence = {"task_id": held.task_id, "attempt": held.attempt, "lease_token": held.lease_token}
    assert first == {**fence, "dataset": "alerts", "records": [{"a": 1}]}
    assert second == {**first, "schema_hash": "sha256:0"}
    assert token == held.token.reveal()


async def test_a_query_goes_out_with_the_attempts_token_where_there_is_a_query_service() -> None:
    held, platform = held_task(), Heard()
    client: Any = platform
    ask = Call(call_id=1, action=Query(QueryRequest(sql="SELECT 1")))
    assert (await Calls(held, client, None, None, client).answer(ask)).value == {"rows": [[1]]}
    assert platform.heard == [(QueryRequest(sql="SELECT 1"), held.token.reveal())]
    without = await Calls(held, client, None, None).answer(ask)
    assert without.problem is not None
    assert without.problem.reason == "NotServed"
