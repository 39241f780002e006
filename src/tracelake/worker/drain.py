"""How a worker ends: nothing is taken any more, and what it holds is finished or handed back.

Claimed tasks that haven't started go back at once. Running ones may finish within the time given; then, or when
somebody asks a second time, they are ended and handed back, so that another worker has them within moments and
not after a lease. A source never finishes by itself and is told to stop right away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from tracelake.worker.held_task import HeldTask, Stop
from tracelake.worker.load import Load
from tracelake.worker.wrapper import Wrapper

_KILL_SECONDS = 5.0
_REPORT_SECONDS = 2.0
_LOOK_SECONDS = 0.05

_log = structlog.get_logger(__name__)


async def drain(wrapper: Wrapper, seconds: float, hurry: asyncio.Event) -> None:
    """Returns when nothing runs any more and all that could be reported was."""
    loop = asyncio.get_running_loop()
    load = wrapper.load
    deadline = loop.time() + seconds
    waiting, running = load.take_waiting(), load.running
    _log.info("draining", running=len(running), handed_back=len(waiting), seconds=seconds)
    for held in waiting:
        wrapper.report(held, held.completion("Released"))
    for held in running:
        if held.is_source:
            held.stop(Stop.RELEASED)
    await _until(load, lambda: not load.running or hurry.is_set(), deadline)
    for held in load.running:
        _end(held)
    await _until(load, lambda: not load.running, loop.time() + _KILL_SECONDS)
    least = loop.time() + _REPORT_SECONDS
    await _until(load, lambda: not load.held or hurry.is_set(), max(least, deadline))
    await _until(load, lambda: not load.held, least)
    if left := load.held:
        _log.warning("drained_unreported", tasks=[str(held.task_id) for held in left])


async def _until(load: Load, condition: Callable[[], bool], deadline: float) -> None:
    loop = asyncio.get_running_loop()
    while not condition() and loop.time() < deadline:
        await load.changed(_LOOK_SECONDS)


def _end(held: HeldTask) -> None:
    held.stop(Stop.RELEASED)
    held.kill()
