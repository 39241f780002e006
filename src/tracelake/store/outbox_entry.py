"""What leaves the state database: an intent that commits with its cause and is delivered afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID


class OutboxKind(StrEnum):
    WAKE = "wake"


@dataclass(frozen=True, slots=True)
class OutboxEntry:
    """``available_at`` in the future is a retry's wake-up waiting for its time."""

    outbox_id: int
    kind: OutboxKind
    runtime: str
    task_id: UUID | None
    payload: dict[str, Any]
    available_at: datetime
    due: bool
