"""The operator's line to its wrapper during one attempt: what ``Context`` speaks through.

The reader thread puts in what arrives, the operator's threads wait for it. An attempt that is over answers
nothing any more: a thread that an operator left behind can't speak in the next attempt's name.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from tracelake.contracts.operator_protocol import (
    Action,
    Call,
    FromOperator,
    Problem,
    Progress,
    Reply,
    Run,
)
from tracelake.domain import errors
from tracelake.domain.errors import Conflict, Invalid, TracelakeError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tracelake.worker.spark.session import SparkAttempt

CAPABILITY_VARIABLE = "TRACE_TASK_CAPABILITY_TOKEN"

_call_ids = itertools.count(1)
_BY_STATUS = {
    kind.status: kind
    for kind in (
        errors.BadRequest,
        errors.Unauthenticated,
        errors.Forbidden,
        errors.NotFound,
        errors.Conflict,
        errors.TooLarge,
        errors.Invalid,
        errors.Unavailable,
    )
}


class AttemptLink:
    def __init__(self, run: Run, send: Callable[[FromOperator], None]) -> None:
        self._run = run
        self._send = send
        self._changed = threading.Condition()
        self._awaited: dict[int, Reply | None] = {}
        self._canceled = False
        self._paused = False
        self._over = False
        self._spark: SparkAttempt | None = None
        self._opening_spark = threading.Lock()
        self.on_spark_progress: Callable[[dict[str, Any]], None] | None = None

    @property
    def canceled(self) -> bool:
        return self._canceled

    @property
    def paused(self) -> bool:
        return self._paused

    def call(self, action: Action) -> Any:
        call_id = next(_call_ids)
        with self._changed:
            if self._over:
                raise Conflict("AttemptOver", "the attempt that this thread belongs to is over")
            self._awaited[call_id] = None
        try:
            self._send(Call(call_id, action))
            with self._changed:
                while (reply := self._awaited[call_id]) is None:
                    self._changed.wait()
        finally:
            with self._changed:
                del self._awaited[call_id]
        if reply.problem is not None:
            raise _error(reply.problem)
        return reply.value

    def report(self, fields: dict[str, Any]) -> None:
        if not self._over:
            self._send(Progress(fields))

    def wait(self, seconds: float) -> None:
        with self._changed:
            if not self._canceled:
                self._changed.wait(seconds)

    def spark(self) -> SparkSession:
        with self._opening_spark:
            if self._spark is None:
                self._spark = self._begin_spark()
        if self._canceled:
            raise Conflict("Canceled", "the attempt is canceled")
        return cast("SparkSession", self._spark.session)

    def reply(self, reply: Reply) -> None:
        with self._changed:
            if reply.call_id in self._awaited:
                self._awaited[reply.call_id] = reply
                self._changed.notify_all()

    def cancel(self) -> None:
        with self._changed:
            self._canceled = True
            self._changed.notify_all()
        if self._spark is not None:
            self._spark.interrupt()

    def pause(self, paused: bool) -> None:
        with self._changed:
            self._paused = paused
            self._changed.notify_all()

    def renew(self, token: str) -> None:
        if not self._over:
            os.environ[CAPABILITY_VARIABLE] = token

    def finish(self) -> None:
        """Nothing more is said in this attempt's name."""
        with self._changed:
            self._over = True

    @property
    def holds_spark(self) -> bool:
        return self._spark is not None

    def end_spark(self) -> None:
        if self._spark is not None:
            self._spark.end()

    def _begin_spark(self) -> SparkAttempt:
        task = self._run.task
        if self._run.spark is None:
            raise Invalid("NoSpark", f"the runtime {task.runtime!r} has no Spark: use ecs_spark, or arrow()")
        from tracelake.worker.spark import session as spark_session

        connection = spark_session.open_session(self._run.spark)
        return spark_session.begin(
            connection, str(task.task_id), task.attempt, task.epoch or 0, self.on_spark_progress
        )


def _error(problem: Problem) -> TracelakeError:
    kind = _BY_STATUS.get(problem.status, TracelakeError)
    return kind(problem.reason, problem.message)
