"""Workers: they take wake-ups, claim, work and report; and they crash, dawdle and come back from the dead."""

from __future__ import annotations

from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import ClaimRequest, CompleteRequest, EventsRequest
from tracelake.testing.simulation import calls, follower, operators
from tracelake.testing.simulation.calls import CallLost
from tracelake.testing.simulation.graph import LEASE
from tracelake.testing.simulation.lease import Lease, Word
from tracelake.testing.simulation.world import World


class Crashed(Exception):
    """The worker's process is gone; another one starts in its place."""


class Worker:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._lives = 0

    @property
    def worker_id(self) -> str:
        return f"{self._name}.{self._lives}"

    async def live(self) -> None:
        while True:
            try:
                await self._next_message()
            except (Crashed, CallLost):
                self._lives += 1
                await self._world.scheduler.sleep(self._world.rng.uniform(0.5, 5))

    async def _next_message(self) -> None:
        world = self._world
        most = world.rng.randint(1, 3) if world.profile.batches else 1
        received = (world.queue.receive(world.scheduler.now) for _ in range(most))
        messages = list(dict.fromkeys(task_id for task_id in received if task_id is not None))
        if not messages:
            await world.scheduler.sleep(world.rng.uniform(0.5, 4))
            return
        try:
            await world.scheduler.turn(f"has {len(messages)} wake-ups")
            leases = await self._claim(messages)
        except BaseException:
            for task_id in messages:
                world.queue.give_back(task_id, world.scheduler.now)
            raise
        await self._work(leases)

    async def _claim(self, messages: list[UUID]) -> list[Lease]:
        world = self._world
        for task_id in messages:
            world.see(task_id)
        key = f"{self.worker_id}-{world.rng.getrandbits(32):08x}"
        requests = [ClaimRequest(task_id, self.worker_id, key) for task_id in messages]
        answers = await calls.claim(world, requests)
        return [lease for answer in answers if (lease := Lease.of(answer)) is not None]

    async def _work(self, leases: list[Lease]) -> None:
        reports = []
        for lease in leases:
            report = await self._run(lease)
            if report is not None:
                await self._maybe_impostor(report)
                reports.append(report)
        if reports and self._world.chance(0.5):
            await calls.complete(self._world, reports)
        else:
            for report in reports:
                await calls.complete(self._world, [report])

    async def _run(self, lease: Lease) -> CompleteRequest | None:
        """Work on a lease up to its report; None when there is nothing to report any more."""
        world, profile = self._world, self._world.profile
        if lease.payload.operator == "follow":
            return await self._follow(lease)
        zombie = world.chance(profile.zombie)
        operators.first_act(world, lease.payload)
        if (word := await self._spend_time(lease, zombie)) is not None:
            return word
        rows = await operators.read(world, lease.payload)
        if (word := await self._spend_time(lease, zombie)) is not None:
            return word
        if (status := self._other_end()) is not None:
            return lease.ended(status, retryable=not world.chance(0.2))
        await world.scheduler.turn("writes its outputs")
        made = await operators.write(world, lease.payload, rows)
        if made is None:
            return None
        if zombie:
            await world.scheduler.sleep(world.rng.uniform(1, 3) * LEASE)
        return await self._report(lease, made)

    async def _report(self, lease: Lease, made: operators.Made) -> CompleteRequest:
        world = self._world
        self._maybe_crash()
        events = made.events
        if events and world.chance(0.4):
            await calls.send_events(world, EventsRequest(lease.task_id, lease.attempt, events, lease.token))
            events = events if world.chance(0.5) else []
        self._maybe_crash()
        done = lease.ended("Completed")
        return msgspec.structs.replace(done, outputs=made.outputs, events=events)

    async def _follow(self, lease: Lease) -> CompleteRequest | None:
        world = self._world
        if not await follower.follow(world, lease, self._maybe_crash):
            return None
        self._maybe_crash()
        return lease.ended(world.rng.choice(("Released", "Failed", "Completed")))

    async def _spend_time(self, lease: Lease, zombie: bool) -> CompleteRequest | None:
        """Time passes; a holder that is alive says so, a slow one when its lease is over already, and listens."""
        world = self._world
        self._maybe_crash()
        if world.chance(0.5):
            await world.scheduler.sleep(world.rng.uniform(0, 0.7) * LEASE)
        if zombie and world.chance(0.5):
            await world.scheduler.sleep(world.rng.uniform(0.9, 1.5) * LEASE)
        elif zombie or world.chance(0.4):
            return None
        match await lease.beat(world):
            case Word.CANCEL if world.chance(0.7):
                return lease.ended("Canceled")
            case _:
                return None

    def _other_end(self) -> str | None:
        if self._world.chance(self._world.profile.fails):
            return "Failed"
        return "Released" if self._world.chance(self._world.profile.releases) else None

    def _maybe_crash(self) -> None:
        if self._world.chance(self._world.profile.crash / 4):
            raise Crashed

    async def _maybe_impostor(self, report: CompleteRequest) -> None:
        """Somebody who doesn't hold the lease says the same."""
        world = self._world
        if not world.chance(world.profile.impostor):
            return
        assert report.attempt is not None
        wrong = world.rng.choice(("token", "attempt"))
        if wrong == "token":
            forged = msgspec.structs.replace(report, lease_token=world.uuid())
        else:
            forged = msgspec.structs.replace(report, attempt=report.attempt + world.rng.choice((1, 2)))
        await calls.complete(world, [forged])
