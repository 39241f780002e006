"""The Dispatcher's own attempts are reported like those of every lease holder, refusals included."""

from __future__ import annotations

from typing import Any, cast
from uuid import uuid4

import pytest
import structlog

from tracelake.contracts.dispatcher_api import CompleteRequest, CompleteResponse
from tracelake.dispatcher.dispatch import Dispatch, OwnCompletions
from tracelake.domain.errors import Conflict, Invalid, TracelakeError, Unavailable
from tracelake.domain.task import Fence

FENCE = Fence(uuid4(), 2, uuid4())
DONE = CompleteRequest.of(FENCE, "Completed")
LOG: Any = structlog.get_logger(__name__)


class Steps:
    """Answers completions with the errors of ``refusals``, then accepts."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.sent: list[CompleteRequest] = []

    async def complete(self, request: CompleteRequest) -> CompleteResponse:
        self.sent.append(request)
        if self.refusals:
            raise self.refusals.pop(0)
        return CompleteResponse(request.task_id, request.status, request.attempt)


def reporting(steps: Steps, *, stopping: bool = False) -> OwnCompletions:
    return OwnCompletions(cast(Dispatch, steps), lambda: stopping)


def as_failure(why: str) -> CompleteRequest:
    return CompleteRequest.of(FENCE, "Failed", why, retryable=False)


async def test_a_refused_result_becomes_a_failure_that_names_the_refusal() -> None:
    steps = Steps(Invalid("TooMany", "too many events"))
    report = await reporting(steps).report(DONE, LOG, as_failure=as_failure)
    assert report.is_accepted
    assert [each.status for each in steps.sent] == ["Completed", "Failed"]
    assert steps.sent[1].error_message == "its result was refused (TooMany): too many events"
    assert not steps.sent[1].retryable


@pytest.mark.parametrize("refusal", [Conflict("StaleAttempt", "superseded"), Invalid("TooMany", "again")])
async def test_a_superseded_attempt_and_a_refused_failure_are_dropped(refusal: TracelakeError) -> None:
    steps = Steps(refusal)
    failed = CompleteRequest.of(FENCE, "Failed", "why")
    report = await reporting(steps).report(failed, LOG, as_failure=as_failure)
    assert (report.is_accepted, report.refusal) == (False, refusal)
    assert len(steps.sent) == 1


async def test_an_outage_is_waited_out_unless_the_process_stops() -> None:
    steps = Steps(Unavailable("Away", "no database"))
    assert (await reporting(steps).report(DONE, LOG)).is_accepted
    assert len(steps.sent) == 2
    stopped = Steps(Unavailable("Away", "no database"))
    assert not (await reporting(stopped, stopping=True).report(DONE, LOG)).is_answered
    assert len(stopped.sent) == 1


async def test_a_bug_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        await reporting(Steps(ZeroDivisionError())).report(DONE, LOG)
