"""The life of a task, decided purely.

    Queued ──claim──▶ Running ──complete──▶ Completed | Failed | Canceled
       ▲                 │
       └── retry, release, reap, input changed

``attempt`` counts claims and rises in ``decide_claim`` alone. The fence of an attempt is
``(task_id, attempt, lease_token)``; whoever doesn't hold the current one changes nothing. These functions
look at a task that the caller has locked and say what must happen; the steps write it down.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from tracelake.domain.errors import Conflict
from tracelake.domain.retry import RetryPolicy


class TaskKind(StrEnum):
    PARTITION = "partition"
    CURSOR = "cursor"
    SOURCE = "source"


class TaskStatus(StrEnum):
    QUEUED = "Queued"
    RUNNING = "Running"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELED = "Canceled"


class Outcome(StrEnum):
    """How an attempt ended."""

    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELED = "Canceled"
    RELEASED = "Released"
    TIMED_OUT = "TimedOut"
    INPUT_CHANGED = "InputChanged"


@dataclass(frozen=True, slots=True)
class Fence:
    task_id: UUID
    attempt: int
    lease_token: UUID


@dataclass(frozen=True, slots=True)
class TaskState:
    """A locked task row, as far as decisions need it."""

    task_id: UUID
    kind: TaskKind
    status: TaskStatus
    attempt: int
    failures: int
    last_outcome: Outcome | None
    worker_id: str | None
    claim_key: str | None
    lease_token: UUID | None
    ready_at: datetime
    retry: RetryPolicy
    job_active: bool
    job_paused: bool


@dataclass(frozen=True, slots=True)
class ClaimGate:
    """What stands between a queued task and its attempt: ``running`` of at most ``cap``, an earlier cursor task
    that lives, an input that no longer has the task's scope, or a later task of the same scope."""

    running: int = 0
    cap: int | None = None
    earlier_cursor_task: bool = False
    inputs_committed: bool = True
    superseded: bool = False

    @property
    def closed(self) -> bool:
        full = self.cap is not None and self.running >= self.cap
        return full or self.earlier_cursor_task or not self.inputs_committed


class ClaimVerdict(StrEnum):
    """``CLAIM`` a new attempt, hand out the ``SAME_LEASE`` again, or refuse with the wire's reason. What is
    ``SUPERSEDED`` is canceled on the way."""

    CLAIM = "Claim"
    SAME_LEASE = "SameLease"
    SUPERSEDED = "Superseded"
    ALREADY_RUNNING = "AlreadyRunning"
    COMPLETED = "Completed"
    CANCELED = "Canceled"
    NOT_FOUND = "NotFound"
    FAILED = "Failed"
    NOT_READY = "NotReady"


def decide_claim(
    task: TaskState, gate: ClaimGate, *, worker_id: str, claim_key: str | None, now: datetime
) -> ClaimVerdict:
    match task.status:
        case TaskStatus.COMPLETED:
            return ClaimVerdict.COMPLETED
        case TaskStatus.CANCELED:
            return ClaimVerdict.CANCELED
        case TaskStatus.FAILED:
            return ClaimVerdict.FAILED
        case TaskStatus.RUNNING:
            same = claim_key is not None and (worker_id, claim_key) == (task.worker_id, task.claim_key)
            return ClaimVerdict.SAME_LEASE if same else ClaimVerdict.ALREADY_RUNNING
        case TaskStatus.QUEUED if gate.superseded:
            return ClaimVerdict.SUPERSEDED
        case TaskStatus.QUEUED:
            waits = task.ready_at > now or task.job_paused or gate.closed
            return ClaimVerdict.NOT_READY if waits else ClaimVerdict.CLAIM


class HeartbeatVerdict(StrEnum):
    EXTEND = "Extend"
    CANCEL = "Cancel"


