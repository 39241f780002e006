"""What one worker process is told, read once."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from tracelake.secret import Secret

LAMBDA = "lambda"
SPARK = "ecs_spark"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """``data_dsn`` commits rows and stays in the wrapper; operators are handed logins that it has made for each
    attempt, at ``data_address`` when they can't go the wrapper's way. ``query_url`` is where the Query Service
    is, if there is one. ``operators`` are module names or ``.py`` files to load. ``idle_timeout`` is how long the
    worker stays without work before it ends, None for ever. ``rpc_pools`` is the file with the RPC pools; one
    that isn't required may be missing."""

    runtime: str
    internal_url: str
    worker_token: Secret
    queue_dsn: Secret
    queue: str
    data_dsn: Secret | None = None
    data_address: str | None = None
    query_url: str | None = None
    object_root: Path
    log_folder: Path
    work_folder: Path
    home: Path | None = None
    concurrency: int = 2
    idle_timeout: float | None = None
    drain_seconds: float = 30
    operators: tuple[str, ...] = ()
    worker_id: str
    secrets_file: Path | None = None
    rpc_pools: Path | None = None
    rpc_pools_required: bool = False


def new_worker_id(runtime: str) -> str:
    """Different for every start, so that nobody takes over a lease of a process that is gone."""
    return f"{runtime}:{socket.gethostname()[:100]}:{os.getpid()}-{secrets.token_hex(4)}"
