"""What the Dispatcher's routes are given besides what every surface has."""

from __future__ import annotations

from dataclasses import dataclass

from tracelake.dispatcher.api.dispatch import Dispatch
from tracelake.dispatcher.steps.context import StepContext
from tracelake.serving.services import Services


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherServices(Services):
    dispatch: Dispatch

    @property
    def ctx(self) -> StepContext:
        return self.dispatch.ctx
