"""What the wrapper asks of its Spark, whether the worker supervises it or it is somewhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tracelake.accounts import Account
from tracelake.contracts.operator_protocol import SparkTarget


class HostedProgram(Protocol):
    """A program that somebody else started for us. What it may write to of the objects it is granted, by names from
    their root; ``account`` is whom it runs as, None for our own user."""

    @property
    def pid(self) -> int: ...

    @property
    def account(self) -> Account | None: ...

    async def grant(self, writes: Sequence[str]) -> None: ...

    async def withdraw(self, writes: Sequence[str], *, force: bool = False) -> list[str]: ...

    async def kill(self) -> None: ...

    async def wait(self) -> int: ...


class ProgramStarter(Protocol):
    """Starts programs under an identity of their own, in a ``folder`` that is made anew for each of them and goes
    with it; in production the operator host."""

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
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

    @property
    def group(self) -> int | None:
        """Whose files its executors write, where they have an account of their own on this machine."""

    async def grant(self, places: Sequence[str]) -> None:
        """Its executors may write in these folders below the object root."""

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        """They no longer may; see ``worker.host.keeper``. Returns where something is open for writing."""

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
