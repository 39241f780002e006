"""Repeats a call until it is answered: an outage is waited out with growing delays, a refusal is raised at once.

For calls that may be repeated safely. The caller decides which errors are an outage: by default ``Unavailable``.
A server that fails says nothing about the call itself, so its clients wait out ``is_server_fault``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tracelake.domain.backoff import Backoff, spread
from tracelake.domain.errors import TracelakeError, Unavailable

T = TypeVar("T")


def is_unavailable(error: TracelakeError) -> bool:
    return isinstance(error, Unavailable)


def is_server_fault(error: TracelakeError) -> bool:
    """For clients of a server: every status from 500 on."""
    return is_unavailable(error) or error.status >= 500


async def until_answered(
    call: Callable[[], Awaitable[T]],
    backoff: Backoff,
    *,
    until: float | None = None,
    is_outage: Callable[[TracelakeError], bool] = is_unavailable,
    on_away: Callable[[TracelakeError], None] | None = None,
    on_back: Callable[[], None] | None = None,
) -> T:
    """The answer of ``call``.

    Raises its refusal, or its last outage when the next try would be after ``until``, a time of the event loop's
    clock. ``on_away`` receives every outage; ``on_back`` is called for every answer, and a refusal is one.
    """
    failures = backoff.counter()
    while True:
        try:
            answer = await call()
        except TracelakeError as error:
            if not is_outage(error):
                if on_back is not None:
                    on_back()
                raise
            if on_away is not None:
                on_away(error)
            wait = failures.failed(jitter=spread())
            # Before the sleep: a wait that can't end in time isn't begun.
            if until is not None and asyncio.get_running_loop().time() + wait > until:
                raise
        else:
            if on_back is not None:
                on_back()
            return answer
        await asyncio.sleep(wait)
