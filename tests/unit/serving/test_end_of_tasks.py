"""Tasks that a service leaves behind end with it, also those that lose a cancellation."""

from __future__ import annotations

import asyncio
import subprocess
import sys

from structlog.testing import capture_logs

from tracelake.serving.end_of_tasks import end_tasks

LEAVES_A_TASK = """
import asyncio
from tracelake.cli.service import serve

async def loses_a_cancellation():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()

async def service(stop, stop_now):
    serve.left = asyncio.create_task(loses_a_cancellation())
    await asyncio.sleep(0)

serve(service)
"""


async def loses(cancellations: int) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancellations -= 1
            if cancellations < 0:
                raise


async def test_a_cancellation_that_was_lost_is_repeated() -> None:
    left = [asyncio.create_task(loses(times)) for times in (0, 1, 2)]
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await end_tasks(30)
    assert all(task.cancelled() for task in left)


async def test_what_a_task_makes_as_it_ends_is_ended_too() -> None:
    made: list[asyncio.Task[None]] = []

    async def makes_another() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            made.append(asyncio.create_task(loses(1)))

    task = asyncio.create_task(makes_another())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await end_tasks(30)
    assert task.cancelled()
    assert made[0].cancelled()


async def test_a_task_that_stays_is_named() -> None:
    task = asyncio.create_task(loses(100))
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await end_tasks(0.5)
    [entry] = [entry for entry in logs if entry["event"] == "a task doesn't end"]
    assert "loses" in entry["task"]
    assert __file__ in entry["waits_at"]
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


def test_a_service_ends_though_a_task_of_it_loses_cancellations() -> None:
    subprocess.run([sys.executable, "-c", LEAVES_A_TASK], check=True, timeout=60)
