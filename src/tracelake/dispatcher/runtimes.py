"""The runtime registry: how each runtime's name is executed. Configured; an unknown name is a deploy error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from tracelake.contracts.buffers import SINK_QUEUE, SINK_RUNTIME
from tracelake.domain.dag.installation import RuntimeTraits
from tracelake.store.tasks import TaskRow


class Execution(StrEnum):
    """``in_process`` runs platform operators inside the Dispatcher; ``queue`` wakes workers up; ``invoke`` hands
    leased tasks to invokers, which run functions."""

    IN_PROCESS = "in_process"
    INVOKE = "invoke"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class Runtime:
    name: str
    execution: Execution
    queue: str
    untrusted_ok: bool = False
    platform: bool = False
    """For the platform's own jobs; no DAG names it."""

    @property
    def traits(self) -> RuntimeTraits:
        return RuntimeTraits(
            self.untrusted_ok,
            in_process=self.execution is Execution.IN_PROCESS,
            invoked=self.execution is Execution.INVOKE,
        )


LAMBDA = "lambda"
INVOKE_MARGIN_SECONDS = 60.0
"""How much longer than its timeout a function's lease is: time to hand it over, and for its last report."""

BUILT_IN = (
    Runtime("dispatcher", Execution.IN_PROCESS, "dispatcher"),
    Runtime(LAMBDA, Execution.INVOKE, LAMBDA, untrusted_ok=True),
    Runtime("ecs_python", Execution.QUEUE, "ecs_python"),
    Runtime("ecs_spark", Execution.QUEUE, "ecs_spark"),
    Runtime(SINK_RUNTIME, Execution.QUEUE, SINK_QUEUE, platform=True),
)


class RuntimeRegistry:
    """The built-in runtimes and whatever else an installation registers, each with its queue."""

    def __init__(self, extra: Mapping[str, str] | None = None) -> None:
        runtimes = {runtime.name: runtime for runtime in BUILT_IN}
        for name, queue in (extra or {}).items():
            runtimes.setdefault(name, Runtime(name, Execution.QUEUE, queue))
        self._runtimes = runtimes

    def __getitem__(self, name: str) -> Runtime:
        return self._runtimes[name]

    def get(self, name: str) -> Runtime | None:
        return self._runtimes.get(name)

    def traits(self) -> dict[str, RuntimeTraits]:
        """What a DAG may name."""
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
