"""What the wrapper asks of its Spark, whether the worker supervises it or it is somewhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tracelake.contracts.operator_protocol import SparkTarget


class HostedProgram(Protocol):
    """A program that somebody else started for us."""

    @property
    def pid(self) -> int: ...

    async def kill(self) -> None: ...

    async def wait(self) -> int: ...


class ProgramStarter(Protocol):
    """Starts programs under the operators' identity; in production the operator host."""

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, cwd: Path
    ) -> HostedProgram: ...


class SparkEngine(Protocol):
    """A Spark that may go and come back. Each life of it is a generation with its own address and token.

    An attempt that runs on generation *n* has failed, retryably, as soon as ``lost(n)`` returns.
    """

    @property
    def generation(self) -> int: ...

    @property
    def target(self) -> SparkTarget:
        """Of the current generation; raises ``Unavailable`` while there is none."""

    async def start(self) -> None:
        """Returns once Spark answers; raises ``Unavailable`` or ``Invalid`` with a reason and a remedy."""

    async def ready(self) -> SparkTarget:
        """Waits until there is a generation that serves."""

    async def healthy(self) -> bool: ...

    async def lost(self, generation: int) -> None:
        """Returns when this generation no longer serves: at once, if that is so already."""

    async def watch(self) -> None:
        """Supervises until cancelled."""

    async def interrupt(self, task_id: str, attempt: int, epoch: int) -> None:
        """Cancel the attempt's Spark work and end its session, for good: kill its process first, then call this
        for every attempt whose process didn't finish by itself. Returns once Spark has confirmed it or is gone,
        and never raises."""

    async def stop(self) -> None: ...
