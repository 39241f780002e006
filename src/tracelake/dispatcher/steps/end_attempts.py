"""The end of attempts, whoever brings it about: history, the retry's wake-up, and the freed slot's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.task import Ending, Outcome, TaskStatus, decide_ending
from tracelake.store import outbox, tasks
from tracelake.store.db import Transaction
from tracelake.store.tasks import AttemptEnd, NewTask, TaskRow


@dataclass(frozen=True, slots=True)
class AttemptOver:
    task: TaskRow
    outcome: Outcome
    error_message: str | None = None
    retryable: bool = True
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    ending: Ending
    result: dict[str, Any]


async def end_attempts(ctx: StepContext, tx: Transaction, over: Sequence[AttemptOver]) -> list[Ended]:
    """Write the endings of locked tasks whose gates are held, in the order given."""
    endings = [
        decide_ending(end.task.state, end.outcome, retryable=end.retryable, jitter=ctx.entropy.jitter())
        for end in over
    ]
    written = await tasks.end_attempts(
        tx,
        [
            AttemptEnd(
                end.task.task_id,
                ending,
                end.error_message,
                end.digest,
                {"status": end.outcome.value, "task_status": ending.status.value},
            )
            for end, ending in zip(over, endings, strict=True)
        ],
    )
    again: list[NewTask] = []
    times: list[datetime | None] = []
    for end, ending in zip(over, endings, strict=True):
        if ending.status is TaskStatus.QUEUED:
            again.append(NewTask(end.task.task_id, end.task.runtime))
            times.append(written[end.task.task_id][1])
    await outbox.wake(tx, again, times)
    await wake_next(tx, [end.task for end in over])
    return [Ended(ending, written[end.task.task_id][0]) for end, ending in zip(over, endings, strict=True)]


async def wake_next(tx: Transaction, freed: Sequence[TaskRow]) -> None:
    """A slot came free in each of these tasks' jobs: whoever may run next there hears of it.

    The gates of those jobs are held, so a claim that found the job full either came before, and its task is
    seen here, or comes after, and finds the slot.
    """
    slots = Counter(task.job_id for task in freed if task.gated)
    await outbox.wake(tx, await tasks.wake_parked(tx, dict(slots)))
