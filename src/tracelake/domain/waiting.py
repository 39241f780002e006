"""Why a queued task doesn't run, decided purely from one row: in the order in which a claim would refuse it, then
what keeps its wake-up, then who should take it.

Every queued task has a reason. One that nothing keeps waits for a worker, and then it matters whether there is any:
workers register while they run, and one that holds a task of the runtime counts without that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from tracelake.domain.chain_status import PauseFact
from tracelake.domain.pressure import BACKPRESSURE
from tracelake.domain.runtimes import DISPATCHER


class WaitCause(StrEnum):
    RETRY_TIME = "RetryTime"
    JOB_RETIRED = "JobRetired"
    JOB_PAUSED = "JobPaused"
    BACKPRESSURE = "Backpressure"
    CAP_FULL = "CapFull"
    OPERATOR_FULL = "OperatorFull"
    EARLIER_TASK = "EarlierTask"
    LATER_TASK = "LaterTask"
    INPUTS = "Inputs"
    DELIVERY = "Delivery"
    WORKER = "Worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedFacts:
    """A queued task with its job's limits, as they are ``now``. ``not_committed`` are the inputs whose scope was
    invalidated and isn't committed again. ``workers`` serve the runtime, with ``slots`` together; ``held`` tasks
    run there, and ``in_flight`` tasks of its operator anywhere."""

    now: datetime
    runtime: str
    ready_at: datetime
    woken_at: datetime | None
    job_active: bool = True
    job_paused: bool = False
    pauses: Sequence[PauseFact] = ()
    superseded: bool = False
    not_committed: Sequence[str] = ()
    earlier_task: bool = False
    running: int = 0
    cap: int | None = None
    in_flight: int = 0
    operator_cap: int | None = None
    undelivered: str | None = None
    last_error: str | None = None
    workers: int = 0
    slots: int = 0
    held: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """``cause`` for programs, ``message`` for people."""

    cause: WaitCause
    message: str
    until: datetime | None = None
    since: datetime | None = None


def why_waiting(task: QueuedFacts) -> Waiting:
    if not task.job_active:
        return Waiting(WaitCause.JOB_RETIRED, "its job was replaced or removed by a deploy")
    if task.job_paused:
        since = min((each.since for each in task.pauses), default=None)
        if task.pauses and all(each.cause.startswith(BACKPRESSURE) for each in task.pauses):
            causes = ", ".join(each.cause for each in task.pauses)
            return Waiting(WaitCause.BACKPRESSURE, causes, since=since)
        return Waiting(WaitCause.JOB_PAUSED, _paused(task.pauses), since=since)
    if task.superseded:
        return Waiting(WaitCause.LATER_TASK, "a later task covers its scope; its next claim cancels it")
    if task.not_committed:
        gone = ", ".join(task.not_committed)
        return Waiting(WaitCause.INPUTS, f"its scope was invalidated and isn't committed again in {gone}")
    if task.ready_at > task.now:
        why = f"; the last attempt: {task.last_error}" if task.last_error else ""
        return Waiting(WaitCause.RETRY_TIME, f"its retry time has not come{why}", until=task.ready_at)
    if task.earlier_task:
        return Waiting(WaitCause.EARLIER_TASK, "an earlier task of its job has not ended")
    if task.cap is not None and task.running >= task.cap:
        return Waiting(WaitCause.CAP_FULL, f"its job runs {task.running} tasks of at most {task.cap}")
    if task.operator_cap is not None and task.in_flight >= task.operator_cap:
        return Waiting(
            WaitCause.OPERATOR_FULL,
            f"its operator runs {task.in_flight} tasks of at most {task.operator_cap} over all DAGs",
        )
    if task.undelivered:
        return Waiting(
            WaitCause.DELIVERY, f"it can't be delivered yet: {task.undelivered}", since=task.woken_at
        )
    return Waiting(WaitCause.WORKER, _no_worker(task), since=task.woken_at)


def _paused(pauses: Sequence[PauseFact]) -> str:
    # A Dispatcher of an older release, during an upgrade, pauses without recording a cause.
    causes = ", ".join(each.cause for each in pauses) or "person"
    by = next((f" by {each.actor}" for each in pauses if each.actor), "")
    return f"its job is paused{by} (cause: {causes})"


def _no_worker(task: QueuedFacts) -> str:
    claimed = f"no worker of runtime {task.runtime} has claimed it since its wake-up"
    if task.runtime == DISPATCHER:
        return claimed
    if not task.workers:
        return f"{claimed}: none is running (tracelake worker --runtime {task.runtime})"
    if task.slots and task.held >= task.slots:
        return f"{claimed}: {_workers(task.workers)} and run {task.held} tasks, as many as they can"
    return f"{claimed}: {_workers(task.workers)}"


def _workers(number: int) -> str:
    return f"{number} {'worker serves' if number == 1 else 'workers serve'} it"
