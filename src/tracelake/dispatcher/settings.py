"""The Dispatcher's settings: read once, frozen, secrets hidden."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tracelake.secret import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSettings:
    """``queue_password`` is what workers log in to the queue with, ``user_token`` what the first user shows.
    Port 0 picks a free one."""

    state_dsn: Secret
    queue_dsn: Secret
    queue_password: Secret
    user_token: Secret
    object_root: Path
    key_folder: Path
    worker_token_file: Path
    host: str = "127.0.0.1"
    user_port: int = 8600
    internal_port: int = 8601
    runtimes: Mapping[str, str] = field(default_factory=dict)
    reap_seconds: float = 5.0
    rewake_seconds: float = 15.0
    rewake_after_seconds: float = 60.0
    reconcile_seconds: float = 30.0
    watch_sources_seconds: float = 15.0
    outbox_sweep_seconds: float = 1.0
    observe_seconds: float = 5.0
    state_connections: int = 12
