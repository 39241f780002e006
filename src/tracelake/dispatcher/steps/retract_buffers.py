"""Retract: a task that ran because of an invalidation has published all that still holds of its blocks.

In the transaction of its completion each buffered dataset that its job ever wrote is told so. Rows of that job
about those blocks that are of an older revision are what the task did not publish again; the sink marks them.
The message may come before the batches that it speaks of: they carry the higher revision, and a row that comes
back is no longer retracted.
"""

from __future__ import annotations

from collections.abc import Sequence

from tracelake.contracts.buffers import BufferRetract
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.task_scope import remade, revision_of
from tracelake.store import buffers
from tracelake.store.db import Transaction
from tracelake.store.tasks import TaskRow


async def retract_buffers(ctx: StepContext, tx: Transaction, completed: Sequence[TaskRow]) -> None:
    again = [(task, span) for task in completed if (span := remade(task)) is not None]
    if not again:
        return
    cards = await ctx.cards.get(tx, (task.job_id for task, _ in again))
    jobs = {(card.dag_name, card.name) for card in cards.values()}
    written = await buffers.written_by(tx, sorted(jobs))
    if not written:
        return
    bases = await buffers.revision_bases(tx, list(cards))
    messages = [
        BufferRetract(
            batch_id=ctx.entropy.uuid(),
            dataset_uuid=target.dataset_uuid,
            dataset_version=target.dataset_version,
            producer=f"{target.dag_name}/{target.job_name}",
            task_id=task.task_id,
            attempt=task.state.attempt,
            revision=revision_of(task, bases[task.job_id]),
            scope_start=span.start,
            scope_end=span.end,
        )
        for task, span in again
        for target in written
        if (target.dag_name, target.job_name) == (cards[task.job_id].dag_name, cards[task.job_id].name)
    ]
    if messages:
        await buffers.add_retractions(tx, messages)
