"""One seed from beginning to end: storm, rest, audit."""

from __future__ import annotations

import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import asyncpg

from tracelake.domain.entropy import Entropy
from tracelake.testing.simulation import loops, people
from tracelake.testing.simulation.audit_answers import AnswerAudit
from tracelake.testing.simulation.audit_content import audit_content
from tracelake.testing.simulation.audit_fences import FenceAudit
from tracelake.testing.simulation.connection import Observer, SimConnections, open_session
from tracelake.testing.simulation.findings import Finding
from tracelake.testing.simulation.lock_waits import HeldBackends
from tracelake.testing.simulation.message_queue import MessageQueue
from tracelake.testing.simulation.profile import Profile, draw
from tracelake.testing.simulation.quiescence import come_to_rest
from tracelake.testing.simulation.scheduler import Scheduler
from tracelake.testing.simulation.trace import START
from tracelake.testing.simulation.worker import Worker
from tracelake.testing.simulation.world import World

NO_SURPRISE = "no step fails with anything but a refusal"
SETTLES = "4, 8: once faults end, all work gets done"

Adjust = Callable[[Profile], Profile]


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
        await people.deploy(world, world.layout)
        scheduler.direct = False
        for index in range(world.profile.dispatchers):
            scheduler.spawn(f"dispatcher{index}", loops.live(world, index))
        for index in range(world.profile.workers):
            scheduler.spawn(f"worker{index}", Worker(world, f"w{index}").live())
        scheduler.spawn("chain", people.move_the_chain(world))
        for index in range(world.profile.people):
            scheduler.spawn(f"person{index}", people.live(world))
        await scheduler.run(world.profile.turns)
        await scheduler.end()


async def _rest_and_audit(world: World) -> list[Finding]:
    rest = await come_to_rest(world)
    if not rest.settled:
        return [Finding(SETTLES, "nothing is left to do", "; ".join(rest.unfinished))]
    findings = await audit_content(world)
    findings += FenceAudit(world.history, world.layout).run()
    return findings + AnswerAudit(world.history).run()
