"""What one sink process is told, read once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tracelake.contracts.buffers import SINK_QUEUE
from tracelake.secret import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings:
    """``data_dsn`` is the writer's. ``queue`` is where wake-ups for sink tasks come. ``drain_seconds`` is how long
    what was received may still be written when the sink is told to stop."""

    internal_url: str
    worker_token: Secret
    queue_dsn: Secret
    data_dsn: Secret
    object_root: Path
    worker_id: str
    queue: str = SINK_QUEUE
    drain_seconds: float = 5
