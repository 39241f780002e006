"""What the Dispatcher's routes are given besides what every surface has."""

from __future__ import annotations

from dataclasses import dataclass

from tracelake.dispatcher.api.dispatch import Dispatch
from tracelake.dispatcher.api.query_service import QueryService
from tracelake.dispatcher.steps.context import StepContext
from tracelake.queue.base import Queue
from tracelake.serving.services import Services


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherServices(Services):
    dispatch: Dispatch
    query: QueryService
    queue: Queue | None = None
    """Asked how full it is; routes put nothing into it."""

    @property
    def ctx(self) -> StepContext:
        return self.dispatch.ctx
