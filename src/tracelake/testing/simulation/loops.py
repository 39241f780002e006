"""What each dispatcher does in the background, in the order that the seed gives it."""

from __future__ import annotations

from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.reap_leases import reap_leases
from tracelake.dispatcher.steps.reconcile_partitions import reconcile_partitions
from tracelake.dispatcher.steps.rewake_queued import rewake_queued
from tracelake.dispatcher.steps.watch_sources import watch_sources
from tracelake.domain.errors import Unavailable
from tracelake.store import outbox
from tracelake.store.db import DeployLock
from tracelake.testing.simulation.scheduler import Died
from tracelake.testing.simulation.world import World

HOLD_SECONDS = 5.0
REWAKE_SECONDS = 20.0
BATCH = 20


async def live(world: World, index: int) -> None:
    world.listening[index] = world.scheduler.now
    chores = ["deliver"] * 6 + ["reap"] * 2 + ["watch"]
    if world.profile.sweeps:
        chores.append("rewake")
    if world.profile.reconciles:
        chores.append("reconcile")
    while True:
        await world.scheduler.sleep(world.rng.uniform(0.2, 4))
        try:
            await do(world, world.rng.choice(chores), index)
        except Died:
            if world.scheduler.ending:
                raise
            world.restart(index)
        except Unavailable:
            continue


async def do(world: World, chore: str, index: int) -> int:
    """One round of a chore; how much it found to do."""
    ctx = world.dispatchers[index]
    match chore:
        case "deliver":
            return await deliver(world, ctx)
        case "reap":
            return await reap_leases(ctx, world.listening[index])
        case "rewake":
            return await rewake_queued(ctx, REWAKE_SECONDS)
        case "reconcile":
            return await reconcile_partitions(ctx)
        case _:
            return await watch_sources(ctx)


async def deliver(world: World, ctx: StepContext) -> int:
    """Publish what is due, then forget it: a death in between publishes it again."""
    entries = await ctx.db.run(
        lambda tx: outbox.take_due(tx, BATCH, HOLD_SECONDS), lock=DeployLock.NONE, durable=False
    )
    if not entries:
        return 0
    for entry in entries:
        assert entry.task_id is not None
        world.queue.publish(entry.task_id, world.scheduler.now)
    await ctx.db.run(
        lambda tx: outbox.delivered(tx, [entry.outbox_id for entry in entries]),
        lock=DeployLock.NONE,
        durable=False,
    )
    return len(entries)
