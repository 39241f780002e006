"""A completion is reported in one way by every lease holder, and each refusal has one consequence."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
import structlog

from tests.support.worker_tasks import held_task
from tracelake.contracts.dispatcher_api import CompleteRequest, CompleteResponse
from tracelake.domain.errors import Conflict, Invalid, NotFound, TracelakeError, Unavailable
from tracelake.leases.held_task import HeldTask
from tracelake.leases.report import CompletionReport, report_completion

log = structlog.get_logger(__name__)


class Dispatcher:
    """Answers with these errors in turn, then accepts."""

    def __init__(self, *refusals: TracelakeError) -> None:
        self.refusals = [*refusals]
        self.sent: list[CompleteRequest] = []

    def complete(self, completion: CompleteRequest) -> asyncio.Future[CompleteResponse]:
        answer: asyncio.Future[CompleteResponse] = asyncio.get_running_loop().create_future()
        self.sent.append(completion)
        if self.refusals:
            answer.set_exception(self.refusals.pop(0))
        else:
            answer.set_result(CompleteResponse(completion.task_id, completion.status))
        return answer


async def report(dispatcher: Dispatcher, held: HeldTask) -> CompletionReport:
    as_failure = partial(held.completion, "Failed")
    return await report_completion(dispatcher, held.completion("Completed"), log, as_failure=as_failure)


async def test_an_accepted_report_is_sent_once() -> None:
    dispatcher = Dispatcher()
    assert (await report(dispatcher, held_task())).is_accepted
    assert len(dispatcher.sent) == 1


async def test_a_refused_result_is_reported_as_a_failure_that_names_the_refusal() -> None:
    dispatcher = Dispatcher(Invalid("BadManifest", "no such file"))
    answer = await report(dispatcher, held_task())
    assert answer.is_accepted
    assert answer.completion.status == "Failed"
    assert [each.status for each in dispatcher.sent] == ["Completed", "Failed"]
    assert dispatcher.sent[1].error_message == "its result was refused (BadManifest): no such file"
    assert dispatcher.sent[1].retryable


async def test_a_result_that_every_attempt_would_be_refused_is_not_retried() -> None:
    dispatcher = Dispatcher(Invalid("PartitionOverlap", "blocks 0-10 lie within 0-99"))
    answer = await report(dispatcher, held_task())
    assert (answer.completion.status, answer.completion.retryable) == ("Failed", False)


@pytest.mark.parametrize("refusal", [Conflict("StaleAttempt", "x"), NotFound("NoSuchTask", "x")])
async def test_the_report_of_a_superseded_attempt_is_dropped(refusal: TracelakeError) -> None:
    dispatcher = Dispatcher(refusal)
    answer = await report(dispatcher, held_task())
    assert (answer.is_accepted, answer.is_answered) == (False, True)
    assert len(dispatcher.sent) == 1


async def test_a_failure_that_is_refused_is_not_sent_again() -> None:
    dispatcher = Dispatcher(Invalid("InvalidRequest", "x"), Invalid("InvalidRequest", "y"))
    answer = await report(dispatcher, held_task())
    assert (answer.is_accepted, answer.is_answered) == (False, True)
    assert len(dispatcher.sent) == 2


async def test_a_report_without_an_answer_is_no_refusal_of_its_result() -> None:
    dispatcher = Dispatcher(Unavailable("Closed", "the worker ends"))
    answer = await report(dispatcher, held_task())
    assert (answer.is_accepted, answer.is_answered) == (False, False)
    assert len(dispatcher.sent) == 1


async def test_a_holder_that_stops_waiting_sends_nothing_more() -> None:
    waiting: asyncio.Future[CompleteResponse] = asyncio.get_running_loop().create_future()
    held = held_task()
    sent: list[CompleteRequest] = []

    class Silent:
        def complete(self, completion: CompleteRequest) -> asyncio.Future[CompleteResponse]:
            sent.append(completion)
            return waiting

    outcome = report_completion(
        Silent(), held.completion("Completed"), log, as_failure=partial(held.completion, "Failed")
    )
    outcome.cancel()
    waiting.set_exception(Invalid("BadManifest", "too late"))
    await asyncio.sleep(0)
    assert len(sent) == 1
