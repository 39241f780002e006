"""After the storm: no more faults, and everything that was accepted must now get done, in bounded time.

Where the run lost messages, the queue is emptied first and the sweep has to find the work; where it didn't,
the sweep stays off, and every wake-up must have come by itself. The same holds for the reconciler.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

import msgspec

from tracelake.contracts.dispatcher_api import ClaimRequest, CompleteRequest
from tracelake.dispatcher.steps.deploy_dag import Deployed
from tracelake.testing.simulation import calls, follower, loops, operators, people
from tracelake.testing.simulation.connection import SQL
from tracelake.testing.simulation.graph import LEASE
from tracelake.testing.simulation.lease import Lease
from tracelake.testing.simulation.world import World

ROUNDS = 60
BATCH = 8


@dataclass(frozen=True, slots=True)
class Rest:
    """Whether everything came to rest, and what hadn't."""

    settled: bool
    unfinished: list[str]


async def come_to_rest(world: World) -> Rest:
    world.scheduler.direct = True
    world.start_dispatchers()
    world.listening = dict.fromkeys(range(len(world.dispatchers)), world.scheduler.now)
    if world.profile.queue_loss:
        world.queue.drain()
    await people.deploy(world, world.layout)
    for row in await world.observer.read(SQL.paused_jobs):
        await people.pause(world, row["name"], False)
    quiet, began = 0, world.scheduler.now
    for number in range(ROUNDS):
        moved = await _round(world, number, began)
        quiet = 0 if moved else quiet + 1
        if quiet >= 2 and await _nothing_left(world):
            return Rest(True, [])
    return Rest(False, await _unfinished(world))


async def _round(world: World, number: int, began: datetime) -> int:
    world.scheduler.advance(LEASE * 0.45)
    chores = ["deliver", "reap", "watch"]
    chores += ["rewake"] if world.profile.sweeps else []
    chores += ["reconcile"] if world.profile.reconciles else []
    for chore in chores:
        await loops.do(world, chore, number % len(world.dispatchers))
    moved = 0
    messages = list(dict.fromkeys(world.queue.drain()))
    for first in range(0, len(messages), BATCH):
        requests = [
            ClaimRequest(task_id, "rest", f"rest-{number}") for task_id in messages[first : first + BATCH]
        ]
        answers = await calls.claim(world, requests)
        leases = [lease for answer in answers if (lease := Lease.of(answer)) is not None]
        moved += sum(lease.payload.operator != "follow" for lease in leases)
        reports = [report for lease in leases if (report := await _run(world, lease)) is not None]
        if reports:
            await calls.complete(world, reports)
    return moved + await _bring_back(world, began)


async def _run(world: World, lease: Lease) -> CompleteRequest | None:
    operators.first_act(world, lease.payload)
    if lease.payload.operator == "follow":
        output, epoch = lease.payload.outputs[0], lease.payload.epoch
        assert epoch is not None
        table = world.data.table(output.dataset_version)
        revision = await follower.drain(world, lease, table, output.revision)
        while revision is not None and not table.in_step_with(world.chain):
            table.follow(epoch, world.chain, 4)
            revision = await follower.drain(world, lease, table, revision)
        return None
    rows = await operators.read(world, lease.payload)
    made = await operators.write(world, lease.payload, rows)
    if made is None:
        return None
    return msgspec.structs.replace(lease.ended("Completed"), outputs=made.outputs, events=made.events)


async def _bring_back(world: World, began: datetime) -> int:
    """People try again what was canceled or had failed, so that in the end nothing may be missing. Twice at
    most: what a later task has taken over is canceled anew whenever it is claimed."""
    brought = 0
    tried = Counter(call.request for call in world.history.of("retry") if call.issued_at > began)
    for row in await world.observer.read(SQL.given_up):
        if tried[row["task_id"]] >= 2:
            continue
        before = len(world.history.calls)
        await people.retry(world, row["task_id"])
        brought += not world.history.calls[before].refused
    return brought


async def _nothing_left(world: World) -> bool:
    if await world.observer.read(SQL.unfinished, world.profile.sweeps):
        return False
    deployed = world.history.of("deploy")[-1].answer
    assert isinstance(deployed, Deployed), deployed
    heads = [output.dataset_version for output in deployed.jobs.get("head", [])]
    return all(world.data.table(version).in_step_with(world.chain) for version in heads)


async def _unfinished(world: World) -> list[str]:
    return [
        f"{row['name']} {row['kind']} {row['range_start']}-{row['range_end']} is {row['status']} "
        f"(attempt {row['attempt']}, {row['task_id']})"
        for row in await world.observer.read(SQL.unfinished, world.profile.sweeps)
    ]
