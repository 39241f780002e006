"""What leaves the state database: an intent that commits with its cause and is delivered afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID


class OutboxKind(StrEnum):
    """``wake`` tells a runtime of a task; ``buffer`` carries a message to a buffered dataset's queue."""

    WAKE = "wake"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """``available_at`` in the future is a retry's wake-up waiting for its time. ``runtime`` is where it goes: of a
    ``buffer`` entry the queue itself."""

    outbox_id: int
    kind: OutboxKind
    runtime: str
    task_id: UUID | None
    payload: dict[str, Any]
    available_at: datetime
    due: bool
