"""The Dispatcher's settings: read once, frozen, secrets hidden.

How often its loops run is for operators to tune by the environment, ``TRACELAKE_`` and the setting's name:
``TRACELAKE_REAP_SECONDS=1``. Short ones notice dead workers and lost wake-ups sooner and cost the database
a query each time; the defaults suit leases of minutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracelake.domain.errors import Invalid
from tracelake.secret import Secret
from tracelake.stack_address import INTERNAL_PORT, USER_PORT
from tracelake.tokens.home_copies import HomeCopies

_INTERVALS = (
    "reap_seconds",
    "rewake_seconds",
    "rewake_after_seconds",
    "reconcile_seconds",
    "watch_sources_seconds",
    "outbox_sweep_seconds",
    "observe_seconds",
    "installation_seconds",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherSettings:
    """``home`` has this machine's copies of what all replicas share, and ``given`` the passwords of shared logins
    that the environment names (``store/installation.py``). Port 0 picks a free one. ``invoker_url`` is an invoker
    of functions that doesn't register itself, ``query_url`` the Query Service that the user port passes queries on
    to."""

    state_dsn: Secret
    queue_dsn: Secret
    home: HomeCopies
    object_root: Path
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
    installation_seconds: float = 3.0
    state_connections: int = 12


def tuned(settings: DispatcherSettings, environment: Mapping[str, str]) -> DispatcherSettings:
    """The settings with the loop intervals that the environment sets."""
    chosen: dict[str, Any] = {}
    for name in _INTERVALS:
        variable = f"TRACELAKE_{name.upper()}"
        if variable not in environment:
            continue
        try:
            seconds = float(environment[variable])
        except ValueError:
            seconds = math.nan
        if not 0.01 <= seconds <= 86_400:
            raise Invalid("InvalidSetting", f"{variable} must be between 0.01 and 86400 seconds")
        chosen[name] = seconds
    return replace(settings, **chosen)
