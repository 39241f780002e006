"""Whether a Spark that should answer still does: a cheap question every other second, now and then a query."""

from __future__ import annotations

import asyncio

from tracelake.domain.errors import TracelakeError
from tracelake.worker.spark.rpc import SparkRpc

EVERY = 2.0
_QUERY_EVERY = 15


class Pulse:
    """A server under load answers late; only one that is silent for ``hangs_after`` seconds has stopped."""

    def __init__(self, rpc: SparkRpc, hangs_after: float) -> None:
        self._rpc = rpc
        self._hangs_after = hangs_after
        self._patience = max(hangs_after / 2, 0.5)

    async def stops(self) -> str:
        """Returns when there has been no answer for too long, with the last error."""
        loop = asyncio.get_running_loop()
        count, missed, answered_at = 0, 0, loop.time()
        while True:
            await asyncio.sleep(min(EVERY, self._patience))
            count += 1
            try:
                await self._ask(query=count % _QUERY_EVERY == 0)
            except TracelakeError as error:
                # Twice, since a process that was itself stopped for a while finds its clock advanced.
                missed += 1
                silent = loop.time() - answered_at
                if missed > 1 and silent >= self._hangs_after:
                    return f"the Spark server has not answered for {silent:.0f} s: {error}"
            else:
                missed, answered_at = 0, loop.time()

    async def _ask(self, *, query: bool) -> None:
        if query:
            await self._rpc.select_one(self._patience)
        else:
            await self._rpc.version(self._patience)
