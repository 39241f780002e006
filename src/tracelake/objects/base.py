"""What the platform asks of an object store; every driver passes one shared suite of behaviours.

Errors: a location outside of the root is ``Forbidden`` (``LocationOutsideRoot``), one that isn't
canonical ``Invalid``, a missing object ``NotFound``, one above a limit ``TooLarge``, and a store that
can't answer ``Unavailable``: "it isn't there" and "I couldn't look" are two different answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from tracelake.objects.prefix import ObjectLocation, ObjectPrefix


@dataclass(frozen=True, slots=True, order=True)
class ObjectStat:
    location: ObjectLocation
    bytes: int


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

    async def delete_prefix(self, prefix: ObjectPrefix) -> int:
        """Remove an attempt's objects, and say how many. Anything above one attempt is refused."""
        ...
