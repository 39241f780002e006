"""A rate limit: so many calls per second, a second's worth of them at once."""

from __future__ import annotations

import threading


class TokenBucket:
    """Times are given, not read, so that what it decides can be tested."""

    def __init__(self, per_second: float | None, now: float) -> None:
        self._rate = per_second
        self._room = max(1.0, per_second or 0.0)
        self._tokens = self._room
        self._at = now
        self._lock = threading.Lock()

    @property
    def most(self) -> int | None:
        """Calls that may be made at once; None when any number may."""
        return None if self._rate is None else int(self._room)

    def wait(self, calls: int, now: float) -> float:
        """Seconds until so many calls may be made, if nobody else makes any."""
        with self._lock:
            return self._wait(calls, now)

    def take(self, calls: int, now: float) -> float:
        """Count them as made, and answer with the seconds to wait before making them. Who comes later waits
        longer: nobody overtakes."""
        with self._lock:
            wait = self._wait(calls, now)
            self._tokens -= calls
            return wait

    def _wait(self, calls: int, now: float) -> float:
        if self._rate is None:
            return 0.0
        if now > self._at:
            self._tokens = min(self._room, self._tokens + (now - self._at) * self._rate)
            self._at = now
        short = min(calls, self._room) - self._tokens
        return max(0.0, short / self._rate)
