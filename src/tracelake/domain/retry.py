"""When a failed attempt may be tried again. A decision is data; nobody sleeps here."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``max_attempts`` is None for sources, which are kept running for ever."""

    max_attempts: int | None
    base_seconds: float
    max_seconds: float

    def delay_after(self, failures: int, jitter: float) -> timedelta | None:
        """How long to wait after the ``failures``-th failure (1 is the first), or None to give up."""
        if self.max_attempts is not None and failures >= self.max_attempts:
            return None
        exponent = min(failures - 1, 62)
        return timedelta(seconds=min(self.max_seconds, self.base_seconds * 2**exponent) * jitter)
