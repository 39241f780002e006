"""People and the outside world: triggers, deploys, cancels, retries, pauses; a chain that moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

from tracelake.contracts.dispatcher_api import TriggerRequest
from tracelake.dispatcher.steps.accept_events import trigger_source
from tracelake.dispatcher.steps.cancel_task import cancel_task
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import Deployed, deploy_dag
from tracelake.dispatcher.steps.pause_job import set_job_paused
from tracelake.dispatcher.steps.retry_task import retry_task
from tracelake.testing.simulation import calls
from tracelake.testing.simulation.calls import CallLost
from tracelake.testing.simulation.graph import CHUNK, DAG, FIXED, Layout
from tracelake.testing.simulation.world import World

LONGEST_CHAIN = 14


async def move_the_chain(world: World) -> None:
    for _ in range(world.profile.chain_moves):
        await world.scheduler.sleep(world.rng.uniform(0.04, 1) * world.profile.chain_pace)
        world.chain.evolve(world.rng, reorganize=world.profile.reorganizes, longest=LONGEST_CHAIN)
        if world.profile.queue_loss and world.chance(0.1):
            world.queue.drain()


async def live(world: World) -> None:
    """One person after another wants something."""
    profile = world.profile
    wishes = []
    if "ask" in world.layout.jobs:
        wishes += [_trigger] * 3
    if profile.deploys:
        wishes += [_deploy] * 2
    if profile.cancels:
        wishes += [_cancel, _retry]
    if profile.pauses:
        wishes += [_pause]
    while wishes:
        await world.scheduler.sleep(world.rng.uniform(0.5, 20))
        try:
            await world.rng.choice(wishes)(world)
        except CallLost:
            continue


async def _trigger(world: World) -> None:
    first = world.rng.randint(0, 3)
    await trigger(world, first * CHUNK, (first + world.rng.randint(1, 2)) * CHUNK - 1)


async def trigger(world: World, start: int, end: int) -> None:
    request = TriggerRequest(start=start, end=end)

    async def step(ctx: StepContext) -> Sequence[Any]:
        return [await trigger_source(ctx, DAG, "ask", request)]

    await calls.ask(world, "trigger", [request], step)


async def _deploy(world: World) -> None:
    """Change a job, or take a change back: the tags are few, so that earlier versions come back."""
    job = world.rng.choice(sorted(world.layout.jobs - FIXED))
    await deploy(world, world.layout.with_tag(job, world.rng.choice("ab")))


async def deploy(world: World, layout: Layout) -> None:
    async def step(ctx: StepContext) -> Sequence[Any]:
        return [await deploy_dag(ctx, layout.yaml(), "somebody")]

    [answer] = await calls.ask(world, "deploy", [layout], step)
    if isinstance(answer, Deployed):
        world.layout = layout
        for outputs in answer.jobs.values():
            for output in outputs:
                known = (output.dataset_uuid, output.dataset_version)
                if known not in world.old_versions:
                    world.old_versions.append(known)


async def _cancel(world: World) -> None:
    task_id = world.pick(world.tasks_seen)
    if task_id is not None:

        async def step(ctx: StepContext) -> Sequence[Any]:
            await cancel_task(ctx, task_id)
            return [None]

        await calls.ask(world, "cancel", [task_id], step)


async def _retry(world: World) -> None:
    task_id = world.pick(world.tasks_seen)
    if task_id is not None:
        await retry(world, task_id)


async def retry(world: World, task_id: UUID) -> None:
    async def step(ctx: StepContext) -> Sequence[Any]:
        await retry_task(ctx, task_id)
        return [None]

    await calls.ask(world, "retry", [task_id], step)


async def _pause(world: World) -> None:
    job = world.rng.choice(sorted(world.layout.jobs))
    await pause(world, job, world.chance(0.4))


async def pause(world: World, job: str, paused: bool) -> None:
    async def step(ctx: StepContext) -> Sequence[Any]:
        await set_job_paused(ctx, DAG, job, paused)
        return [None]

    await calls.ask(world, "pause", [(job, paused)], step)
