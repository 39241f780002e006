"""Canonical names of objects and of the directory prefixes that permissions are given for.

Two spellings of one place are a hole: the check reads one, the storage the other. So there is exactly
one spelling, and what isn't in it is refused rather than repaired; only a missing final ``/`` is added
to a prefix, because a permission is always for a directory, never for "starts with anything". Refused
are ``..`` anywhere, empty and ``.`` segments, ``*`` and ``?`` (policy wildcards), ``$`` (policy
variables), ``%`` (escapes that somebody downstream might decode), ``#``, backslashes and everything
unprintable. URIs hold names as they are, without percent-encoding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tracelake.domain.errors import Invalid

MAX_PATH_BYTES = 1024
"""What S3 allows for a key."""

_FORBIDDEN = frozenset("*?$%#\\")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]", re.ASCII)


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
        """Whether it lies below this prefix, or is this prefix; what isn't canonical lies nowhere."""
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
    """Refuse with what is wrong; ``path`` comes without its final slash."""
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
    if len(path.encode()) >= MAX_PATH_BYTES:
        raise Invalid("PrefixInvalid", f"longer than {MAX_PATH_BYTES} bytes: {shown}")


def _is_bucket(bucket: str) -> bool:
    return _BUCKET.fullmatch(bucket) is not None and ".." not in bucket
