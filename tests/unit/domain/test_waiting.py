"""Every queued task has one reason, in the order in which a claim would refuse it."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tracelake.domain.chain_status import PauseFact
from tracelake.domain.waiting import QueuedFacts, WaitCause, why_waiting

NOW = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
READY = QueuedFacts(now=NOW, runtime="ecs_python", ready_at=NOW, woken_at=NOW, workers=2, slots=4)
PAUSED = replace(READY, job_paused=True, pauses=[PauseFact("person", "ann", NOW - timedelta(hours=1))])
LATER = replace(READY, ready_at=NOW + timedelta(minutes=1), last_error="no route")


@pytest.mark.parametrize(
    ("task", "cause", "words"),
    [
        (replace(READY, job_active=False), WaitCause.JOB_RETIRED, "removed by a deploy"),
        (PAUSED, WaitCause.JOB_PAUSED, "its job is paused by ann (cause: person)"),
        (replace(READY, superseded=True), WaitCause.LATER_TASK, "a later task"),
        (replace(READY, not_committed=["logs"]), WaitCause.INPUTS, "isn't committed again in logs"),
        (LATER, WaitCause.RETRY_TIME, "has not come; the last attempt: no route"),
        (replace(READY, earlier_task=True), WaitCause.EARLIER_TASK, "earlier task"),
        (replace(READY, cap=2, running=2), WaitCause.CAP_FULL, "runs 2 tasks of at most 2"),
        (replace(READY, undelivered="the queue is away"), WaitCause.DELIVERY, "the queue is away"),
        (READY, WaitCause.WORKER, "has claimed it since its wake-up: 2 workers serve it"),
        (replace(READY, workers=1), WaitCause.WORKER, ": 1 worker serves it"),
        (replace(READY, held=4), WaitCause.WORKER, "run 4 tasks, as many as they can"),
        (
            replace(READY, workers=0, slots=0),
            WaitCause.WORKER,
            "none is running (tracelake worker --runtime ecs_python)",
        ),
    ],
)
def test_each_reason_is_named(task: QueuedFacts, cause: WaitCause, words: str) -> None:
    found = why_waiting(task)
    assert found.cause is cause
    assert words in found.message


def test_the_first_reason_of_a_claim_comes_first() -> None:
    everything = replace(
        PAUSED, superseded=True, not_committed=["logs"], earlier_task=True, cap=0, undelivered="x"
    )
    assert why_waiting(everything).cause is WaitCause.JOB_PAUSED
    assert why_waiting(replace(everything, job_active=False)).cause is WaitCause.JOB_RETIRED
    assert why_waiting(replace(everything, job_paused=False)).cause is WaitCause.LATER_TASK


def test_a_pause_says_since_when_and_a_retry_until_when() -> None:
    assert why_waiting(PAUSED).since == NOW - timedelta(hours=1)
    assert why_waiting(LATER).until == LATER.ready_at


def test_the_dispatchers_own_tasks_wait_for_no_worker_command() -> None:
    assert "tracelake worker" not in why_waiting(replace(READY, runtime="dispatcher", workers=0)).message
