"""Calls of simulated actors, over a network that loses answers and repeats requests, to dispatchers that die.

The actors here are people and the outside world: triggers, deploys, cancels, retries, pauses, and a chain that
moves.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

from tests.support.simulation.graph import CHUNK, DAG, FIXED, Layout
from tests.support.simulation.scheduler import Died
from tests.support.simulation.world import World
from tracelake.contracts.dispatcher_api import (
    ClaimRequest,
    ClaimResponse,
    CompleteRequest,
    EventsRequest,
    EventsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    TriggerRequest,
)
from tracelake.dispatcher.steps.accept_events import accept_events, trigger_source
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.complete_task import CompletionAnswer, complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import Deployed, deploy_dag
from tracelake.dispatcher.steps.interventions import cancel_task, pause_job, resume_job, retry_task
from tracelake.dispatcher.steps.running_attempt import heartbeat
from tracelake.domain.errors import TracelakeError, Unavailable

Step = Callable[[StepContext], Awaitable[Sequence[Any]]]
TRIES = 8
LONGEST_CHAIN = 14


class CallLost(Exception):
    """No answer came. The call may have been carried out or not."""


async def ask(world: World, kind: str, requests: Sequence[Any], step: Step) -> list[Any]:
    """Ask until answered; ``CallLost`` after many tries. One answer per request; a refusal is an answer."""
    if not world.scheduler.direct and world.chance(world.profile.duplicate):
        name = f"{world.scheduler.actor}+"
        world.scheduler.spawn(name, _echo(world, kind, requests, step))
    for _ in range(TRIES):
        try:
            return await _once(world, kind, requests, step)
        except CallLost:
            await world.scheduler.sleep(world.rng.uniform(0.1, 4))
    raise CallLost


async def _echo(world: World, kind: str, requests: Sequence[Any], step: Step) -> None:
    """The network's copy of a request, some time later."""
    await world.scheduler.sleep(world.rng.uniform(0, 25))
    try:
        await _once(world, kind, requests, step, echo=True)
    except CallLost:
        return


async def _once(
    world: World, kind: str, requests: Sequence[Any], step: Step, *, echo: bool = False
) -> list[Any]:
    """One try. What becomes of a lost one is unknown, but it is over: nothing of it happens later."""
    calls = [world.history.issue(kind, request, world.scheduler.now, echo=echo) for request in requests]
    try:
        answers = await _carry_out(world, requests, step)
    except CallLost:
        for call in calls:
            world.history.lose(call)
        raise
    for call, answer in zip(calls, answers, strict=True):
        world.history.answer(call, answer, world.scheduler.now)
    return list(answers)


async def _carry_out(world: World, requests: Sequence[Any], step: Step) -> Sequence[Any]:
    index = world.rng.randrange(len(world.dispatchers))
    answers: Sequence[Any]
    try:
        answers = await step(world.dispatchers[index])
    except Died:
        if world.scheduler.ending:
            raise
        world.restart(index)
        raise CallLost from None
    except Unavailable:
        raise CallLost from None
    except TracelakeError as refusal:
        answers = [refusal] * len(requests)
    if not world.scheduler.direct and world.chance(world.profile.lost_reply):
        raise CallLost
    return answers


async def claim(world: World, requests: Sequence[ClaimRequest]) -> list[ClaimResponse]:
    return await ask(world, "claim", requests, lambda ctx: claim_tasks(ctx, requests))


async def complete(world: World, requests: Sequence[CompleteRequest]) -> list[CompletionAnswer]:
    return await ask(world, "complete", requests, lambda ctx: complete_tasks(ctx, requests))


async def send_events(world: World, request: EventsRequest) -> EventsResponse | TracelakeError:
    async def step(ctx: StepContext) -> Sequence[Any]:
        return [await accept_events(ctx, request)]

    [answer] = await ask(world, "events", [request], step)
    accepted: EventsResponse | TracelakeError = answer
    return accepted


async def beat(world: World, request: HeartbeatRequest) -> HeartbeatResponse | TracelakeError:
    async def step(ctx: StepContext) -> Sequence[Any]:
        return [await heartbeat(ctx, request)]

    [answer] = await ask(world, "heartbeat", [request], step)
    beaten: HeartbeatResponse | TracelakeError = answer
    return beaten


async def move_the_chain(world: World) -> None:
    for _ in range(world.profile.chain_moves):
        await world.scheduler.sleep(world.rng.uniform(0.04, 1) * world.profile.chain_pace)
        world.chain.evolve(world.rng, reorganize=world.profile.reorganizes, longest=LONGEST_CHAIN)
        if world.profile.queue_loss and world.chance(0.1):
            world.queue.drain()


async def act_as_people(world: World) -> None:
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
    bulk = bool(world.layout.depths) and world.chance(0.5)
    await trigger(world, first * CHUNK, (first + world.rng.randint(1, 2)) * CHUNK - 1, bulk=bulk)


async def trigger(world: World, start: int, end: int, *, bulk: bool = False) -> None:
    request = TriggerRequest(start=start, end=end, priority="bulk" if bulk else "normal")

    async def step(ctx: StepContext) -> Sequence[Any]:
        return [await trigger_source(ctx, DAG, "ask", request)]

    await ask(world, "trigger", [request], step)


async def _deploy(world: World) -> None:
    """Change a job, or revert a change: the tags are few, so that earlier versions come back."""
    job = world.rng.choice(sorted(world.layout.jobs - FIXED))
    await deploy(world, world.layout.with_tag(job, world.rng.choice("ab")))


async def deploy(world: World, layout: Layout) -> None:
    async def step(ctx: StepContext) -> Sequence[Any]:
        return [await deploy_dag(ctx, layout.yaml(), "user")]

    [answer] = await ask(world, "deploy", [layout], step)
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

        await ask(world, "cancel", [task_id], step)


async def _retry(world: World) -> None:
    task_id = world.pick(world.tasks_seen)
    if task_id is not None:
        await retry(world, task_id)


async def retry(world: World, task_id: UUID) -> None:
    async def step(ctx: StepContext) -> Sequence[Any]:
        await retry_task(ctx, task_id)
        return [None]

    await ask(world, "retry", [task_id], step)


async def _pause(world: World) -> None:
    job = world.rng.choice(sorted(world.layout.jobs))
    await pause(world, job, world.chance(0.4))


async def pause(world: World, job: str, paused: bool) -> None:
    async def step(ctx: StepContext) -> Sequence[Any]:
        await (pause_job if paused else resume_job)(ctx, DAG, job)
        return [None]

    await ask(world, "pause", [(job, paused)], step)
