"""What is reported of an attempt, from what its operator said and why it was stopped."""

from __future__ import annotations

import pytest

from tests.support.worker_tasks import held_task
from tracelake.contracts.dispatcher_api import EventIn
from tracelake.contracts.operator_protocol import Finished
from tracelake.leases.held_task import HeldTask, Stop, sendable
from tracelake.leases.report import conclude

COMPLETED = Finished(status="Completed")


def stopped(why: Stop) -> HeldTask:
    held = held_task(timeout_seconds=7)
    held.stop(why)
    return held


@pytest.mark.parametrize("finished", [None, COMPLETED, Finished(status="Failed")])
def test_nobody_waits_for_the_report_of_a_superseded_attempt(finished: Finished | None) -> None:
    assert conclude(stopped(Stop.SUPERSEDED), finished, "killed") is None


@pytest.mark.parametrize(
    ("why", "status", "said"),
    [
        (Stop.CANCELED, "Canceled", None),
        (Stop.RELEASED, "Released", None),
        (Stop.OUTDATED, "Released", None),
        (Stop.TIMED_OUT, "Failed", "timed out: it ran longer than its timeout_seconds, 7 s"),
        (Stop.ENGINE_LOST, "Failed", "the Spark server that it ran on has ended"),
    ],
)
def test_who_was_stopped_is_reported_by_why(why: Stop, status: str, said: str | None) -> None:
    for finished in (None, Finished(status="Failed", error_message="interrupted", retryable=False)):
        report = conclude(stopped(why), finished, "killed by SIGKILL")
        assert report is not None
        assert (report.status, report.error_message, report.retryable) == (status, said, True)


@pytest.mark.parametrize("why", [Stop.RELEASED, Stop.TIMED_OUT, Stop.ENGINE_LOST])
def test_who_finished_all_the_same_has_finished(why: Stop) -> None:
    report = conclude(stopped(why), COMPLETED, "")
    assert report is not None
    assert report.status == "Completed"


def test_the_first_reason_to_stop_stands() -> None:
    held = stopped(Stop.TIMED_OUT)
    held.stop(Stop.CANCELED)
    assert held.stopped is Stop.TIMED_OUT


@pytest.mark.parametrize("message", [None, "", " \n", "\0"])
def test_a_failure_without_a_message_still_says_whose_it_is(message: str | None) -> None:
    report = conclude(held_task(), Finished(status="Failed", error_message=message), "")
    assert report is not None
    assert report.error_message == "operator noop failed without an error message"


def test_an_operator_that_died_fails_retryably_with_how_it_ended() -> None:
    report = conclude(held_task(), None, "killed by SIGKILL")
    assert report is not None
    assert (report.status, report.error_message, report.retryable) == ("Failed", "killed by SIGKILL", True)


def test_a_completion_carries_as_many_events_as_it_may() -> None:
    events = [EventIn(cursor=number) for number in range(1500)]
    report = conclude(held_task(), Finished(status="Completed", events=events), "")
    assert report is not None
    assert report.events == events[500:]


def test_of_a_long_text_both_ends_are_sent() -> None:
    text = sendable("begin" + "x" * 100_000 + "\udc80\0end")
    assert text.startswith("begin")
    assert text.endswith("?end")
    assert len(text) < 17_000
