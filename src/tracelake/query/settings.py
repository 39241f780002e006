"""The Query Service's settings: read once, frozen, secrets hidden.

What one query may use is for operators to tune by the environment: ``TRACELAKE_QUERY_`` and the limit's name,
``TRACELAKE_QUERY_SECONDS=60``. The defaults suit a machine with two cores and a few GiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tracelake.domain.errors import Invalid
from tracelake.environment_settings import numbers_set
from tracelake.query.engine.confinement import UNCONFINED
from tracelake.query.engine.limits import SlotLimits
from tracelake.secret import Secret

MIB = 1024 * 1024
ISSUER = "tracelake"
AUDIENCE = "tracelake-task"
_SLOT = SlotLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryLimits:
    """``seconds``, ``memory_bytes``, ``spill_bytes`` and ``threads`` are of one query in its slot; ``wait_seconds``
    is how long one waits for a slot, and ``queue`` how many may. ``default_rows`` are answered where no ``limit``
    is given, ``max_rows`` at most. ``result_bytes`` bounds an answer and every row, ``export_bytes`` an exported
    file. Exported files are kept for ``export_hours``; one caller (a user, or a task) has ``export_quota_files`` of
    them at most, with ``export_quota_bytes``, and all callers together have ``export_total_bytes``. ``unconfined``:
    run queries also where nothing keeps them from the machine's files."""

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
    """``internal_url`` is where the Dispatcher publishes its keys. Without it, ``dispatcher_file`` says so, and it
    is read when keys are needed: the service may be there before the Dispatcher is. Port 0 picks a free one.
    ``export_root`` is the service's own folder, beside the objects unless it is given: operators see those."""

    catalog_dsn: Secret
    audit_dsn: Secret
    reading_dsn: Secret | None
    object_root: Path
    export_root: Path | None = None
    internal_url: str | None = None
    dispatcher_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8602
    slots: int = 2
    limits: QueryLimits = field(default_factory=QueryLimits)
    issuer: str = ISSUER
    audience: str = AUDIENCE

    @property
    def exports(self) -> Path:
        return self.export_root if self.export_root is not None else self.object_root.parent / "exports"


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


def tuned(limits: QueryLimits, environment: Mapping[str, str]) -> QueryLimits:
    """The limits with those that the environment sets."""
    chosen = numbers_set(limits, _BOUNDS, environment, "TRACELAKE_QUERY")
    found = replace(limits, **chosen, unconfined=limits.unconfined or _accepted(environment))
    if found.default_rows > found.max_rows:
        raise Invalid("InvalidSetting", "TRACELAKE_QUERY_DEFAULT_ROWS is more than TRACELAKE_QUERY_MAX_ROWS")
    return found


def _accepted(environment: Mapping[str, str]) -> bool:
    said = environment.get(UNCONFINED, "")
    if said not in ("", "0", "1"):
        raise Invalid("InvalidSetting", f"{UNCONFINED} must be 1, or not set")
    return said == "1"
