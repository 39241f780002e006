"""The state database's time, without asking it on every request.

Tokens are issued at its time, so they are verified at its time; a process whose own clock is off would refuse
good tokens. The difference between the two clocks is measured now and then, and kept while the database
can't be asked.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

from tracelake.domain.errors import Unavailable
from tracelake.store import clock
from tracelake.store.db import Database, DeployLock

REFRESH_SECONDS = 60.0


class StateClock:
    def __init__(self, db: Database, *, refresh: float = REFRESH_SECONDS) -> None:
        self._db = db
        self._refresh = refresh
        self._ahead: timedelta | None = None
        self._measured_at = 0.0

    async def now(self) -> datetime:
        if self._ahead is None or time.monotonic() - self._measured_at > self._refresh:
            await self._measure()
        return datetime.now(UTC) + (self._ahead or timedelta(0))

    async def _measure(self) -> None:
        self._measured_at = time.monotonic()
        try:
            there = await self._db.run(clock.now, lock=DeployLock.NONE)
        except Unavailable:
            if self._ahead is None:
                raise
            return
        self._ahead = there - datetime.now(UTC)
