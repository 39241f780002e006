"""Fetch: a task's payload and status, changing nothing."""

from __future__ import annotations

from uuid import UUID

from tracelake.contracts.dispatcher_api import FetchResponse
from tracelake.dispatcher.steps import render_payload
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.sink_task import sink_config
from tracelake.domain.errors import NotFound
from tracelake.store import jobs, operator_state, tasks
from tracelake.store.db import DeployLock, Transaction


async def fetch_task(ctx: StepContext, task_id: UUID) -> FetchResponse:
    """The current attempt's frozen inputs; for a task that nobody has claimed, what a claim would see now."""

    async def work(tx: Transaction) -> FetchResponse:
        task = await tasks.read(tx, task_id)
        if task is None:
            raise NotFound("UnknownTask", f"there is no task {task_id}")
        cards = await ctx.cards.get(tx, [task.job_id])
        if task.inputs is not None:
            inputs = render_payload.from_json(task.inputs)
        else:
            inputs = render_payload.freeze_inputs(task, (await tasks.claim_inputs(tx, [task]))[task_id])
        payload = render_payload.render(
            ctx,
            task,
            cards[task.job_id],
            inputs,
            await jobs.output_state(tx, cards),
            attempt=task.state.attempt,
            epoch=task.epoch,
            state=await operator_state.saved(tx, task_id),
            config=await sink_config(ctx, tx, cards[task.job_id]),
        )
        return FetchResponse(task.state.status.value, task_id, task.state.attempt, payload)

    return await ctx.db.run(work, lock=DeployLock.NONE)
