"""What a sink task has done, for its log and for whoever looks at the task."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from tracelake.hot.buffers import Merged
from tracelake.queue.base import Message
from tracelake.worker.held_task import HeldTask

_LOG_SECONDS = 10.0


class Tally:
    """Since the attempt began. ``lag_seconds`` is how long the oldest message of the last commit had waited."""

    def __init__(self, held: HeldTask, on_progress: Callable[[HeldTask], None]) -> None:
        self._held = held
        self._on_progress = on_progress
        self._logged_at = -_LOG_SECONDS
        self._messages = self._rows = self._retracted = self._dead_letters = 0
        self._position = 0
        self._lag = 0.0
        self._waits_for: str | None = None

    def merged(self, messages: Sequence[Message], result: Merged) -> None:
        self._messages += len(messages)
        self._rows += result.written
        self._retracted += result.retracted
        self._position = result.position
        oldest = min(message.enqueued_at for message in messages)
        self._lag = max(0.0, (datetime.now(UTC) - oldest).total_seconds())
        self._show()
        if time.monotonic() - self._logged_at >= _LOG_SECONDS:
            self._logged_at = time.monotonic()
            self._held.log.info("sink_wrote", **self._fields())

    def dead_letter(self) -> None:
        self._dead_letters += 1
        self._show()

    def waits_for(self, what: str | None) -> None:
        self._waits_for = what
        self._show()

    def ended(self) -> None:
        self._held.log.info("sink_ended", **self._fields())

    def _show(self) -> None:
        waiting = {} if self._waits_for is None else {"waits_for": self._waits_for}
        self._held.progressed({**self._fields(), **waiting})
        self._on_progress(self._held)

    def _fields(self) -> dict[str, int | float]:
        return {
            "batches": self._messages,
            "rows": self._rows,
            "retracted": self._retracted,
            "dead_letters": self._dead_letters,
            "position": self._position,
            "lag_seconds": round(self._lag, 3),
        }
