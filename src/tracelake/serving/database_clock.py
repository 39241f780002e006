"""The state database's time, without a query for every request.

Capability tokens are issued at the state database's time, so they are verified at its time: a process whose own
clock is off would refuse good tokens.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from tracelake.domain.errors import Unavailable

REFRESH_SECONDS = 60.0


class DatabaseClock:
    """``measure`` asks the database for its time. The difference between the two clocks is measured every
    ``refresh`` seconds, and the last one is used while the database is unavailable."""

    def __init__(
        self, measure: Callable[[], Awaitable[datetime]], *, refresh: float = REFRESH_SECONDS
    ) -> None:
        self._measure = measure
        self._refresh = refresh
        self._ahead: timedelta | None = None
        self._measured_at = 0.0

    async def now(self) -> datetime:
        if self._ahead is None or time.monotonic() - self._measured_at > self._refresh:
            # Before the result: also after a failure, or each request during an outage would wait for the database.
            self._measured_at = time.monotonic()
            try:
                there = await self._measure()
                self._ahead = there - datetime.now(UTC)
            except Unavailable:
                if self._ahead is None:
                    raise
        return datetime.now(UTC) + self._ahead
