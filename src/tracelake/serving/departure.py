"""Work that is only worth doing while somebody waits for it.

A server says that its client has gone away only when asked; so somebody asks while the work goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from litestar.types import Receive

from tracelake.domain.errors import BadRequest

T = TypeVar("T")


async def while_there(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` gives; it is cancelled, and has ended on return, when the client of ``receive`` goes away or
    the request itself is cancelled. To be called when the body has been read."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise BadRequest("Disconnected", "the client went away before its answer")
    finally:
        await _end(gone)
        await _end(working)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


async def _end(task: asyncio.Task[Any]) -> None:
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await task
