"""Operator processes for as long as the worker lives, whatever becomes of the host that they come from.

The host ends with everything that it started when it is killed; the attempts of that moment fail, and a new host is
started for the next ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.worker.conversation import Process
from tracelake.worker.host.client import HostedProgram, HostSpec, OperatorHost, OperatorProcess
from tracelake.worker.host.operator_pool import OperatorPool, Use

_PAUSES = (0.2, 10.0)
_PATIENCE = 60.0
_ENDED = ("OperatorHostGone", "OperatorPoolClosed")

_log = structlog.get_logger(__name__)


class OperatorSupply:
    def __init__(self, spec: HostSpec, size: int) -> None:
        self._spec = spec
        self._size = size
        self._host: OperatorHost | None = None
        self._pool: OperatorPool | None = None
        self._spark: SparkTarget | None = None
        self._warm = asyncio.Event()
        self._taken: dict[int, tuple[OperatorPool, OperatorProcess]] = {}

    async def start(self) -> None:
        """Raises with reason and remedy when operators can't be run here."""
        self._host = await OperatorHost.start(self._spec)
        self._host.spark = self._spark

    def warm_up(self) -> None:
        """Begin to keep processes ready; after ``use_spark``, where there is one to connect to."""
        if self._host is not None:
            self._pool = OperatorPool(self._host, self._size)
            self._warm.set()

    async def use_spark(self, target: SparkTarget | None) -> None:
        """What processes connect to as they start; those that wait are replaced."""
        self._spark = target
        if self._pool is not None:
            await self._pool.connect_to(target)
        elif self._host is not None:
            self._host.spark = target

    async def watch(self) -> None:
        """Starts a new host whenever one is gone, until cancelled."""
        while True:
            if self._host is not None:
                await self._host.died()
                _log.error("operator_host_died")
                try:
                    await self._drop()
                except Exception as error:
                    _log.error("operator_host_not_tidied", exc_info=error)
            pause, longest = _PAUSES
            while self._host is None:
                try:
                    await self.start()
                    self.warm_up()
                except Exception as error:
                    unexpected = None if isinstance(error, TracelakeError | OSError) else error
                    _log.error(
                        "operator_host_not_started", error=str(error), retry_in=pause, exc_info=unexpected
                    )
                    await asyncio.sleep(pause)
                    pause = min(longest, pause * 2)

    @property
    def available(self) -> bool:
        return self._warm.is_set()

    async def take(self, use: Use | None = None) -> Process:
        """Waits a while for a new host when the old one is gone: that is no fault of who asks."""
        try:
            async with asyncio.timeout(_PATIENCE):
                while True:
                    await self._warm.wait()
                    pool = self._pool
                    if pool is not None and (process := await self._of(pool, use)) is not None:
                        return process
        except TimeoutError:
            raise Unavailable("NoOperatorHost", "the operator host has ended and can't be started") from None

    async def warmed(self) -> None:
        """Returns once a process is ready; raises when none can be started."""
        await self.give_back(await self.take(), reusable=True)

    async def _of(self, pool: OperatorPool, use: Use | None) -> Process | None:
        """None when the pool has ended with its host."""
        try:
            process = await pool.take(use)
        except Unavailable as error:
            if error.reason not in _ENDED:
                raise
            if pool is self._pool:
                self._warm.clear()
            return None
        self._taken[id(process)] = (pool, process)
        return process

    async def give_back(self, process: Process, *, reusable: bool) -> None:
        pool, taken = self._taken.pop(id(process))
        await pool.give_back(taken, reusable=reusable and pool is self._pool)

    async def start_program(
        self, argv: Sequence[str], env: Mapping[str, str], *, log: int, folder: Path
    ) -> HostedProgram:
        if self._host is None:
            raise Unavailable("NoOperatorHost", "the operator host has ended and is being started again")
        return await self._host.start_program(argv, env, log=log, folder=folder)

    async def close(self) -> None:
        await self._drop()

    async def _drop(self) -> None:
        self._warm.clear()
        host, self._host = self._host, None
        pool, self._pool = self._pool, None
        if pool is not None:
            with suppress(TracelakeError):
                await pool.close()
        if host is not None:
            await host.stop()
