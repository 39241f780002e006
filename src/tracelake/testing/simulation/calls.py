"""Calls over a network that loses answers and delivers some requests twice, to dispatchers that die."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tracelake.contracts.dispatcher_api import (
    ClaimRequest,
    ClaimResponse,
    CompleteRequest,
    EventsRequest,
    EventsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
)
from tracelake.dispatcher.steps.accept_events import accept_events
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.complete_task import Answer, complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.heartbeat import heartbeat
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.testing.simulation.scheduler import Died
from tracelake.testing.simulation.world import World

Step = Callable[[StepContext], Awaitable[Sequence[Any]]]
TRIES = 8


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


async def complete(world: World, requests: Sequence[CompleteRequest]) -> list[Answer]:
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
    told: HeartbeatResponse | TracelakeError = answer
    return told
