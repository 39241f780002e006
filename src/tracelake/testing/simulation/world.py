"""One run's world: everything that the actors share, and everything random from its one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import datetime
from uuid import UUID

from tracelake.contracts.token_claims import TokenClaims
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.entropy import Entropy
from tracelake.store.db import Connections, Database
from tracelake.store.jobs import JobCards
from tracelake.testing.simulation.chain import Chain
from tracelake.testing.simulation.connection import Observer
from tracelake.testing.simulation.data_plane import DataPlane, MemoryStore
from tracelake.testing.simulation.graph import Layout
from tracelake.testing.simulation.history import History
from tracelake.testing.simulation.message_queue import MessageQueue
from tracelake.testing.simulation.profile import Profile
from tracelake.testing.simulation.scheduler import Scheduler
from tracelake.testing.state import ORG
from tracelake.tokens.jwks import Jwks


class PlainSigner:
    """Signs nothing: real signatures differ from run to run."""

    async def sign(self, claims: TokenClaims) -> str:
        return claims.jti

    async def jwks(self, now: datetime) -> Jwks:
        raise NotImplementedError("nobody in the simulation verifies a token")


@dataclass(slots=True)
class World:
    seed: int
    rng: random.Random
    profile: Profile
    scheduler: Scheduler
    observer: Observer
    connections: Connections
    queue: MessageQueue
    layout: Layout
    entropy: Entropy
    chain: Chain = field(default_factory=Chain)
    data: DataPlane = field(default_factory=DataPlane)
    objects: MemoryStore = field(default_factory=MemoryStore)
    history: History = field(default_factory=History)
    dispatchers: list[StepContext] = field(default_factory=list)
    listening: dict[int, datetime] = field(default_factory=dict)
    tasks_seen: list[UUID] = field(default_factory=list)
    old_versions: list[tuple[UUID, UUID]] = field(default_factory=list)

    def start_dispatchers(self) -> None:
        self.dispatchers = [self._dispatcher() for _ in range(self.profile.dispatchers)]

    def restart(self, index: int) -> None:
        """A dispatcher died: the next one knows nothing of what it knew, and listens from now on."""
        self.dispatchers[index] = self._dispatcher()
        self.listening[index] = self.scheduler.now

    def see(self, task_id: UUID) -> None:
        if task_id not in self.tasks_seen:
            self.tasks_seen.append(task_id)

    def pick(self, choices: list[UUID]) -> UUID | None:
        return self.rng.choice(choices) if choices else None

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def uuid(self) -> UUID:
        return UUID(int=self.rng.getrandbits(128), version=4)

    def _dispatcher(self) -> StepContext:
        return StepContext(
            # How long a rollback takes is the scheduler's business, not that of the machine that runs it.
            db=Database(self.connections, rollback_seconds=None),
            entropy=self.entropy,
            cards=JobCards(),
            objects=self.objects,
            signer=PlainSigner(),
            runtimes=RuntimeRegistry(),
            org_id=ORG,
        )
