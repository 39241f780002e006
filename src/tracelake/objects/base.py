"""The contract of object stores, and the canonical names of objects.

Every driver passes one shared suite of behaviours. Errors: a location outside of the root is ``Forbidden``
(``LocationOutsideRoot``), one that isn't canonical ``Invalid``, a missing object ``NotFound``, one above a limit
``TooLarge``, and a store that can't answer ``Unavailable``: "it isn't there" and "I couldn't look" are different
answers.

Two spellings of one place would be a hole: the check reads one, the storage the other. So there is exactly one
spelling, and any other is refused rather than repaired; only a missing final ``/`` is added to a prefix, because
a permission is always for a directory, never for "starts with anything". Refused are ``..`` anywhere, empty and
``.`` segments, ``*`` and ``?`` (policy wildcards), ``$`` (policy variables), ``%`` (escapes that other software
might decode), ``#``, backslashes and all unprintable characters. URIs hold names as they are, without
percent-encoding.

An attempt's files lie in ``{root}/dataset/{uuid}/version/{uuid}/{task_id}/{attempt}-{epoch}/`` and stay there
after the commit, which neither renames nor copies. The folder differs for every attempt and, by the epoch, for
the same attempt number after a restore from backup: a superseded writer can go on writing without touching
another's file.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from uuid import UUID

from tracelake.contracts.staging import is_in_staging_folder, staging_folder
from tracelake.domain.errors import Invalid

MAX_PATH_BYTES = 1024
"""The maximum length of an S3 key."""
_FORBIDDEN = frozenset("*?$%#\\")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)


@dataclass(frozen=True, slots=True, order=True)
class ObjectStat:
    location: ObjectLocation
    bytes: int


class Upload(Protocol):
    """An object that is being written, invisible to others until it is kept."""

    @property
    def file(self) -> BinaryIO:
        """The content so far; to be read between writes, in threads."""
        ...

    async def write(self, piece: bytes) -> None: ...

    async def keep(self, location: ObjectLocation) -> None:
        """Publish it under a name that identifies its content: an existing object of this size is the same one.
        Durable on return."""
        ...

    async def discard(self) -> None:
        """Remove it unless it was kept; does nothing after ``keep``."""
        ...


class LocalObjects(Protocol):
    """Additional abilities of a store whose objects are files of this machine."""

    @property
    def folder(self) -> Path:
        """The root's folder, with links resolved."""
        ...

    def open_descriptor(self, location: ObjectLocation) -> int:
        """For reading. Blocks, so it is called in a thread; the caller closes it."""
        ...


class ObjectStore(Protocol):
    @property
    def root(self) -> ObjectPrefix: ...

    @property
    def local(self) -> LocalObjects | None:
        """None where objects aren't files of this machine."""
        ...

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
        """For an object that is too large for memory, or named after its content."""
        ...

    def read_pieces(self, location: ObjectLocation) -> AsyncIterator[bytes]:
        """An object's content; ``NotFound`` comes with the first piece."""
        ...

    async def delete_prefix(self, prefix: ObjectPrefix) -> int:
        """Remove an attempt's objects; returns how many. Refuses any prefix that isn't one attempt's."""
        ...

    async def delete_body(self, location: ObjectLocation) -> None:
        """Remove the body of a delivery, if it is there. Refuses any other object. Durable on return."""
        ...


@dataclass(frozen=True, slots=True, order=True)
class ObjectLocation:
    """One object: ``s3://bucket/path/name`` or ``file:///path/name`` (then ``bucket`` is empty)."""

    scheme: str
    bucket: str
    path: str

    def __post_init__(self) -> None:
        _check(self.scheme, self.bucket, self.path, self.uri)

    @classmethod
    def parse(cls, text: str) -> ObjectLocation:
        return cls(*_split(text))

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}"

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def __str__(self) -> str:
        return self.uri


