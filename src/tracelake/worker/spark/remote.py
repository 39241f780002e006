"""A Spark that somebody else runs, behind an ``sc://`` address: checked, never started or stopped.

It has the surface of an embedded one. When it can't be reached for a while, its generation is lost and the
attempts on it fail; once it answers again, a new generation begins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.secret import Secret
from tracelake.worker.spark.interrupt import interrupt_attempt
from tracelake.worker.spark.pulse import EVERY, Pulse
from tracelake.worker.spark.rpc import SparkRpc

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
        """What it sees is up to whoever runs it."""

    async def withdraw(self, places: Sequence[str], *, force: bool = False) -> list[str]:
        return []

    async def start(self) -> None:
        """A wrong token is an error now, not in every task."""
        await self._rpc.version(_ANSWERS_WITHIN)
        self._generation += 1
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
                    reason = await Pulse(self._rpc, self._hangs_after).stops()
                    _log.warning("remote Spark is lost: %s", reason)
                    self._lose()
                await asyncio.sleep(EVERY)
                await self.start()
            except TracelakeError as error:
                _log.debug("remote Spark is still away: %s", error)
            except Exception:
                _log.exception("the watch over the remote Spark failed, and goes on")
                await asyncio.sleep(EVERY)

    async def interrupt(self, task_id: str, attempt: int, epoch: int) -> None:
        while not await interrupt_attempt(self._rpc, task_id, attempt, epoch):
            if not self._serving.is_set():
                # It ends work by itself whose client is gone; when, is a setting of that server.
                _log.warning("Spark did not confirm the end of task %s, attempt %d", task_id, attempt)
                return
            await asyncio.sleep(EVERY)

    async def stop(self) -> None:
        self._lose()
        self._rpc.close()

    def _lose(self) -> None:
        self._serving.clear()
        self._gone.set()
