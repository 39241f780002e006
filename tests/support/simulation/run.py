"""One seed from beginning to end: faults, recovery, audit.

While there are faults, each dispatcher runs its background loops in the order of the seed. In the recovery there
are no more faults, and everything that was accepted must get done in bounded time. If the run lost messages, the
queue is emptied first and the sweep has to find the work; otherwise the sweep stays off, and every wake-up must
have come by itself. The same holds for the reconciler.
"""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

import asyncpg
import msgspec

from tests.support.simulation import calls, worker
from tests.support.simulation import calls as people
from tests.support.simulation.audits import AnswerAudit, FenceAudit, Finding, audit_content, audit_holds
from tests.support.simulation.connection import SQL, Observer, SimConnections, open_session
from tests.support.simulation.graph import LEASE, Profile, draw
from tests.support.simulation.scheduler import START, Died, HeldBackends, Scheduler
from tests.support.simulation.worker import Lease, Worker
from tests.support.simulation.world import MessageQueue, World
from tracelake.contracts.dispatcher_api import ClaimRequest, CompleteRequest
from tracelake.dispatcher.steps.apply_backpressure import balance
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.deploy_dag import Deployed
from tracelake.dispatcher.steps.source_requests import route_waiting
from tracelake.dispatcher.steps.upkeep import reap_leases, reconcile_partitions, rewake_queued, watch_sources
from tracelake.domain.entropy import Entropy
from tracelake.domain.errors import Unavailable
from tracelake.store import outbox, pressure
from tracelake.store.db import DeployLock

NO_SURPRISE = "no step fails with anything but a refusal"
SETTLES = "4, 8: once faults end, all work gets done"
Adjust = Callable[[Profile], Profile]
HOLD_SECONDS = 5.0
REWAKE_SECONDS = 20.0
OUTBOX_BATCH = 20
ROUNDS = 60
CLAIM_BATCH = 8


