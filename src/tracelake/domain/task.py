"""The life of a task, decided purely.

    Queued ──claim──▶ Running ──complete──▶ Completed | Failed | Canceled
       ▲                 │
       └── retry, release, reap, input changed

``attempt`` counts claims and rises in ``decide_claim`` alone. The fence of an attempt is ``(task_id, attempt,
lease_token)``; a caller without the current fence changes nothing. These functions take a task that the caller has
locked and return a decision, which the steps write to the database; ``RetryPolicy`` decides when a failed attempt
may be tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from uuid import UUID

from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import Conflict


class TaskKind(StrEnum):
    PARTITION = "partition"
    CURSOR = "cursor"
    SOURCE = "source"
    REQUEST = "request"
    """One tick, delivery or trigger of a source that runs code."""


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
    """The columns of a locked task row that decisions need."""

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
    """The conditions that keep a queued task from its attempt: ``running`` has reached ``cap``, or ``in_flight``
    tasks of its operator have reached the operator's, an earlier cursor task hasn't ended, an input no longer has
    the task's scope, or there is a later task of the same scope."""

    running: int = 0
    cap: int | None = None
    earlier_cursor_task: bool = False
    inputs_committed: bool = True
    superseded: bool = False
    in_flight: int = 0
    operator_cap: int | None = None

    @property
    def closed(self) -> bool:
        full = self.cap is not None and self.running >= self.cap
        full = full or (self.operator_cap is not None and self.in_flight >= self.operator_cap)
        return full or self.earlier_cursor_task or not self.inputs_committed


class ClaimVerdict(StrEnum):
    """``CLAIM`` a new attempt, return the ``SAME_LEASE`` again, or refuse with the wire's reason. A ``SUPERSEDED``
    task is also canceled."""

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
            # A worker repeats a claim whose answer was lost.
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
    """Extend the lease, ask a canceled attempt to stop, or refuse."""
    _check_current(task, fence.attempt, fence.lease_token)
    # Without an outcome the attempt hasn't noticed the cancel yet.
    if task.status is TaskStatus.CANCELED and task.last_outcome is None:
        return HeartbeatVerdict.CANCEL
    if task.status is not TaskStatus.RUNNING:
        raise Conflict("StaleLease", f"attempt {fence.attempt} is over: the task is {task.status}")
    return HeartbeatVerdict.EXTEND


def check_may_act(task: TaskState, attempt: int, lease_token: UUID | None) -> None:
    """Raises ``Conflict`` unless this attempt may still end the task. An attempt that the reaper gave up may, until
    a newer one is claimed."""
    _check_current(task, attempt, lease_token)
    check_lives(attempt, task.status, task.last_outcome)


def check_lives(attempt: int, status: TaskStatus, last_outcome: Outcome | None) -> None:
    """Raises ``Conflict`` unless a task's current attempt may still act."""
    if status is TaskStatus.CANCELED:
        raise Conflict("Canceled", "the task was canceled")
    # The reaper may have given up an attempt that was only slow.
    late = last_outcome is Outcome.TIMED_OUT and status in (TaskStatus.QUEUED, TaskStatus.FAILED)
    if status is not TaskStatus.RUNNING and not late:
        raise Conflict("StaleLease", f"attempt {attempt} has ended already: {last_outcome or 'Canceled'}")


def check_may_report(task: TaskState, attempt: int, lease_token: UUID | None) -> None:
    """Raises ``Conflict`` unless this attempt may still report its results. An attempt whose job a deploy has
    replaced and stopped may: its events belong to its old generation and are kept there."""
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
    """The task after the end of an attempt. ``ready_in`` is set when the task is queued again; ``shelved`` when it
    isn't only because its job is retired: a rollback queues it."""

    outcome: Outcome
    status: TaskStatus
    failures: int
    ready_in: timedelta | None = None
    shelved: bool = False


def decide_ending(task: TaskState, outcome: Outcome, *, retryable: bool, jitter: float) -> Ending:
    """Tasks of a retired job aren't queued again: they are canceled, or stay failed, and are shelved. A late reply
    replaces the timeout, whose failure no longer counts."""
    late = task.status is not TaskStatus.RUNNING and task.last_outcome is Outcome.TIMED_OUT
    # The timeout was counted as a failure, and this reply shows that it was none.
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
            # Neither is the task's fault: no failure is counted, and it needn't wait.
            return Ending(outcome, TaskStatus.QUEUED, before, timedelta(0))
        case Outcome.CANCELED:
            return Ending(outcome, TaskStatus.CANCELED, before)
        case Outcome.COMPLETED:
            if task.kind is TaskKind.SOURCE:
                # A source runs for ever: when it ends well, it is queued again after the shortest delay.
                return Ending(outcome, TaskStatus.QUEUED, 0, task.retry.delay_after(1, jitter))
            return Ending(outcome, TaskStatus.COMPLETED, before)
        case Outcome.FAILED | Outcome.TIMED_OUT:
            failures = before + 1
            delay = task.retry.delay_after(failures, jitter) if retryable else None
            status = TaskStatus.FAILED if delay is None else TaskStatus.QUEUED
            return Ending(outcome, status, failures, delay)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``max_attempts`` is None for sources, which are kept running for ever."""

    max_attempts: int | None
    base_seconds: float
    max_seconds: float

    def delay_after(self, failures: int, jitter: float) -> timedelta | None:
        """The delay after the ``failures``-th failure (1 is the first), or None to give up."""
        if self.max_attempts is not None and failures >= self.max_attempts:
            return None
        backoff = Backoff(self.base_seconds, self.max_seconds)
        return timedelta(seconds=backoff.delay(failures, jitter=jitter))
