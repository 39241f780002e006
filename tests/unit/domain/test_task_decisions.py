"""The life of a task, held to its rules for every state it can be in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.errors import Conflict
from tracelake.domain.task import (
    ClaimGate,
    ClaimVerdict,
    Fence,
    HeartbeatVerdict,
    Outcome,
    RetryPolicy,
    TaskKind,
    TaskState,
    TaskStatus,
    check_may_act,
    decide_claim,
    decide_ending,
    decide_heartbeat,
)

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TASK, TOKEN, OTHER = UUID(int=1), UUID(int=2), UUID(int=3)
ENDED = (TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.CANCELED)


@st.composite
def tasks(draw: st.DrawFn) -> TaskState:
    kind = draw(st.sampled_from(TaskKind))
    limit = None if kind is TaskKind.SOURCE else draw(st.integers(1, 5))
    base = draw(st.floats(0, 100))
    return TaskState(
        task_id=TASK,
        kind=kind,
        status=draw(st.sampled_from(TaskStatus)),
        attempt=draw(st.integers(0, 4)),
        failures=draw(st.integers(0, 6)),
        last_outcome=draw(st.none() | st.sampled_from(Outcome)),
        worker_id=draw(st.sampled_from([None, "w1", "w2"])),
        claim_key=draw(st.sampled_from([None, "k1", "k2"])),
        lease_token=draw(st.sampled_from([None, TOKEN])),
        ready_at=NOW + timedelta(seconds=draw(st.integers(-5, 5))),
        retry=RetryPolicy(limit, base, base + draw(st.floats(0, 100))),
        job_active=draw(st.booleans()),
        job_paused=draw(st.booleans()),
    )


gates = st.builds(
    ClaimGate,
    running=st.integers(0, 3),
    cap=st.none() | st.integers(1, 3),
    earlier_cursor_task=st.booleans(),
    inputs_committed=st.booleans(),
    superseded=st.booleans(),
)
workers = st.sampled_from(["w1", "w2"])
keys = st.sampled_from([None, "k1", "k2"])


def claim(task: TaskState, gate: ClaimGate, worker: str, key: str | None) -> ClaimVerdict:
    return decide_claim(task, gate, worker_id=worker, claim_key=key, now=NOW)


@given(tasks(), gates, workers, keys)
def test_only_a_queued_ready_unpaused_task_behind_an_open_gate_is_claimed(
    task: TaskState, gate: ClaimGate, worker: str, key: str | None
) -> None:
    may = (
        task.status is TaskStatus.QUEUED
        and task.ready_at <= NOW
        and not task.job_paused
        and (gate.cap is None or gate.running < gate.cap)
        and not gate.earlier_cursor_task
        and gate.inputs_committed
        and not gate.superseded
    )
    assert (claim(task, gate, worker, key) is ClaimVerdict.CLAIM) == may


@given(tasks(), gates, workers, keys)
def test_a_lease_is_handed_out_again_to_its_own_worker_and_key_alone(
    task: TaskState, gate: ClaimGate, worker: str, key: str | None
) -> None:
    own = (
        task.status is TaskStatus.RUNNING
        and key is not None
        and (worker, key) == (task.worker_id, task.claim_key)
    )
    assert (claim(task, gate, worker, key) is ClaimVerdict.SAME_LEASE) == own


@given(tasks(), gates, workers, keys)
def test_what_has_ended_says_how_it_ended(
    task: TaskState, gate: ClaimGate, worker: str, key: str | None
) -> None:
    verdict = claim(task, gate, worker, key)
    if task.status in ENDED:
        assert verdict.value == task.status.value
    else:
        assert verdict.value not in {status.value for status in ENDED}


def answer(decision: Callable[[], HeartbeatVerdict | None]) -> HeartbeatVerdict | str | None:
    """What was decided, or the reason of the refusal."""
    try:
        return decision()
    except Conflict as refused:
        return refused.reason


@given(tasks(), st.integers(0, 4), st.sampled_from([TOKEN, OTHER]))
def test_invariant_1_only_the_current_fence_extends_a_lease(
    task: TaskState, attempt: int, token: UUID
) -> None:
    decided = answer(lambda: decide_heartbeat(task, Fence(TASK, attempt, token)))
    if attempt != task.attempt:
        assert decided == "StaleAttempt"
    elif token != task.lease_token:
        assert decided == "StaleLease"
    elif task.status is TaskStatus.RUNNING:
        assert decided is HeartbeatVerdict.EXTEND
    elif task.status is TaskStatus.CANCELED and task.last_outcome is None:
        assert decided is HeartbeatVerdict.CANCEL
    else:
        assert decided == "StaleLease"


@given(tasks(), st.integers(0, 4), st.sampled_from([None, TOKEN, OTHER]))
def test_invariant_1_only_the_current_fence_acts_and_only_while_nobody_ended_it(
    task: TaskState, attempt: int, token: UUID | None
) -> None:
    given_up = task.last_outcome is Outcome.TIMED_OUT and task.status in (
        TaskStatus.QUEUED,
        TaskStatus.FAILED,
    )
    decided = answer(lambda: check_may_act(task, attempt, token))
    if attempt != task.attempt:
        assert decided == "StaleAttempt"
    elif token not in (None, task.lease_token):
        assert decided == "StaleLease"
    elif task.status is TaskStatus.CANCELED:
        assert decided == "Canceled"
    elif task.status is TaskStatus.RUNNING or given_up:
        assert decided is None
    else:
        assert decided == "StaleLease"


@given(tasks(), st.sampled_from(Outcome), st.booleans(), st.floats(0.5, 1.5))
def test_an_ending_is_queued_again_with_a_time_or_over_without_one(
    task: TaskState, outcome: Outcome, retryable: bool, jitter: float
) -> None:
    ending = decide_ending(task, outcome, retryable=retryable, jitter=jitter)
    assert ending.outcome is outcome
    assert ending.status is not TaskStatus.RUNNING
    assert (ending.status is TaskStatus.QUEUED) == (ending.ready_in is not None)
    if ending.ready_in is not None:
        assert ending.ready_in >= timedelta(0)
        assert task.job_active, "nothing of a retired job is queued again"


@given(tasks(), st.sampled_from(Outcome), st.booleans(), st.floats(0.5, 1.5))
def test_what_a_retired_job_would_have_queued_is_shelved_and_nothing_else(
    task: TaskState, outcome: Outcome, retryable: bool, jitter: float
) -> None:
    here = decide_ending(replace(task, job_active=False), outcome, retryable=retryable, jitter=jitter)
    there = decide_ending(replace(task, job_active=True), outcome, retryable=retryable, jitter=jitter)
    assert not there.shelved
    assert here.shelved == (there.status is TaskStatus.QUEUED)
    assert here.failures == there.failures


@given(tasks(), st.sampled_from(Outcome), st.booleans(), st.floats(0.5, 1.5))
def test_only_failures_and_timeouts_count_and_one_attempt_counts_once(
    task: TaskState, outcome: Outcome, retryable: bool, jitter: float
) -> None:
    ending = decide_ending(task, outcome, retryable=retryable, jitter=jitter)
    late = task.status is not TaskStatus.RUNNING and task.last_outcome is Outcome.TIMED_OUT
    before = max(0, task.failures - late)
    if outcome in (Outcome.FAILED, Outcome.TIMED_OUT):
        assert ending.failures == before + 1
    elif outcome is Outcome.COMPLETED and task.kind is TaskKind.SOURCE:
        assert ending.failures == 0
    else:
        assert ending.failures == before


@given(tasks(), st.booleans(), st.floats(0.5, 1.5))
def test_a_task_gives_up_at_its_limit_and_a_source_never(
    task: TaskState, retryable: bool, jitter: float
) -> None:
    ending = decide_ending(task, Outcome.TIMED_OUT, retryable=retryable, jitter=jitter)
    limit = task.retry.max_attempts
    goes_on = retryable and task.job_active and (limit is None or ending.failures < limit)
    assert (ending.status is TaskStatus.QUEUED) == goes_on
    if task.kind is TaskKind.SOURCE and retryable and task.job_active:
        assert ending.status is TaskStatus.QUEUED


@pytest.mark.parametrize("outcome", [Outcome.RELEASED, Outcome.INPUT_CHANGED])
@given(task=tasks(), jitter=st.floats(0.5, 1.5))
def test_a_release_and_a_changed_input_go_on_at_once(
    outcome: Outcome, task: TaskState, jitter: float
) -> None:
    ending = decide_ending(task, outcome, retryable=True, jitter=jitter)
    if task.job_active:
        assert (ending.status, ending.ready_in) == (TaskStatus.QUEUED, timedelta(0))
    else:
        assert ending.status is TaskStatus.CANCELED