@dataclass(slots=True)
class Outcome:
    seed: int
    profile: Profile
    findings: list[Finding] = field(default_factory=list)
    digest: str = ""
    lines: list[str] = field(default_factory=list)
    acknowledged: int = 0
    answers: set[str] = field(default_factory=set)
    rolled_back: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Simulation:
    """Runs seeds, one after the other, on one database that it owns."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._observer: Observer | None = None
        self._sessions: list[asyncpg.Connection] = []
        self._raw: asyncpg.Connection | None = None
        self._held = HeldBackends()

    async def open(self) -> None:
        self._raw = await open_session(self._dsn, self._held)
        self._observer = Observer(self._raw, self._held)
        await self._observer.own_the_time()

    async def close(self) -> None:
        self._held.let_all_go()
        for session in [*self._sessions, self._raw]:
            if session is not None:
                await session.close()

    async def run(self, seed: int, adjust: Adjust = lambda profile: profile) -> Outcome:
        began = time.monotonic()
        world = await self._world(seed, adjust)
        outcome = Outcome(seed, world.profile)
        try:
            await self._storm(world)
            if not world.scheduler.errors:
                outcome.findings += await _rest_and_audit(world)
        except Exception as error:
            world.scheduler.errors.append(("rest", error))
        for actor, surprise in world.scheduler.errors:
            where = "".join(traceback.format_exception(surprise)[-6:])
            outcome.findings.append(Finding(NO_SURPRISE, f"{actor} goes on", where))
        outcome.digest, outcome.lines = world.scheduler.trace.digest, world.scheduler.trace.lines
        outcome.acknowledged = world.history.acknowledged
        outcome.answers = world.history.words()
        outcome.rolled_back = world.scheduler.rolled_back
        outcome.seconds = time.monotonic() - began
        return outcome

    async def _world(self, seed: int, adjust: Adjust) -> World:
        assert self._observer is not None
        rng = random.Random(seed)
        profile = adjust(draw(rng))
        await self._observer.begin(START)
        scheduler = Scheduler(rng, self._observer, profile.odds)
        world = World(
            seed,
            rng,
            profile,
            scheduler,
            self._observer,
            SimConnections(scheduler, self._sessions, self._dsn, self._held),
            MessageQueue(rng, profile.queue_loss, profile.duplicate),
            profile.layout,
            Entropy(seed),
        )
        world.start_dispatchers()
        return world

    async def _storm(self, world: World) -> None:
        scheduler = world.scheduler
        scheduler.direct = True
        await calls.deploy(world, world.layout)
        operators = world.layout.operators
        await world.dispatchers[0].db.run(lambda tx: pressure.set_caps(tx, operators))
        scheduler.direct = False
        for index in range(world.profile.dispatchers):
            scheduler.spawn(f"dispatcher{index}", run_loops(world, index))
        for index in range(world.profile.workers):
            scheduler.spawn(f"worker{index}", Worker(world, f"w{index}").live())
        scheduler.spawn("chain", calls.move_the_chain(world))
        for index in range(world.profile.people):
            scheduler.spawn(f"person{index}", calls.act_as_people(world))
        await scheduler.run(world.profile.turns)
        await scheduler.end()


async def _rest_and_audit(world: World) -> list[Finding]:
    rest = await come_to_rest(world)
    if not rest.settled:
        return [Finding(SETTLES, "nothing is left to do", "; ".join(rest.unfinished))]
    findings = await audit_content(world) + await audit_holds(world)
    findings += FenceAudit(world.history, world.layout).run()
    return findings + AnswerAudit(world.history).run()


async def run_loops(world: World, index: int) -> None:
    world.listening[index] = world.scheduler.now
    chores = ["deliver"] * 6 + ["reap"] * 2 + ["watch"]
    if world.profile.balances:
        chores += ["balance"] * 3
    if world.profile.sweeps:
        chores.append("rewake")
    if world.profile.reconciles:
        chores.append("reconcile")
    while True:
        await world.scheduler.sleep(world.rng.uniform(0.2, 4))
        try:
            await do_chore(world, world.rng.choice(chores), index)
        except Died:
            if world.scheduler.ending:
                raise
            world.restart(index)
        except Unavailable:
            continue


async def do_chore(world: World, chore: str, index: int) -> int:
    """One round of a chore; how much it found to do."""
    ctx = world.dispatchers[index]
    match chore:
        case "deliver":
            return await deliver_outbox(world, ctx)
        case "reap":
            return await reap_leases(ctx, world.listening[index])
        case "balance":
            found = await balance(ctx)
            return len(found.changed) + found.more
        case "rewake":
            return await rewake_queued(ctx, REWAKE_SECONDS)
        case "reconcile":
            return await reconcile_partitions(ctx)
        case _:
            return await watch_sources(ctx) + await route_waiting(ctx)


async def deliver_outbox(world: World, ctx: StepContext) -> int:
    """Publish what is due, then forget it: a death in between publishes it again."""
    entries = await ctx.db.run(
        lambda tx: outbox.take_due(tx, OUTBOX_BATCH, HOLD_SECONDS), lock=DeployLock.NONE, durable=False
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
    chores = ["balance"] if world.profile.balances else []
    chores += ["deliver", "reap", "watch"]
    chores += ["rewake"] if world.profile.sweeps else []
    chores += ["reconcile"] if world.profile.reconciles else []
    for chore in chores:
        await do_chore(world, chore, number % len(world.dispatchers))
    moved = 0
    messages = list(dict.fromkeys(world.queue.drain()))
    for first in range(0, len(messages), CLAIM_BATCH):
        requests = [
            ClaimRequest(task_id, "rest", f"rest-{number}")
            for task_id in messages[first : first + CLAIM_BATCH]
        ]
        answers = await calls.claim(world, requests)
        leases = [lease for answer in answers if (lease := Lease.of(answer)) is not None]
        moved += sum(lease.payload.operator != "follow" for lease in leases)
        reports = [report for lease in leases if (report := await _run(world, lease)) is not None]
        if reports:
            await calls.complete(world, reports)
    return moved + await _bring_back(world, began)


async def _run(world: World, lease: Lease) -> CompleteRequest | None:
    worker.first_act(world, lease.payload)
    if lease.payload.operator == "follow":
        output, epoch = lease.payload.outputs[0], lease.payload.epoch
        assert epoch is not None
        table = world.data.table(output.dataset_version)
        revision = await worker.drain_outbox(world, lease, table, output.revision)
        while revision is not None and not table.in_step_with(world.chain):
            table.follow(epoch, world.chain, 4)
            revision = await worker.drain_outbox(world, lease, table, revision)
        return None
    rows = await worker.read_inputs(world, lease.payload)
    made = await worker.write_outputs(world, lease.payload, rows)
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
    if await world.observer.read(SQL.still_held):
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
    ] + [f"{row['name']} has {row['what']}" for row in await world.observer.read(SQL.still_held)]
