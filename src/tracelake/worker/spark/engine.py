"""The interface of a worker's Spark, whether the worker supervises it or it runs elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.sandbox.accounts import Account


class SparkProgram(Protocol):
    """A program that the operator host runs. It is granted objects by their names relative to the object root;
    ``account`` is the account that it runs under, None for our own user."""

    @property
    def pid(self) -> int: ...

    @property
    def account(self) -> Account | None: ...

    async def grant(self, writes: Sequence[str]) -> None: ...

    async def withdraw(self, writes: Sequence[str], *, force: bool = False) -> list[str]: ...

    async def kill(self) -> None: ...

    async def wait(self) -> int: ...


class ProgramStarter(Protocol):
    """Starts programs under an identity of their own, in a ``folder`` that is made anew for each and removed with
    it; in production the operator host."""

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
    ) -> SparkProgram: ...


class SparkEngine(Protocol):
    """A Spark that may end and come back. Each of its runs is a generation with its own address and token. An
    attempt that runs on generation *n* has failed, retryably, as soon as ``lost(n)`` returns."""

    @property
    def generation(self) -> int: ...

    @property
    def target(self) -> SparkTarget:
        """The current generation's target; raises ``Unavailable`` while there is none."""

    @property
    def group(self) -> int | None:
        """The account that its executors write files under, if they have one of their own on this machine."""

    async def grant(self, places: Sequence[str]) -> None:
        """Let its executors write in these folders below the object root."""

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        """Undo ``grant``; see ``worker.host.keeper``. The result are the folders with a file open for writing."""

    async def start(self) -> None:
        """Return once Spark answers; raises ``Unavailable`` or ``Invalid`` with a reason and a remedy."""

    async def ready(self) -> SparkTarget:
        """Wait until there is a generation that serves."""

    async def healthy(self) -> bool: ...

    async def lost(self, generation: int) -> None:
        """Return when this generation no longer serves, at once if that is already so."""

    async def watch(self) -> None:
        """Supervise until cancelled."""

    async def interrupt(self, task_id: str, attempt: int, epoch: int) -> None:
        """Cancel the attempt's Spark work and end its session, for good.

        Kill its process first, then call this for every attempt whose process didn't finish by itself. Returns
        once Spark has confirmed it or is gone, and never raises.
        """

    async def stop(self) -> None: ...
