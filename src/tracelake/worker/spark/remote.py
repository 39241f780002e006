"""A Spark that is run by others, behind an ``sc://`` address: checked, never started or stopped.

It has the interface of an embedded one. When it can't be reached for a while, its generation is lost and the
attempts on it fail; once it answers again, a new generation begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.settings import Secret
from tracelake.worker.spark.connect import PROBE_SECONDS, HealthProbe, SparkRpc, interrupt_attempt

_log = logging.getLogger(__name__)

_ANSWERS_WITHIN = 30.0


class RemoteSpark:
    def __init__(self, url: str, token: Secret | None, *, hangs_after: float = 60.0) -> None:
        self._target = SparkTarget(url=url, token=token.reveal() if token is not None else "")
        self._rpc = SparkRpc(self._target)
        self._hangs_after = hangs_after
        self._generation = 0
        self._serving = asyncio.Event()
        self._gone = asyncio.Event()

    @property
    def generation(self) -> int:
        return self._generation

    @property
    def target(self) -> SparkTarget:
        if not self._serving.is_set():
            raise Unavailable("SparkUnavailable", f"{self._target.url} doesn't answer")
        return self._target

    @property
    def group(self) -> int | None:
        return None

    async def grant(self, places: Sequence[str]) -> None:
        """Access to files is up to the operators of that server."""

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        return []

    async def start(self) -> None:
        """Check the connection, so that a wrong token is an error now and not in every task."""
        await self._rpc.version(_ANSWERS_WITHIN)
        self._generation += 1
        # A new one for each generation: a caller that waits for the end of the last one keeps that.
        self._gone = asyncio.Event()
        self._serving.set()

    async def ready(self) -> SparkTarget:
        await self._serving.wait()
        return self._target

    async def healthy(self) -> bool:
        try:
            await self._rpc.version(_ANSWERS_WITHIN)
        except TracelakeError:
            return False
        return True

    async def lost(self, generation: int) -> None:
        if self._serving.is_set() and generation == self._generation:
            await self._gone.wait()

    async def watch(self) -> None:
        while True:
            try:
                if self._serving.is_set():
                    reason = await HealthProbe(self._rpc, self._hangs_after).stops()
                    _log.warning("remote Spark is lost: %s", reason)
                    self._lose()
                await asyncio.sleep(PROBE_SECONDS)
                await self.start()
            except TracelakeError as error:
                _log.debug("remote Spark is still away: %s", error)
            except Exception:
                _log.exception("the watch over the remote Spark failed, and goes on")
                await asyncio.sleep(PROBE_SECONDS)

    async def interrupt(self, task_id: str, attempt: int, epoch: int) -> None:
        while not await interrupt_attempt(self._rpc, task_id, attempt, epoch):
            if not self._serving.is_set():
                # It ends the work of a client that is gone by itself, after a time that is a setting of that
                # server.
                _log.warning("Spark did not confirm the end of task %s, attempt %d", task_id, attempt)
                return
            await asyncio.sleep(PROBE_SECONDS)

    async def stop(self) -> None:
        self._lose()
        self._rpc.close()

    def _lose(self) -> None:
        self._serving.clear()
        self._gone.set()
