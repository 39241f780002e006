"""What every surface's routes are given; it travels with each request, so routes are plain functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from prometheus_client import CollectorRegistry

Check = Callable[[], Awaitable[str | None]]
"""Returns when what it looks at can be used, perhaps with a word on how it stands, and raises otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """``checks`` are what ``/readyz`` looks at."""

    registry: CollectorRegistry
    checks: Mapping[str, Check]
    now: Callable[[], Awaitable[datetime]]
    openapi: bytes
