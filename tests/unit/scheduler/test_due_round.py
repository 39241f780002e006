"""A round of a scheduler: a source whose schedule can't be used has no ticks, and the others have theirs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs
from structlog.testing import capture_logs

from tracelake.contracts.sources import ScheduledSource, TickIn
from tracelake.domain.dag.model import CatchUp
from tracelake.domain.schedule import MAX_CATCH_UP, CronSchedule, DueTicks, due_ticks
from tracelake.scheduler import ticks
from tracelake.scheduler.ticks import due_of

NOW = datetime(2026, 11, 18, 12, 0, 5, tzinfo=UTC)


def scheduled(job: str, schedule: str, zone: str = "UTC") -> ScheduledSource:
    return ScheduledSource("dag", job, schedule, zone, CatchUp.LATEST, NOW - timedelta(minutes=1))


NEXT = NOW.replace(minute=1, second=0)
TICK = TickIn("dag", "good", int(NOW.replace(second=0).timestamp()))


@pytest.mark.parametrize(
    ("schedule", "zone", "why"),
    [
        ("* 2 * 3 SUN#2", "America/New_York", "never fires in America/New_York"),
        ("* * * * *", "Mars/Olympus", "no time zone"),
        ("0 0 30 2 *", "UTC", "no such day"),
    ],
)
def test_a_schedule_that_can_not_be_used_stops_no_other_source(schedule: str, zone: str, why: str) -> None:
    with capture_logs() as logs:
        found = due_of([scheduled("bad", schedule, zone), scheduled("good", "* * * * *")], NOW)
    assert (found.ticks, found.next_at) == ([TICK], NEXT)
    [entry] = logs
    assert (entry["event"], entry["job"]) == ("schedule_unusable", "dag/bad")
    assert why in entry["error"]


def test_an_error_that_nobody_foresaw_stops_no_other_source(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = due_ticks

    def failing(schedule: CronSchedule, after: datetime, now: datetime, catch_up: CatchUp) -> DueTicks:
        if schedule.text.startswith("5"):
            raise OverflowError("date value out of range")
        return evaluate(schedule, after, now, catch_up)

    monkeypatch.setattr(ticks, "due_ticks", failing)
    found = due_of([scheduled("bad", "5 * * * *"), scheduled("good", "* * * * *")], NOW)
    assert (found.ticks, found.next_at) == ([TICK], NEXT)


def test_a_round_that_leaves_ticks_for_the_next_one_is_followed_by_it_at_once() -> None:
    after = (NOW - timedelta(minutes=1500)).replace(second=0)
    source = ScheduledSource("dag", "good", "* * * * *", "UTC", CatchUp.ALL, after)
    first = due_of([source], NOW)
    assert len(first.ticks) == MAX_CATCH_UP
    assert first.next_at is not None
    assert first.next_at < NOW
    last = datetime.fromtimestamp(first.ticks[-1].tick, UTC)
    second = due_of([structs.replace(source, after=last)], NOW)
    assert second.ticks[-1] == TICK
    assert len(second.ticks) == 500
    assert second.next_at == NEXT
