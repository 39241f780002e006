"""What the directory drivers share: calls in threads, since a disk can block, and folders made durable."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from tracelake.domain.errors import Unavailable

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Raises ``Unavailable`` for what the disk refuses."""
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else type(error).__name__
        raise Unavailable("ObjectStoreUnavailable", f"the object store can't answer: {why}") from error


def sync_folder(folder: Path) -> None:
    """A name that was just made or changed in it survives a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
