"""End the Spark work of an attempt from outside of its operator process, which may be dead already.

Spark finds work by user, session and tag, from whichever process the question comes. All three follow from the
attempt (``spark_ids``). The work is interrupted first, which is what takes effect within milliseconds; then the
session is released, and from then on its id is refused: a process that goes on regardless gets nothing done, nor
does a request that it sent with its last breath. Spark only remembers sessions that there were, so one that
wasn't is made first.
"""

from __future__ import annotations

import contextlib

from tracelake.domain.errors import TracelakeError
from tracelake.worker.spark import ids as spark_ids
from tracelake.worker.spark.rpc import SparkRpc

_WITHIN = 10.0


async def interrupt_attempt(rpc: SparkRpc, task_id: str, attempt: int, epoch: int) -> bool:
    """False if Spark didn't answer; a session that never was, or is gone, counts as ended."""
    session = spark_ids.session_id(task_id, attempt, epoch)
    # Both fail for a session that is gone; whether Spark answers at all, releasing it tells.
    with contextlib.suppress(TracelakeError):
        await rpc.interrupt(session, spark_ids.tag(task_id, attempt), _WITHIN)
    with contextlib.suppress(TracelakeError):
        await rpc.version(_WITHIN, session)
    try:
        await rpc.release(session, _WITHIN)
    except TracelakeError:
        return False
    return True
