"""The world of one run: everything that the actors share, with all randomness from its one seed.

``Chain`` has a number for each block, and another whenever the block is replaced. A hot table is written in one
step that stands for one transaction of the data database: the writer's fence must be the highest for every
overlapping range; rows of the range are replaced; events about it go to the table's own outbox, which is sent
to the Dispatcher before the producer goes on. The queue does to a message everything that a queue may do. The
history has all calls and their answers in order, without answers that were lost.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from tests.support.databases import ORG
from tests.support.simulation.connection import Observer
from tests.support.simulation.graph import Layout, Profile
from tests.support.simulation.scheduler import Scheduler
from tracelake.contracts.token_claims import TokenClaims
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.entropy import Entropy
from tracelake.domain.errors import Forbidden, NotFound, Unavailable
from tracelake.objects import base
from tracelake.objects.base import ObjectLocation, ObjectPrefix, ObjectStat, Upload
from tracelake.store.db import Connections, Database
from tracelake.store.jobs import JobDefinitions
from tracelake.tokens.jose import Jwks

EVERYTHING = 2**62


class Chain:
    def __init__(self) -> None:
        self._forks = [0]
        self._next = 1

    @property
    def tip(self) -> int:
        return len(self._forks) - 1

    def content(self, block: int) -> str | None:
        return f"{block}.{self._forks[block]}" if 0 <= block <= self.tip else None

    def mine(self, blocks: int) -> None:
        self._forks += range(self._next, self._next + blocks)
        self._next += blocks

    def reorganize(self, depth: int, regrown: int) -> None:
        """The last ``depth`` blocks (never the first one) give way to ``regrown`` others, maybe fewer."""
        depth = min(depth, self.tip)
        del self._forks[len(self._forks) - depth :]
        self.mine(regrown)

    def evolve(self, rng: random.Random, *, reorganize: bool, longest: int) -> str:
        if reorganize and rng.random() < 0.4:
            depth, regrown = rng.randint(1, 6), rng.randint(0, 7)
            self.reorganize(depth, regrown)
            return f"reorganizes {depth} blocks, tip {self.tip}"
        if self.tip < longest:
            self.mine(rng.randint(1, 4))
        return f"grows, tip {self.tip}"


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """An entry of a hot table's outbox: a cursor, or a range that was invalidated under an id."""

    cursor: int | None = None
    invalidated: tuple[int, int] | None = None
    id: str | None = None


@dataclass(slots=True)
class HotTable:
    rows: dict[int, str] = field(default_factory=dict)
    ever: set[tuple[int, str]] = field(default_factory=set)
    outbox: deque[OutboxEntry] = field(default_factory=deque)
    _fences: list[tuple[int, int, int]] = field(default_factory=list)
    _reorgs: int = 0

    def fence(self, epoch: int, start: int, end: int = EVERYTHING) -> None:
        """A writer's first act: from now on nobody with a lower epoch writes in this range."""
        self._fences.append((epoch, start, end))

    def held_by(self, epoch: int, start: int, end: int) -> bool:
        return not any(e > epoch and s <= end and f >= start for e, s, f in self._fences)

    def replace(self, epoch: int, start: int, end: int, rows: dict[int, str]) -> bool:
        """One transaction of a replacing writer; False when a newer writer has fenced the range."""
        if not self.held_by(epoch, start, end):
            return False
        self.rows = {block: row for block, row in self.rows.items() if not start <= block <= end}
        self.rows |= rows
        self.ever |= set(rows.items())
        return True

    def append(self, rows: dict[int, str]) -> None:
        """Append under a unique key: what is there already stays as it is."""
        self.ever |= set(rows.items())

    def follow(self, epoch: int, chain: Chain, most: int) -> bool:
        """Follow the chain by at most ``most`` new blocks; False if a newer writer has fenced the table."""
        if not self.held_by(epoch, 0, EVERYTHING):
            return False
        height = len(self.rows)
        fork = next((b for b in range(height) if self.rows[b] != chain.content(b)), height)
        if fork < height:
            self._reorgs += 1
            self.outbox.append(OutboxEntry(invalidated=(fork, height - 1), id=f"reorg-{self._reorgs}"))
        for block in range(fork, height):
            del self.rows[block]
        for block in range(fork, min(chain.tip + 1, fork + most)):
            content = chain.content(block)
            assert content is not None
            self.rows[block] = content
        if self.rows and (fork < height or len(self.rows) > height):
            self.outbox.append(OutboxEntry(cursor=len(self.rows) - 1))
        return True

    def in_step_with(self, chain: Chain) -> bool:
        return not self.outbox and self.rows == {b: chain.content(b) for b in range(chain.tip + 1)}


class DataPlane:
    """Hot tables by dataset version."""

    def __init__(self) -> None:
        self._tables: dict[UUID, HotTable] = {}

    def table(self, dataset_version: UUID) -> HotTable:
        return self._tables.setdefault(UUID(int=dataset_version.int), HotTable())


