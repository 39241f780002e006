"""Spark's Connect client, led to a channel that is open already and bound to one attempt.

Spark's own client opens a channel per session and tags what the current thread runs; an attempt needs its
sessions to share the channel, and its tag on everything, whichever thread starts it. What Spark says about a
finished plan is also read here, since its progress reports know no rows.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from pyspark.sql.connect.client import DefaultChannelBuilder, SparkConnectClient
from pyspark.sql.connect.proto import ExecutePlanResponse
from pyspark.sql.metrics import PlanMetrics

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.worker.spark import channel as spark_channel
from tracelake.worker.spark import ids as spark_ids

# An embedded server that is gone never comes back under its address; elsewhere, Spark's own patience applies.
_LOCAL_PATIENCE = {"max_retries": 5, "max_backoff": 1000}
_CONNECTS_WITHIN = 10.0
_ROWS = ("numOutputRows", "number of output rows")


class SparkConnection:
    """An open channel to one server, of the process that opened it: a channel doesn't survive a fork."""

    def __init__(self, target: SparkTarget) -> None:
        self.target = target
        self.channel = spark_channel.open_channel(target)
        self.usable = True
        self.has_parent = False
        """Whether the session that attempts are copies of has been made."""
        self._owner = os.getpid()

    def connect(self) -> None:
        """Have the handshake behind us. A server that isn't there is found out by the first query, with words."""
        try:
            grpc.channel_ready_future(self.channel).result(timeout=_CONNECTS_WITHIN)
        except grpc.FutureTimeoutError:
            return

    def serves(self, target: SparkTarget) -> bool:
        return self.usable and self.target == target and self._owner == os.getpid()

    def close(self) -> None:
        if self.usable and self._owner == os.getpid():
            self.channel.close()
        self.usable = False

    def __deepcopy__(self, _: dict[int, Any]) -> SparkConnection:
        """Spark copies the way to a channel for a session beside this one, and closes that one's by itself."""
        return SparkConnection(self.target)


class _KeptChannel(DefaultChannelBuilder):
    def __init__(self, connection: SparkConnection, session_id: str) -> None:
        super().__init__(f"sc://{spark_channel.endpoint(connection.target)}")
        self._connection = connection
        self.set("user_id", spark_ids.USER)
        self.set("session_id", session_id)

    def _insecure_channel(self, target: Any, **kwargs: Any) -> grpc.Channel:
        return self._connection.channel

    def _secure_channel(self, target: Any, credentials: Any, **kwargs: Any) -> grpc.Channel:
        return self._connection.channel

    def metadata(self) -> list[tuple[str, str]]:
        return list(spark_channel.metadata(self._connection.target))


class AttemptClient(SparkConnectClient):
    """Connections to a server of the worker's own don't break while both sides live, so being able to come back
    to running work would cost a dozen calls per query and serve nobody. In return such a server doesn't notice
    that this process is gone: the wrapper does, and tells it. With other servers Spark's way is kept.
    """

    def __init__(
        self,
        connection: SparkConnection,
        *,
        session_id: str,
        attempt_tag: str,
        on_rows: Callable[[int], None],
    ) -> None:
        ours = spark_channel.is_supervised(connection.target)
        super().__init__(
            _KeptChannel(connection, session_id),
            retry_policy=_LOCAL_PATIENCE if ours else None,
            use_reattachable_execute=not ours,
        )
        if ours:
            # Otherwise every session begins with a round trip to learn how to compress what goes nowhere.
            self._plan_compression_threshold, self._plan_compression_algorithm = -1, "NONE"
        self.attempt_tag = attempt_tag
        self._on_rows = on_rows

    def get_tags(self) -> set[str]:
        return {*super().get_tags(), self.attempt_tag}

    def _on_exit(self) -> None:
        """Spark's client would call a server that may be gone, and keep the process from ending."""

    def close(self) -> None:
        """Nothing of the session is kept in this process; the channel isn't its own, and stays open."""
        atexit.unregister(self._on_exit)
        self._closed = True

    def _build_metrics(self, metrics: ExecutePlanResponse.Metrics) -> Iterator[PlanMetrics]:
        plans = list(super()._build_metrics(metrics))
        self._on_rows(rows_of(plans))
        return iter(plans)


def rows_of(plans: list[PlanMetrics]) -> int:
    """The rows that came out of a plan: those of its nodes nearest to the top that count any."""
    for plan in plans:
        for metric in plan.metrics:
            if metric.name in _ROWS:
                return int(metric.value)
    return 0
