"""An embedded Spark Connect server, supervised: started, checked and restarted when it dies or hangs.

Each life of it (``spark_life``) is a generation. When one ends, it is lost at once: whoever runs on it hears so
through ``lost``, long before their calls would time out. The server is killed for certain and started again,
with a growing pause when it keeps dying.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import tracelake
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.worker.spark.engine import ProgramStarter, SparkEngine
from tracelake.worker.spark.interrupt import interrupt_attempt
from tracelake.worker.spark.life import Birth, SparkLife
from tracelake.worker.spark.remote import RemoteSpark
from tracelake.worker.spark.settings import SparkSettings

_log = logging.getLogger(__name__)

_PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)
_STEADY_AFTER = 60.0
_ANSWERS_WITHIN = 5.0
_AGAIN = 1.0
_DOWNLOADS_WITHIN = 900.0


def spark_engine(
    settings: SparkSettings,
    host: ProgramStarter,
    folder: Path,
    *,
    log: Path | None = None,
    python_path: Sequence[str] = (),
) -> SparkEngine:
    """The Spark that the settings ask for; ``python_path`` is what its Python workers find modules on."""
    if settings.remote is not None:
        return RemoteSpark(settings.remote, settings.token)
    return SparkServer(settings, host, folder, log=log, python_path=python_path)


class SparkServer:
    """``folder`` belongs to the server, which makes it; ``log`` belongs to the worker."""

    def __init__(
        self,
        settings: SparkSettings,
        host: ProgramStarter,
        folder: Path,
        *,
        log: Path | None = None,
        python_path: Sequence[str] = (),
        starts_within: float = 120.0,
        hangs_after: float = 30.0,
    ) -> None:
        self._host = host
        self._hangs_after = hangs_after
        self._birth = Birth(
            settings=settings,
            folder=folder,
            log=log or folder.with_name(f"{folder.name}.log"),
            python_path=os.pathsep.join([str(Path(tracelake.__file__).parents[1]), *python_path]),
            within=max(starts_within, _DOWNLOADS_WITHIN) if settings.packages else starts_within,
        )
        self._generation = 0
        self._life: SparkLife | None = None
        self._serving = asyncio.Event()
        self._gone = asyncio.Event()
        self._ending: asyncio.Task[None] | None = None

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def pid(self) -> int:
        return self._current().pid

    @property
    def target(self) -> SparkTarget:
        return self._current().target

    @property
    def group(self) -> int | None:
        account = None if self._life is None else self._life.program.account
        return None if account is None else account.gid

    async def grant(self, places: Sequence[str]) -> None:
        await self._current().program.grant(places)

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        return await self._current().program.withdraw(places, force=force)

    async def start(self) -> None:
        await self._begin()

    async def ready(self) -> SparkTarget:
        while self._life is None:
            await self._serving.wait()
        return self._life.target

    async def healthy(self) -> bool:
        if self._life is None:
            return False
        try:
            await self._life.rpc.version(_ANSWERS_WITHIN)
        except TracelakeError:
            return False
        return True

    async def lost(self, generation: int) -> None:
        if self._life is not None and generation == self._generation:
            await self._gone.wait()

    async def watch(self) -> None:
        """Whatever happens: without a watch there would be no Spark, and nobody would say so."""
        failures = 0
        while True:
            if self._life is not None:
                began = asyncio.get_running_loop().time()
                await self._outlive(self._life)
                steady = asyncio.get_running_loop().time() - began > _STEADY_AFTER
                failures = 0 if steady else failures + 1
            await asyncio.sleep(_PAUSES[min(failures, len(_PAUSES) - 1)])
            try:
                await self._begin()
            except TracelakeError as error:
                failures += 1
                _log.error("Spark could not be started: %s", error)
            except Exception:
                failures += 1
                _log.exception("Spark could not be started")

    async def interrupt(self, task_id: str, attempt: int, epoch: int) -> None:
        generation = self._generation
        while self._life is not None and self._generation == generation:
            if await interrupt_attempt(self._life.rpc, task_id, attempt, epoch):
                return
            await asyncio.sleep(_AGAIN)

    async def stop(self) -> None:
        """Cancel ``watch`` first, or it starts the next one."""
        await self._lose()

    async def _outlive(self, life: SparkLife) -> None:
        try:
            reason = await life.over(self._hangs_after)
        except Exception as error:
            reason = f"it can't be watched: {type(error).__name__}: {error}"
        _log.warning("Spark generation %d is lost: %s", self._generation, reason)
        try:
            await self._lose()
        except Exception:
            _log.exception("not everything of Spark generation %d could be tidied up", self._generation)

    async def _begin(self) -> None:
        life = await SparkLife.begin(self._birth, self._host)
        self._life = life
        self._generation += 1
        self._gone = asyncio.Event()
        self._serving.set()
        _log.info("Spark generation %d serves at %s", self._generation, life.target.url)

    async def _lose(self) -> None:
        life, self._life = self._life, None
        self._serving.clear()
        self._gone.set()
        if life is not None:
            self._ending = asyncio.create_task(life.end())
        if self._ending is not None:
            # Carried through also when whoever asked for it is cancelled; ``stop`` waits for it once more.
            await asyncio.shield(self._ending)

    def _current(self) -> SparkLife:
        if self._life is None:
            raise Unavailable("SparkUnavailable", "the Spark server is being started")
        return self._life
