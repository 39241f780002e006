"""The database's time without a query per request, and without the database during an outage."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tracelake.domain.errors import Unavailable
from tracelake.serving.database_clock import DatabaseClock

AHEAD = timedelta(hours=1)


class SomeDatabase:
    def __init__(self) -> None:
        self.is_up = True
        self.asked = 0

    async def now(self) -> datetime:
        self.asked += 1
        if not self.is_up:
            raise Unavailable("Down", "the database is down")
        return datetime.now(UTC) + AHEAD


def off_by(now: datetime) -> timedelta:
    return abs(now - datetime.now(UTC) - AHEAD)


async def test_the_difference_of_the_clocks_is_measured_once_and_added() -> None:
    database = SomeDatabase()
    clock = DatabaseClock(database.now)
    assert [off_by(await clock.now()) < timedelta(minutes=1) for _ in range(3)] == [True] * 3
    assert database.asked == 1


async def test_the_last_difference_is_used_while_the_database_is_down() -> None:
    database = SomeDatabase()
    clock = DatabaseClock(database.now, refresh=0.0)
    await clock.now()
    database.is_up = False
    assert off_by(await clock.now()) < timedelta(minutes=1)
    assert database.asked == 2


async def test_a_clock_that_was_never_measured_has_no_time() -> None:
    database = SomeDatabase()
    clock = DatabaseClock(database.now)
    database.is_up = False
    for _ in range(2):
        with pytest.raises(Unavailable):
            await clock.now()
    database.is_up = True
    assert off_by(await clock.now()) < timedelta(minutes=1)


async def test_a_failed_measurement_is_not_repeated_by_the_next_request() -> None:
    database = SomeDatabase()
    clock = DatabaseClock(database.now, refresh=3600.0)
    await clock.now()
    # As if the last measurement were old.
    clock._measured_at -= 7200
    database.is_up = False
    await clock.now()
    await clock.now()
    assert database.asked == 2