class MemoryStore:
    """An object store without a disk, for processes that live in one."""

    def __init__(self) -> None:
        self._root = ObjectPrefix("s3", "simulation", "lake/")
        self._objects: dict[str, bytes] = {}

    @property
    def root(self) -> ObjectPrefix:
        return self._root

    @property
    def local(self) -> None:
        return None

    def locate(self, text: str) -> ObjectLocation | ObjectPrefix:
        return ObjectPrefix.parse(text) if text.endswith("/") else ObjectLocation.parse(text)

    def staging_prefix(
        self, dataset_uuid: UUID, dataset_version: UUID, task_id: UUID, attempt: int, epoch: int
    ) -> ObjectPrefix:
        return base.staging_prefix(self._root, dataset_uuid, dataset_version, task_id, attempt, epoch)

    async def stat(self, location: ObjectLocation) -> ObjectStat | None:
        content = self._objects.get(location.uri)
        return ObjectStat(location, len(content)) if content is not None else None

    async def list(self, prefix: ObjectPrefix, limit: int | None = None) -> tuple[ObjectStat, ...]:
        names = sorted(name for name in self._objects if name.startswith(prefix.uri))
        return tuple(
            ObjectStat(ObjectLocation.parse(name), len(self._objects[name])) for name in names[:limit]
        )

    async def read(self, location: ObjectLocation, max_bytes: int) -> bytes:
        if location.uri not in self._objects:
            raise NotFound("ObjectNotFound", f"no such object: {location}")
        return self._objects[location.uri][:max_bytes]

    async def put(self, location: ObjectLocation, content: bytes) -> None:
        self._objects[location.uri] = content

    async def begin_upload(self) -> Upload:
        raise Unavailable("NoUploads", "nobody pushes bundles in a simulation")

    async def read_pieces(self, location: ObjectLocation) -> AsyncIterator[bytes]:
        yield await self.read(location, len(self._objects.get(location.uri, b"")))

    async def delete_prefix(self, prefix: ObjectPrefix) -> int:
        if not base.is_staging(self._root, prefix):
            raise Forbidden("NotStaging", f"not the staging prefix of one attempt: {prefix}")
        doomed = [name for name in self._objects if name.startswith(prefix.uri)]
        for name in doomed:
            del self._objects[name]
        return len(doomed)

    async def delete_body(self, location: ObjectLocation) -> None:
        if not base.is_delivery(self._root, location):
            raise Forbidden("NotDelivery", f"not the body of a delivery: {location}")
        self._objects.pop(location.uri, None)


@dataclass(slots=True)
class MessageQueue:
    """``lossy`` loses messages; a queue that isn't still delays, repeats and reorders them."""

    rng: random.Random
    lossy: bool
    repeats: float
    _messages: list[tuple[datetime, UUID]] = field(default_factory=list)

    def publish(self, task_id: UUID, now: datetime) -> None:
        if self.lossy and self.rng.random() < 0.15:
            return
        for _ in range(2 if self.rng.random() < self.repeats else 1):
            delay = self.rng.uniform(0, 30) if self.rng.random() < 0.1 else 0.0
            self._messages.append((now + timedelta(seconds=delay), task_id))

    def receive(self, now: datetime) -> UUID | None:
        """Some message that is visible; gone from the queue until it is given back."""
        visible = [index for index, (at, _) in enumerate(self._messages) if at <= now]
        if not visible:
            return None
        return self._messages.pop(self.rng.choice(visible))[1]

    def give_back(self, task_id: UUID, now: datetime) -> None:
        self._messages.append((now, task_id))

    def drain(self) -> list[UUID]:
        """Everything at once, visible or not."""
        taken = [task_id for _, task_id in self._messages]
        self._messages.clear()
        return taken


@dataclass(slots=True)
class Call:
    """``issued``, ``answered`` and ``lost`` are positions in one order of everything that callers saw."""

    kind: str
    request: Any
    issued: int
    issued_at: datetime
    echo: bool = False
    answered: int | None = None
    answered_at: datetime | None = None
    answer: Any = None
    lost: int | None = None

    @property
    def finished(self) -> int:
        """From when on the call can't have any effect any more."""
        return self.answered or self.lost or sys.maxsize

    @property
    def refused(self) -> bool:
        return isinstance(self.answer, Exception)

    @property
    def accepted(self) -> bool:
        return self.answered is not None and not self.refused


@dataclass(slots=True)
class History:
    calls: list[Call] = field(default_factory=list)
    _order: int = 0

    def issue(self, kind: str, request: Any, now: datetime, *, echo: bool) -> Call:
        self._order += 1
        call = Call(kind, request, self._order, now, echo)
        self.calls.append(call)
        return call

    def answer(self, call: Call, answer: Any, now: datetime) -> None:
        self._order += 1
        call.answered, call.answered_at, call.answer = self._order, now, answer

    def lose(self, call: Call) -> None:
        self._order += 1
        call.lost = self._order

    def of(self, *kinds: str) -> list[Call]:
        return [call for call in self.calls if call.kind in kinds]

    @property
    def acknowledged(self) -> int:
        return sum(call.answered is not None for call in self.calls)

    def words(self) -> set[str]:
        """The machine-readable words of all answers, to see the coverage of a run."""
        words: set[str] = set()
        for call in self.calls:
            for answer in (call.answer, *getattr(call.answer, "events", ())):
                words |= {str(getattr(answer, name, "")) for name in ("status", "reason", "state")}
        return words


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
            definitions=JobDefinitions(),
            objects=self.objects,
            signer=PlainSigner(),
            runtimes=RuntimeRegistry(),
            org_id=ORG,
        )
