"""What the platform asks of an object store; every driver passes one shared suite of behaviours.

Errors: a location outside of the root is ``Forbidden`` (``LocationOutsideRoot``), one that isn't
canonical ``Invalid``, a missing object ``NotFound``, one above a limit ``TooLarge``, and a store that
can't answer ``Unavailable``: "it isn't there" and "I couldn't look" are two different answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol
from uuid import UUID

from tracelake.objects.prefix import ObjectLocation, ObjectPrefix


@dataclass(frozen=True, slots=True, order=True)
class ObjectStat:
    location: ObjectLocation
    bytes: int


class Upload(Protocol):
    """An object in the making; nobody sees it before it is kept."""

    @property
    def file(self) -> BinaryIO:
        """What was written so far; to be read between writes, in threads."""
        ...

    async def write(self, piece: bytes) -> None: ...

    async def keep(self, location: ObjectLocation) -> None:
        """Under a name that stands for its content: if an object of this size is there, it is this one. Durable
        on return."""
        ...

    async def discard(self) -> None:
        """What wasn't kept is gone; after ``keep`` there is nothing to do."""
        ...


class ObjectStore(Protocol):
    @property
    def root(self) -> ObjectPrefix: ...

    def locate(self, text: str) -> ObjectLocation | ObjectPrefix:
        """The canonical form of a location as callers write it; a prefix if it ends with ``/``."""
        ...

    def staging_prefix(
        self, dataset_uuid: UUID, dataset_version: UUID, task_id: UUID, attempt: int, epoch: int
    ) -> ObjectPrefix: ...

    async def stat(self, location: ObjectLocation) -> ObjectStat | None: ...

    async def list(self, prefix: ObjectPrefix, limit: int | None = None) -> tuple[ObjectStat, ...]:
        """The objects below a prefix by name, at most ``limit``; unfinished writes are not among them."""
        ...

    async def read(self, location: ObjectLocation, max_bytes: int) -> bytes: ...

    async def put(self, location: ObjectLocation, content: bytes) -> None:
        """Create or replace; a reader sees the old object or the new one, never a part."""
        ...

    async def begin_upload(self) -> Upload:
        """For what is too large for memory, or gets its name from its content."""
        ...

    def read_pieces(self, location: ObjectLocation) -> AsyncIterator[bytes]:
        """An object's content; ``NotFound`` comes with the first piece."""
        ...

    async def delete_prefix(self, prefix: ObjectPrefix) -> int:
        """Remove an attempt's objects, and say how many. Anything above one attempt is refused."""
        ...
