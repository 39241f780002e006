"""Object stores: one contract (``base``), a driver for each kind, and ``open``, which chooses by the address.

Settings hold addresses; ``address`` makes one of a plain path.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tracelake.domain.errors import Invalid

if TYPE_CHECKING:
    from tracelake.objects.base import ObjectStore


def address(place: str | Path) -> str:
    """The address of an object store as people give it: a URL, or the path of a folder."""
    return str(place) if "://" in str(place) else f"file://{Path(place).absolute()}"


def open(url: str) -> ObjectStore:
    """The object store at ``file:///folder``, whose folder is made if it is missing."""
    scheme, separator, path = url.partition("://")
    if scheme == "file" and path.startswith("/"):
        from tracelake.objects.directory import DirectoryStore

        # Not percent-decoded: URIs of objects hold names as they are.
        return DirectoryStore(Path(path))
    shown = f"{scheme}://" if separator else "an address without a scheme"
    raise Invalid(
        "UnknownObjectScheme",
        f"an object store's address begins with file:/// and an absolute path, not with {shown}",
    )
