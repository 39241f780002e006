"""The settings of one worker process, read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tracelake.serving.metrics_port import MetricsAddress
from tracelake.settings import Secret


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """``data_write_dsn`` commits rows and stays in the wrapper; operators get logins that it makes for each
    attempt, at ``data_address`` if they can't use the wrapper's address. ``query_url`` is the Query Service, if
    there is one, ``objects`` the address of the object store. ``operators`` are module names or ``.py`` files to
    load. ``idle_timeout`` is how long the worker stays without work before it ends, None for ever. ``rpc_pools`` is
    the file with the RPC pools; unless required, it may be missing.
    ``metrics`` is where the process is monitored.
    """

    runtime: str
    internal_url: str
    worker_token: Secret
    queue_dsn: Secret
    queue: str
    data_write_dsn: Secret | None = None
    data_address: str | None = None
    query_url: str | None = None
    objects: str
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
    metrics: MetricsAddress = field(default_factory=MetricsAddress)
