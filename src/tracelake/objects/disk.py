"""What the directory drivers share: calls in threads, since a disk can block."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
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
