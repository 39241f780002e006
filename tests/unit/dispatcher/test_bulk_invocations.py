"""Bulk work of functions: behind normal work, but not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime
from typing import cast
from uuid import UUID

import pytest
from prometheus_client import CollectorRegistry

from tracelake.dispatcher.loops.invoke_functions import (
    FunctionInvocations,
    InvocationSender,
    InvokerCall,
    Invokers,
)
from tracelake.store.db import Database, OutboxEntry, OutboxKind
from tracelake.store.functions import InvokerRow


class Recorder(InvocationSender):
    """Notes who comes, and is done at once."""

    def __init__(self) -> None:
        self.came: list[int] = []
        self.all_came = asyncio.Event()

    async def deliver(self, task_id: UUID, turn: InvokerCall, settled: Callable[[], None]) -> None:
        turn.end()
        self.came.append(task_id.int)
        if len(self.came) == 4:
            self.all_came.set()


def entry(number: int, *, bulk: bool, waited: float = 0.0) -> OutboxEntry:
    payload = {"task_id": str(UUID(int=number)), **({"bulk": True} if bulk else {})}
    return OutboxEntry(
        number,
        OutboxKind.WAKE,
        "lambda",
        UUID(int=number),
        payload,
        datetime(2026, 1, 1, tzinfo=UTC),
        due=True,
        waited=waited,
    )


@pytest.mark.parametrize(
    ("max_bulk_wait", "waited", "order"),
    [(3600.0, 0.0, [2, 3, 4, 1]), (3600.0, 3600.0, [1, 2, 3, 4]), (0.0, 0.0, [1, 2, 3, 4])],
)
async def test_a_bulk_task_waits_behind_those_of_its_head_start_only(
    max_bulk_wait: float, waited: float, order: list[int]
) -> None:
    invokers, recorder = Invokers(), Recorder()
    invokers.see([InvokerRow("http://invoker", 1)])

    async def look() -> None:
        """There is always this one."""

    functions = FunctionInvocations(
        cast(Database, None), invokers, look, recorder, CollectorRegistry(), max_bulk_wait=max_bulk_wait
    )
    functions.offer([entry(1, bulk=True, waited=waited)], lambda _: None)
    await asyncio.sleep(0)
    functions.offer([entry(number, bulk=False) for number in (2, 3, 4)], lambda _: None)
    running = asyncio.create_task(functions.run())
    async with asyncio.timeout(60):
        await recorder.all_came.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert recorder.came == order
