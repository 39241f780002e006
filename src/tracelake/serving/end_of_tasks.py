"""The end of a process's tasks, when its service is over.

The event loop's own end cancels each task once and then waits for it, however long that takes. A cancellation that
comes while a task cleans up may get lost (the task takes it for a failure of what it does just then, and goes on),
and the process would never end. Here it is repeated, and a task that stays is named in the log.
"""

from __future__ import annotations

import asyncio

import structlog

END_SECONDS = 2.0
_AGAIN_SECONDS = 0.2

log = structlog.get_logger(__name__)


async def end_tasks(seconds: float = END_SECONDS) -> None:
    """Cancel every other task of the loop until all have ended, for at most ``seconds``."""
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while others := _others():
        if loop.time() >= until:
            for task in others:
                log.error("a task doesn't end", task=repr(task.get_coro()), waits_at=_place(task))
            return
        for task in others:
            task.cancel()
        ended, _ = await asyncio.wait(others, timeout=_AGAIN_SECONDS)
        for task in ended:
            # What they failed with no longer matters; unless it is asked for, the loop reports it as forgotten.
            if not task.cancelled():
                task.exception()


def _others() -> set[asyncio.Task[object]]:
    # Those too that were made by tasks as they ended.
    return asyncio.all_tasks() - {asyncio.current_task()}


def _place(task: asyncio.Task[object]) -> str:
    frames = task.get_stack(limit=1)
    return f"{frames[0].f_code.co_filename}:{frames[0].f_lineno}" if frames else ""
