"""Where simulated workers put rows: hot tables with the contract's fences, and committed files.

A hot table is written in one step that stands for one transaction of the data database: the writer's fence
must be the highest for every overlapping range; rows of the range are replaced; what has to be said about it
goes to the table's own outbox, from which it is drained to the Dispatcher before the producer goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from uuid import UUID

from tracelake.domain.errors import Forbidden, NotFound, Unavailable
from tracelake.objects import layout
from tracelake.objects.base import ObjectStat, Upload
from tracelake.objects.prefix import ObjectLocation, ObjectPrefix
from tracelake.testing.simulation.chain import Chain

EVERYTHING = 2**62


@dataclass(frozen=True, slots=True)
class Said:
    """An entry of a hot table's outbox: a cursor, or a range that was taken back under an id."""

    cursor: int | None = None
    invalidated: tuple[int, int] | None = None
    id: str | None = None


@dataclass(slots=True)
class HotTable:
    rows: dict[int, str] = field(default_factory=dict)
    ever: set[tuple[int, str]] = field(default_factory=set)
    outbox: deque[Said] = field(default_factory=deque)
    _fences: list[tuple[int, int, int]] = field(default_factory=list)
    _said: int = 0

    def fence(self, epoch: int, start: int, end: int = EVERYTHING) -> None:
        """A writer's first act: from now on nobody with a lower epoch writes in this range."""
        self._fences.append((epoch, start, end))

    def held_by(self, epoch: int, start: int, end: int) -> bool:
        return not any(e > epoch and s <= end and f >= start for e, s, f in self._fences)

    def replace(self, epoch: int, start: int, end: int, rows: dict[int, str]) -> bool:
        """One transaction of a replacing writer; False when somebody newer has fenced the range."""
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
        """Take over what the chain has become, at most so many new blocks; False when fenced off."""
        if not self.held_by(epoch, 0, EVERYTHING):
            return False
        height = len(self.rows)
        fork = next((b for b in range(height) if self.rows[b] != chain.content(b)), height)
        if fork < height:
            self._said += 1
            self.outbox.append(Said(invalidated=(fork, height - 1), id=f"reorg-{self._said}"))
        for block in range(fork, height):
            del self.rows[block]
        for block in range(fork, min(chain.tip + 1, fork + most)):
            content = chain.content(block)
            assert content is not None
            self.rows[block] = content
        if self.rows and (fork < height or len(self.rows) > height):
            self.outbox.append(Said(cursor=len(self.rows) - 1))
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

    def locate(self, text: str) -> ObjectLocation | ObjectPrefix:
        return ObjectPrefix.parse(text) if text.endswith("/") else ObjectLocation.parse(text)

    def staging_prefix(
        self, dataset_uuid: UUID, dataset_version: UUID, task_id: UUID, attempt: int, epoch: int
    ) -> ObjectPrefix:
        return layout.staging_prefix(self._root, dataset_uuid, dataset_version, task_id, attempt, epoch)

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
        if not layout.is_staging(self._root, prefix):
            raise Forbidden("NotStaging", f"not the staging prefix of one attempt: {prefix}")
        doomed = [name for name in self._objects if name.startswith(prefix.uri)]
        for name in doomed:
            del self._objects[name]
        return len(doomed)
