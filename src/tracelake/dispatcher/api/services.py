"""What the routes of a surface are given; it travels with each request, so routes are plain functions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from prometheus_client import CollectorRegistry

from tracelake.dispatcher.api.dispatch import Dispatch
from tracelake.dispatcher.steps.context import StepContext

Check = Callable[[], Awaitable[None]]
"""Returns when what it looks at can be used, and raises otherwise."""


@dataclass(frozen=True, slots=True)
class Services:
    dispatch: Dispatch
    registry: CollectorRegistry
    checks: Mapping[str, Check]
    now: Callable[[], Awaitable[datetime]]
    openapi: bytes

    @property
    def ctx(self) -> StepContext:
        return self.dispatch.ctx