def decide_heartbeat(task: TaskState, fence: Fence) -> HeartbeatVerdict:
    """Extend the lease, tell a canceled attempt to stop, or refuse."""
    _check_current(task, fence.attempt, fence.lease_token)
    if task.status is TaskStatus.CANCELED and task.last_outcome is None:
        return HeartbeatVerdict.CANCEL
    if task.status is not TaskStatus.RUNNING:
        raise Conflict("StaleLease", f"attempt {fence.attempt} is over: the task is {task.status}")
    return HeartbeatVerdict.EXTEND


def check_may_act(task: TaskState, attempt: int, lease_token: UUID | None) -> None:
    """May this attempt still end the task? Also when the reaper gave it up, until a newer one is claimed."""
    _check_current(task, attempt, lease_token)
    check_lives(attempt, task.status, task.last_outcome)


def check_lives(attempt: int, status: TaskStatus, last_outcome: Outcome | None) -> None:
    """May a task's current attempt still act?"""
    if status is TaskStatus.CANCELED:
        raise Conflict("Canceled", "the task was canceled")
    late = last_outcome is Outcome.TIMED_OUT and status in (TaskStatus.QUEUED, TaskStatus.FAILED)
    if status is not TaskStatus.RUNNING and not late:
        raise Conflict("StaleLease", f"attempt {attempt} has ended already: {last_outcome or 'Canceled'}")


def check_may_speak(task: TaskState, attempt: int, lease_token: UUID | None) -> None:
    """May this attempt still say what it produced? Also one whose job a deploy has replaced and stopped: what it
    says belongs to its old generation, where it is kept."""
    if task.status is TaskStatus.CANCELED and task.last_outcome is None and not task.job_active:
        _check_current(task, attempt, lease_token)
    else:
        check_may_act(task, attempt, lease_token)


def _check_current(task: TaskState, attempt: int, lease_token: UUID | None) -> None:
    if attempt != task.attempt:
        raise Conflict("StaleAttempt", f"attempt {attempt} is not the current one ({task.attempt})")
    if lease_token is not None and lease_token != task.lease_token:
        raise Conflict("StaleLease", "the lease token is not the current one")


@dataclass(frozen=True, slots=True)
class Ending:
    """What the end of an attempt makes of its task. ``ready_in`` is set when it is queued again; ``shelved``
    when it would have been, had its job not been retired: a rollback queues it."""

    outcome: Outcome
    status: TaskStatus
    failures: int
    ready_in: timedelta | None = None
    shelved: bool = False


def decide_ending(task: TaskState, outcome: Outcome, *, retryable: bool, jitter: float) -> Ending:
    """Nothing of a retired job is queued again: what would have been is canceled, or stays failed, and is
    shelved. A late reply takes the place of the timeout, whose failure no longer counts."""
    late = task.status is not TaskStatus.RUNNING and task.last_outcome is Outcome.TIMED_OUT
    before = max(0, task.failures - 1) if late else task.failures
    ending = _ending(task, outcome, before, retryable=retryable, jitter=jitter)
    if ending.status is not TaskStatus.QUEUED or task.job_active:
        return ending
    failed = outcome in (Outcome.FAILED, Outcome.TIMED_OUT)
    status = TaskStatus.FAILED if failed else TaskStatus.CANCELED
    return Ending(outcome, status, ending.failures, shelved=True)


def _ending(task: TaskState, outcome: Outcome, before: int, *, retryable: bool, jitter: float) -> Ending:
    match outcome:
        case Outcome.RELEASED | Outcome.INPUT_CHANGED:
            return Ending(outcome, TaskStatus.QUEUED, before, timedelta(0))
        case Outcome.CANCELED:
            return Ending(outcome, TaskStatus.CANCELED, before)
        case Outcome.COMPLETED:
            if task.kind is TaskKind.SOURCE:
                return Ending(outcome, TaskStatus.QUEUED, 0, task.retry.delay_after(1, jitter))
            return Ending(outcome, TaskStatus.COMPLETED, before)
        case Outcome.FAILED | Outcome.TIMED_OUT:
            failures = before + 1
            delay = task.retry.delay_after(failures, jitter) if retryable else None
            status = TaskStatus.FAILED if delay is None else TaskStatus.QUEUED
            return Ending(outcome, status, failures, delay)
