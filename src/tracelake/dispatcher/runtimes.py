"""The runtime registry: how the tasks of each runtime are executed. An unknown runtime is a deploy error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tracelake.contracts.buffers import SINK_QUEUE
from tracelake.contracts.deliveries import DELIVERY_QUEUE
from tracelake.domain import runtimes
from tracelake.domain.runtimes import RuntimeTraits
from tracelake.store.tasks import TaskRow


class Execution(StrEnum):
    """``in_process`` runs platform operators inside the Dispatcher; ``queue`` wakes workers up; ``invoke`` passes
    leased tasks to invokers, which run functions."""

    IN_PROCESS = "in_process"
    INVOKE = "invoke"
    QUEUE = "queue"


_WORKER = RuntimeTraits()


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    queue: str
    traits: RuntimeTraits = _WORKER
    platform: bool = False
    """For the platform's own jobs; a DAG can't name it."""

    @property
    def execution(self) -> Execution:
        if self.traits.in_process:
            return Execution.IN_PROCESS
        return Execution.INVOKE if self.traits.invoked else Execution.QUEUE


INVOKE_MARGIN_SECONDS = 60.0
"""Time that a function's lease lasts beyond its timeout: to find an invoker, and for the last report."""

BUILT_IN = (
    *(Runtime(name, name, traits) for name, traits in runtimes.BUILT_IN.items()),
    Runtime(runtimes.SINK, SINK_QUEUE, platform=True),
    Runtime(runtimes.DELIVERY, DELIVERY_QUEUE, platform=True),
)


class RuntimeRegistry:
    """The built-in runtimes and those that an installation registers, each with its queue."""

    def __init__(self, extra: Mapping[str, str] | None = None) -> None:
        self._runtimes = {runtime.name: runtime for runtime in BUILT_IN}
        for name, queue in (extra or {}).items():
            # A setting can't redefine a built-in runtime: that `lambda`
            # may run untrusted code depends on how it executes.
            self._runtimes.setdefault(name, Runtime(name, queue))

    def __getitem__(self, name: str) -> Runtime:
        return self._runtimes[name]

    def get(self, name: str) -> Runtime | None:
        return self._runtimes.get(name)

    def traits(self) -> dict[str, RuntimeTraits]:
        """The runtimes that a DAG may name."""
        return {name: runtime.traits for name, runtime in self._runtimes.items() if not runtime.platform}

    def lease_seconds(self, task: TaskRow) -> float:
        """A worker extends its lease by heartbeats; a function needn't, so its first one lasts to the end."""
        runtime = self._runtimes.get(task.runtime)
        if runtime is not None and runtime.execution is Execution.INVOKE:
            return task.timeout_seconds + INVOKE_MARGIN_SECONDS
        return task.heartbeat_timeout_seconds

    def queues(self) -> set[str]:
        """The queues that workers listen on."""
        return {runtime.queue for runtime in self._runtimes.values() if runtime.execution is Execution.QUEUE}
