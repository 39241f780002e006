"""The Query Service's settings: read once, frozen, secrets hidden.

Operators tune the limits of a query by the environment: ``TRACELAKE_QUERY_`` and the limit's name, such as
``TRACELAKE_QUERY_SECONDS=60``. The defaults suit a machine with two cores and a few GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tracelake.contracts.token_claims import AUDIENCE, ISSUER
from tracelake.domain.errors import Invalid
from tracelake.query.engine.confinement import UNCONFINED
from tracelake.query.engine.restrict import SlotLimits
from tracelake.serving.metrics_port import MetricsAddress
from tracelake.settings import Secret, numbers_set
from tracelake.stack_connection import QUERY_PORT

MIB = 1024 * 1024
_SLOT = SlotLimits()
#: The lowest and highest value of each limit.
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "seconds": (0.1, 3600),
    "memory_bytes": (64 * MIB, 2**50),
    "spill_bytes": (0, 2**50),
    "threads": (1, 256),
    "wait_seconds": (0, 600),
    "queue": (0, 100_000),
    "default_rows": (1, 2**31 - 1),
    "max_rows": (1, 2**31 - 1),
    "result_bytes": (MIB, 2**31 - 1),
    "export_bytes": (MIB, 2**50),
    "export_hours": (0.01, 24 * 365),
    "export_quota_files": (0, 1_000_000),
    "export_quota_bytes": (0, 2**50),
    "export_total_bytes": (0, 2**50),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """``seconds``, ``memory_bytes``, ``spill_bytes`` and ``threads`` limit one query in its slot. ``wait_seconds``:
    maximum wait for a slot; ``queue``: maximum number of waiting queries. ``default_rows``: maximum number of rows
    where the request has no ``limit``; ``max_rows``: the highest ``limit``. ``result_bytes`` limits an answer and
    every row, ``export_bytes`` an exported file. Exported files are kept for ``export_hours``; one caller (a user
    or a task) may have ``export_quota_files`` files and ``export_quota_bytes``, all callers together
    ``export_total_bytes``. ``unconfined``: run queries even where nothing keeps them from the machine's files."""

    seconds: float = _SLOT.seconds
    memory_bytes: int = _SLOT.memory_bytes
    spill_bytes: int = _SLOT.spill_bytes
    threads: int = _SLOT.threads
    wait_seconds: float = 10.0
    queue: int = 64
    default_rows: int = 10_000
    max_rows: int = 1_000_000
    result_bytes: int = 64 * MIB
    export_bytes: int = 4096 * MIB
    export_hours: float = 24.0
    export_quota_files: int = 100
    export_quota_bytes: int = 8192 * MIB
    export_total_bytes: int = 65536 * MIB
    unconfined: bool = False

    def of_slot(self) -> SlotLimits:
        return SlotLimits(
            seconds=self.seconds,
            memory_bytes=self.memory_bytes,
            spill_bytes=self.spill_bytes,
            threads=self.threads,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QuerySettings:
    """``internal_url``: where the Dispatcher publishes its keys. Without it, ``dispatcher_file`` names the address;
    it is read when keys are needed, since the service may start before the Dispatcher. Port 0 picks a free one.
    ``objects``: the address of the object store. ``export_root``: the service's own folder, not in the
    object store, since operators read that. ``metrics``: a port for monitoring alone, beside ``/metrics`` of the
    service's own, which tasks reach."""

    catalog_dsn: Secret
    audit_dsn: Secret
    data_read_dsn: Secret | None
    objects: str
    export_root: Path
    internal_url: str | None = None
    dispatcher_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = QUERY_PORT
    slots: int = 2
    metrics: MetricsAddress = field(default_factory=MetricsAddress)
    limits: QueryLimits = field(default_factory=QueryLimits)
    issuer: str = ISSUER
    audience: str = AUDIENCE


def tuned(limits: QueryLimits, environment: Mapping[str, str]) -> QueryLimits:
    """The limits, overridden by the environment."""
    chosen = numbers_set(limits, _BOUNDS, environment, "TRACELAKE_QUERY")
    found = replace(limits, **chosen, unconfined=limits.unconfined or _accepted(environment))
    if found.default_rows > found.max_rows:
        raise Invalid("InvalidSetting", "TRACELAKE_QUERY_DEFAULT_ROWS is more than TRACELAKE_QUERY_MAX_ROWS")
    return found


def _accepted(environment: Mapping[str, str]) -> bool:
    value = environment.get(UNCONFINED, "")
    if value not in ("", "0", "1"):
        raise Invalid("InvalidSetting", f"{UNCONFINED} must be 1, or not set")
    return value == "1"