@dataclass(frozen=True, slots=True, order=True)
class ObjectPrefix:
    """A directory of objects; ``path`` ends with ``/`` and is never empty."""

    scheme: str
    bucket: str
    path: str

    def __post_init__(self) -> None:
        if not self.path.endswith("/"):
            raise Invalid("PrefixInvalid", f"not a directory prefix: {self.uri!r}")
        _check(self.scheme, self.bucket, self.path[:-1], self.uri)

    @classmethod
    def parse(cls, text: str) -> ObjectPrefix:
        scheme, bucket, path = _split(text)
        return cls(scheme, bucket, path if path.endswith("/") else path + "/")

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.path}"

    def __str__(self) -> str:
        return self.uri

    def contains(self, location: ObjectLocation | ObjectPrefix | str) -> bool:
        """Whether it lies below this prefix, or is this prefix; False for a name that isn't canonical."""
        if isinstance(location, str):
            try:
                kind = ObjectPrefix if location.endswith("/") else ObjectLocation
                location = kind.parse(location)
            except Invalid:
                return False
        return (location.scheme, location.bucket) == (self.scheme, self.bucket) and location.path.startswith(
            self.path
        )

    def child(self, name: str) -> ObjectPrefix:
        """The directory ``name`` directly below."""
        return ObjectPrefix(self.scheme, self.bucket, f"{self.path}{_segment(name)}/")

    def location(self, name: str) -> ObjectLocation:
        """The object ``name`` directly below."""
        return ObjectLocation(self.scheme, self.bucket, self.path + _segment(name))


def _split(text: str) -> tuple[str, str, str]:
    scheme, colon, rest = text.partition("://")
    bucket, slash, path = rest.partition("/")
    if not (colon and slash):
        raise Invalid("PrefixInvalid", f"neither s3://bucket/path nor file:///path: {text[:200]!r}")
    return scheme, bucket, path


def _segment(name: str) -> str:
    if "/" in name:
        raise Invalid("PrefixInvalid", f"not a single name: {name[:200]!r}")
    return name


def _check(scheme: str, bucket: str, path: str, uri: str) -> None:
    """``Invalid`` for a name that isn't canonical; ``path`` comes without its final slash."""
    shown = repr(uri[:200])
    if scheme not in ("s3", "file"):
        raise Invalid("PrefixInvalid", f"the scheme must be s3 or file: {shown}")
    if (scheme == "s3") != bool(bucket) or (bucket and not _is_bucket(bucket)):
        raise Invalid("PrefixInvalid", f"not a bucket: {shown}")
    if not path:
        raise Invalid("PrefixInvalid", f"the path is empty, which would mean everything: {shown}")
    if ".." in path or any(segment in ("", ".") for segment in path.split("/")):
        raise Invalid("PrefixInvalid", f"empty, '.' or '..' in the path: {shown}")
    if not path.isprintable() or not _FORBIDDEN.isdisjoint(path):
        raise Invalid("PrefixInvalid", f"a forbidden character in the path: {shown}")
    # Not equal: a prefix has one more byte, its final slash.
    if len(path.encode()) >= MAX_PATH_BYTES:
        raise Invalid("PrefixInvalid", f"longer than {MAX_PATH_BYTES} bytes: {shown}")


def _is_bucket(bucket: str) -> bool:
    return _BUCKET.fullmatch(bucket) is not None and ".." not in bucket


def staging_prefix(
    root: ObjectPrefix, dataset_uuid: UUID, dataset_version: UUID, task_id: UUID, attempt: int, epoch: int
) -> ObjectPrefix:
    below = staging_folder(dataset_uuid, dataset_version, task_id, attempt, epoch)
    return ObjectPrefix(root.scheme, root.bucket, root.path + below)


def bundle_location(root: ObjectPrefix, sha256: str) -> ObjectLocation:
    """The location of a function's bundle, under the hash of its content, so that it is never replaced."""
    return ObjectLocation(root.scheme, root.bucket, f"{root.path}bundle/{sha256}.zip")


def batch_location(root: ObjectPrefix, dataset_uuid: UUID, batch_id: UUID) -> ObjectLocation:
    """The location of the records of a batch that is too large for its queue."""
    return ObjectLocation(root.scheme, root.bucket, f"{root.path}buffer/{dataset_uuid}/{batch_id}.json")


def delivery_location(root: ObjectPrefix, object_id: UUID) -> ObjectLocation:
    """The location of a delivery's body that is too large for its row."""
    return ObjectLocation(root.scheme, root.bucket, f"{root.path}delivery/{object_id}")


def is_delivery(root: ObjectPrefix, location: ObjectLocation) -> bool:
    """Whether the object is the body of a delivery."""
    return root.child("delivery").location(location.name) == location


def is_staging(root: ObjectPrefix, prefix: ObjectPrefix) -> bool:
    """Whether the prefix belongs to a single attempt, so that removing it can't hurt another one."""
    return root.contains(prefix) and is_in_staging_folder(prefix.path[len(root.path) :])
