"""How wake-ups are published: normal work before bulk work, and bulk work no later than its longest wait."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

from prometheus_client import CollectorRegistry

from tracelake.dispatcher.loops.deliver_outbox import OutboxDelivery
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.queue.base import Queue
from tracelake.store.db import Database, OutboxEntry, OutboxKind

LONGEST = 600.0


class Recorder:
    """A queue that notes who got which head start, and a database that commits nothing."""

    def __init__(self) -> None:
        self.starts: dict[int, float] = {}
        self.publications = 0

    async def publish(self, queue: str, bodies: list[dict[str, Any]], head_start: float = 0.0) -> None:
        self.publications += 1
        self.starts |= {body["n"]: head_start for body in bodies}

    def on_commit(self, notice: object) -> None:
        """Nothing is committed."""


def entry(number: int, *, bulk: bool = True, waited: float = 0.0) -> OutboxEntry:
    return OutboxEntry(
        number,
        OutboxKind.WAKE,
        "ecs_python",
        UUID(int=number),
        {"n": number, **({"bulk": True} if bulk else {})},
        datetime(2026, 1, 1, tzinfo=UTC),
        due=True,
        waited=waited,
    )


async def published(*entries: OutboxEntry, longest: float = LONGEST) -> Recorder:
    recorder = Recorder()
    delivery = OutboxDelivery(
        cast(Database, recorder),
        cast(Queue, recorder),
        RuntimeRegistry(),
        lambda task_id, behind: None,
        lambda entries, settle: None,
        CollectorRegistry(),
        max_bulk_wait=longest,
    )
    await delivery.deliver(entries)
    return recorder


async def test_what_a_bulk_task_has_waited_counts_as_its_head_start() -> None:
    """So a task that is woken again and again doesn't wait its longest each time."""
    found = await published(
        entry(1),
        entry(2, bulk=False),
        entry(3, waited=310.0),
        entry(4, waited=9_999.0),
        entry(5, waited=-3.0),
    )
    assert found.starts == {1: 0.0, 2: LONGEST, 3: LONGEST / 2, 4: LONGEST, 5: 0.0}


async def test_many_ages_take_few_publications() -> None:
    found = await published(*(entry(number, waited=number * 6.0) for number in range(101)))
    assert len(found.starts) == 101
    assert found.publications <= 9


async def test_without_a_longest_wait_all_are_alike() -> None:
    found = await published(entry(1), entry(2, bulk=False), longest=0.0)
    assert set(found.starts.values()) == {0.0}
    assert found.publications == 1
