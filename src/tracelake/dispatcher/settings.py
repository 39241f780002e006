"""The Dispatcher's settings: read once, frozen, secrets hidden.

How often its loops run is for operators to tune by the environment, ``TRACELAKE_`` and the setting's name:
``TRACELAKE_REAP_SECONDS=1``. Short ones notice dead workers and lost wake-ups sooner and cost the database
a query each time; the defaults suit leases of minutes. Limits on what one attempt may emit are set the same way
(``TRACELAKE_TASK_EVENTS``, ``TRACELAKE_TASK_RECORDS``, ``TRACELAKE_TASK_BYTES``), and so are the marks of
backpressure (``TRACELAKE_PRESSURE_LOW_MARK``, ``…_PATIENCE_SECONDS``, ``…_MIN_HOLD_SECONDS``) and the caps of
operators (``TRACELAKE_OPERATORS``, as JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec

from tracelake.domain.errors import Invalid
from tracelake.domain.events import MAX_TASK_BYTES, MAX_TASK_EVENTS, MAX_TASK_RECORDS
from tracelake.queue.base import MAX_HEAD_START
from tracelake.settings import Secret, numbers_set
from tracelake.stack_connection import INTERNAL_PORT, USER_PORT
from tracelake.tokens.home_copies import HomeCopies

OPERATORS = "TRACELAKE_OPERATORS"
_SECONDS = (0.01, 86_400.0)
_BOUNDS: Mapping[str, tuple[float, float]] = {
    "reap_seconds": _SECONDS,
    "rewake_seconds": _SECONDS,
    "rewake_after_seconds": _SECONDS,
    "reconcile_seconds": _SECONDS,
    "watch_sources_seconds": _SECONDS,
    "outbox_sweep_seconds": _SECONDS,
    "observe_seconds": _SECONDS,
    "collect_seconds": _SECONDS,
    "installation_seconds": _SECONDS,
    # No pressure is below 0, so a trip would never end with a mark of 0.
    "pressure_low_mark": (0.001, 1.0),
    "pressure_patience_seconds": (0.0, 86_400.0),
    "pressure_min_hold_seconds": (0.0, 86_400.0),
    "max_bulk_wait_seconds": (0.0, MAX_HEAD_START),
    "hook_rate": (0.01, 100_000.0),
    "hook_burst": (1.0, 1_000_000.0),
    "task_events": (1_000, 1_000_000_000),
    "task_records": (1_000, 1_000_000_000_000),
    "task_bytes": (2**20, 2**50),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSettings:
    """``home`` has this machine's copies of the secrets that all replicas share, and ``given`` the passwords of
    shared logins that the environment names (``store/installation.py``). Port 0 picks a free one. ``invoker_url``
    is an invoker of functions that doesn't register itself, ``query_url`` the Query Service that the user port
    passes queries on to. ``objects`` is the address of the object store. ``task_events``, ``task_records`` and
    ``task_bytes`` are how many events, and records for buffered datasets, one attempt may emit. ``operators`` has
    the maximum number of running tasks by operator, over all DAGs; None leaves those of the installation as they
    are. ``hook_rate`` and
    ``hook_burst`` are the deliveries that a webhook accepts per second, and at once."""

    state_dsn: Secret
    queue_dsn: Secret
    home: HomeCopies
    objects: str
    given: Mapping[str, str] = field(default_factory=dict, repr=False)
    host: str = "127.0.0.1"
    user_port: int = USER_PORT
    internal_port: int = INTERNAL_PORT
    runtimes: Mapping[str, str] = field(default_factory=dict)
    invoker_url: str | None = None
    query_url: str | None = None
    reap_seconds: float = 5.0
    rewake_seconds: float = 15.0
    rewake_after_seconds: float = 60.0
    reconcile_seconds: float = 30.0
    watch_sources_seconds: float = 15.0
    outbox_sweep_seconds: float = 1.0
    observe_seconds: float = 5.0
    collect_seconds: float = 60.0
    installation_seconds: float = 3.0
    pressure_low_mark: float = 0.5
    pressure_patience_seconds: float = 30.0
    pressure_min_hold_seconds: float = 5.0
    max_bulk_wait_seconds: float = 600.0
    operators: Mapping[str, int] | None = None
    state_connections: int = 12
    hook_rate: float = 20.0
    hook_burst: float = 100.0
    task_events: int = MAX_TASK_EVENTS
    task_records: int = MAX_TASK_RECORDS
    task_bytes: int = MAX_TASK_BYTES


def tuned(settings: DispatcherSettings, environment: Mapping[str, str]) -> DispatcherSettings:
    """The settings with those that the environment sets: loop intervals, and limits on what an attempt emits."""
    chosen = replace(settings, **numbers_set(settings, _BOUNDS, environment, "TRACELAKE"))
    if OPERATORS in environment:
        chosen = replace(chosen, operators=operator_caps(environment[OPERATORS]))
    return chosen


class _Cap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


def operator_caps(text: str) -> dict[str, int]:
    """``{"NAME": {"max_in_flight": N}}``, as JSON."""
    try:
        caps = msgspec.json.decode(text, type=dict[str, _Cap])
    except msgspec.MsgspecError as error:
        raise Invalid(
            "InvalidSetting", f'{OPERATORS} must be JSON like {{"NAME": {{"max_in_flight": 4}}}}: {error}'
        ) from None
    return {name: cap.max_in_flight for name, cap in caps.items()}
