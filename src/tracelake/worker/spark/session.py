"""Spark in an operator process: one open connection, and a session of its own for every attempt.

    connection = open_session(target)                       once; later calls with the same target return it
    work = begin(connection, task_id, attempt, epoch, on_progress)
    work.session.sql("select 1").collect()
    work.interrupt()                                        from any thread
    work.end()

The channel outlives the attempts: a warm process reaches a new session without a handshake. A session's id
follows from the attempt (``connect``), so that the wrapper can end it when this process no longer can, and so
that the server refuses a process that goes on after that. Temporary views, conf and registered functions are the
session's alone; everything it runs carries the tag ``tracelake-{task_id}-{attempt}``. Spark's own client opens a
channel per session and tags only what the current thread runs, hence ``AttemptClient``.

Attempts on a worker's own Spark share its Python workers. Spark separates the Python workers of sessions because
of files that a session may bring along; so every attempt would start a Python anew, and pay a second or more for
its imports. Operators bring no files. A server only takes that into account when a session is made, and only for
copies: so there is a parent session, made by the first attempt, and every attempt's session is a copy of it,
empty like any other. Views, settings, registered functions and interrupts stay the session's own; state that
Python code leaves in its process is visible to the next attempt's.

``SparkProgress`` adds up an attempt's Spark work for the task's row. Spark reports stages and bytes while an
operation runs, and the number of rows only at its end, for queries and not for writes (an operator that writes
counts by itself). Operations shorter than Spark's reporting interval may not be reported at all. Progress is sent
at most twice a second, from the thread that runs the query, and once more at the end if something is left.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from pyspark.errors import PySparkException
from pyspark.sql.connect.client import DefaultChannelBuilder, SparkConnectClient
from pyspark.sql.connect.proto import (
    CloneSessionRequest,
    ConfigRequest,
    ExecutePlanResponse,
    KeyValue,
    SparkConnectServiceStub,
    UserContext,
)
from pyspark.sql.connect.session import SparkSession
from pyspark.sql.connect.shell.progress import ProgressHandler, StageInfo
from pyspark.sql.metrics import PlanMetrics

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.worker.spark import connect

# An embedded server that is gone never comes back under its address; for others, Spark's own retries apply.
_LOCAL_PATIENCE = {"max_retries": 5, "max_backoff": 1000}
_CONNECTS_WITHIN = 10.0
_ROWS = ("numOutputRows", "number of output rows")
_ISOLATION = "spark.sql.artifact.isolation.enabled"
_SHARE_SECONDS = 10.0
_AGE = 6 * 3600
"""Much less than the time after which a server forgets an unused session (``launch``)."""
SessionFields = dict[str, Any]
OnProgress = Callable[[SessionFields], None]
INTERVAL = 0.5

_log = logging.getLogger(__name__)
_open: SparkConnection | None = None


class SparkAttempt:
    """The session of one attempt, and everything it runs."""

    def __init__(self, client: AttemptClient, progress: SparkProgress) -> None:
        self.tag = client.attempt_tag
        self.session = _session_on(client)
        self._client = client
        self._progress = progress

    def interrupt(self) -> None:
        """Cancel what this attempt has running on Spark; from any thread, any number of times."""
        try:
            self._client.interrupt_tag(self.tag)
        except PySparkException as error:
            _log.info("Spark work was not interrupted: %s", error)

    def end(self) -> None:
        """Release the session on the server: its views, its cached data, its running work."""
        self._progress.finish()
        _deactivate(self.session)
        if self._client.is_closed:
            # The operator has called ``stop()``.
            return
        try:
            self._client.release_session()
        except PySparkException as error:
            _log.info("the Spark session was not released: %s", error)
        self._client.close()


def open_session(target: SparkTarget) -> SparkConnection:
    """The process's connection to ``target``, opened on first use and kept; a warm process calls it early."""
    global _open
    if _open is None or not _open.serves(target):
        if _open is not None:
            _open.close()
        _open = SparkConnection(target)
        _open.connect()
    return _open


def begin(
    connection: SparkConnection,
    task_id: str,
    attempt: int,
    epoch: int,
    on_progress: OnProgress | None = None,
) -> SparkAttempt:
    """A fresh session for this attempt, active in the calling thread. ``on_progress`` gets flat fields (stages,
    stages_done, tasks, tasks_done, rows, bytes), throttled."""
    # Without them, ``pyspark.sql.functions`` and ``builder.getOrCreate`` mean a Spark inside of this process.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    os.environ["SPARK_REMOTE"] = connection.target.url
    progress = SparkProgress(on_progress or _ignored)
    client = AttemptClient(
        connection,
        session_id=connect.session_id(task_id, attempt, epoch),
        attempt_tag=connect.tag(task_id, attempt),
        on_rows=progress.add_rows,
    )
    client.register_progress_handler(progress)
    share_python(connection, client._session_id)
    work = SparkAttempt(client, progress)
    _activate(work.session)
    return work


def _ignored(fields: dict[str, object]) -> None:
    pass


def _session_on(client: AttemptClient) -> SparkSession:
    """A session around an existing client, as Spark's own ``newSession`` makes it."""
    session = object.__new__(SparkSession)
    session._client = client
    session._session_id = client._session_id
    session.release_session_on_close = True
    return session


def _activate(session: SparkSession) -> None:
    SparkSession._default_session = session
    SparkSession._active_session.session = session


def _deactivate(session: SparkSession) -> None:
    if SparkSession._default_session is session:
        SparkSession._default_session = None
    SparkSession._active_session.session = None


class SparkConnection:
    """An open channel to one server, of the process that opened it: a channel doesn't survive a fork."""

    def __init__(self, target: SparkTarget) -> None:
        self.target = target
        self.channel = connect.open_channel(target)
        self.usable = True
        self.has_parent = False
        """Whether the session that attempts are copies of has been made."""
        self._owner = os.getpid()

    def connect(self) -> None:
        """Do the handshake early. A server that can't be reached makes the first query fail, with a message."""
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
        """Spark copies the channel builder for another session and closes the copy's channel: share this one."""
        return SparkConnection(self.target)


class _KeptChannel(DefaultChannelBuilder):
    def __init__(self, connection: SparkConnection, session_id: str) -> None:
        super().__init__(f"sc://{connect.endpoint(connection.target)}")
        self._connection = connection
        self.set("user_id", connect.SPARK_USER)
        self.set("session_id", session_id)

    def _insecure_channel(self, target: Any, **kwargs: Any) -> grpc.Channel:
        return self._connection.channel

    def _secure_channel(self, target: Any, credentials: Any, **kwargs: Any) -> grpc.Channel:
        return self._connection.channel

    def metadata(self) -> list[tuple[str, str]]:
        return list(connect.metadata(self._connection.target))


class AttemptClient(SparkConnectClient):
    """Connections to a worker's own server don't break while both sides live, so the ability to reattach to
    running work would cost a dozen calls per query without a use. In return such a server doesn't notice that
    this process is gone; the wrapper does, and ends its work. With other servers Spark's way is kept."""

    def __init__(
        self,
        connection: SparkConnection,
        *,
        session_id: str,
        attempt_tag: str,
        on_rows: Callable[[int], None],
    ) -> None:
        ours = connect.is_supervised(connection.target)
        super().__init__(
            _KeptChannel(connection, session_id),
            retry_policy=_LOCAL_PATIENCE if ours else None,
            use_reattachable_execute=not ours,
        )
        if ours:
            # Otherwise every session begins with a round trip about compression, which local calls don't need.
            self._plan_compression_threshold, self._plan_compression_algorithm = -1, "NONE"
        self.attempt_tag = attempt_tag
        self._on_rows = on_rows

    def get_tags(self) -> set[str]:
        return {*super().get_tags(), self.attempt_tag}

    def _on_exit(self) -> None:
        """Spark's client would call a server that may be gone, and delay the end of the process."""

    def close(self) -> None:
        """Keep nothing of the session in this process; the shared channel stays open."""
        atexit.unregister(self._on_exit)
        self._closed = True

    def _build_metrics(self, metrics: ExecutePlanResponse.Metrics) -> Iterator[PlanMetrics]:
        plans = list(super()._build_metrics(metrics))
        self._on_rows(rows_of(plans))
        return iter(plans)


def rows_of(plans: list[PlanMetrics]) -> int:
    """The rows that a plan produced: those of its topmost nodes that count any."""
    for plan in plans:
        for metric in plan.metrics:
            if metric.name in _ROWS:
                return int(metric.value)
    return 0


def share_python(connection: SparkConnection, session_id: str) -> None:
    """Make the session as such a copy. If that fails, its first query makes it, with Python workers of its own."""
    if not connect.is_supervised(connection.target):
        return
    make_stub: Any = SparkConnectServiceStub
    stub = make_stub(connection.channel)
    parent = connect.parent_session_id(connection.target.token, int(time.time() / _AGE))
    # If the known parent is gone, there is a second try with a new one.
    for known in (connection.has_parent, False):
        try:
            if not known:
                _make_parent(stub, parent)
            stub.CloneSession(
                CloneSessionRequest(session_id=parent, user_context=_user(), new_session_id=session_id),
                timeout=_SHARE_SECONDS,
            )
            connection.has_parent = True
            return
        except grpc.RpcError:
            connection.has_parent = False
            if not known:
                return


def _make_parent(stub: Any, session_id: str) -> None:
    setting = ConfigRequest.Set(pairs=[KeyValue(key=_ISOLATION, value="false")])
    operation = ConfigRequest.Operation(set=setting)
    stub.Config(
        ConfigRequest(session_id=session_id, user_context=_user(), operation=operation),
        timeout=_SHARE_SECONDS,
    )


def _user() -> UserContext:
    return UserContext(user_id=connect.SPARK_USER)


@dataclass(slots=True)
class _Operation:
    """Stages come and go in the reports; the last numbers of each are kept."""

    stages: dict[int, tuple[int, int, int, bool]] = field(default_factory=dict)


class SparkProgress(ProgressHandler):
    def __init__(
        self,
        on_progress: OnProgress,
        *,
        interval: float = INTERVAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_progress = on_progress
        self._interval = interval
        self._clock = clock
        self._lock = threading.Lock()
        self._operations: dict[str, _Operation] = {}
        self._rows = 0
        self._last: SessionFields | None = None
        self._last_at = float("-inf")

    def __call__(
        self, stages: Iterable[StageInfo] | None, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        """Spark's progress handler."""
        with self._lock:
            operation = self._operations.setdefault(operation_id or "", _Operation())
            for stage in stages or ():
                operation.stages[stage.stage_id] = (
                    stage.num_tasks,
                    stage.num_completed_tasks,
                    stage.num_bytes_read,
                    stage.done,
                )
            if done:
                # Spark doesn't report once more at the end; an operation that is over has nothing left to do.
                operation.stages = {
                    number: (tasks, tasks, read, True)
                    for number, (tasks, _, read, _) in operation.stages.items()
                }
        self._report(now=False)

    def add_rows(self, rows: int) -> None:
        with self._lock:
            self._rows += rows
        self._report(now=False)

    def finish(self) -> None:
        self._report(now=True)

    def fields(self) -> SessionFields:
        stages: Sequence[tuple[int, int, int, bool]] = [
            stage for operation in self._operations.values() for stage in operation.stages.values()
        ]
        return {
            "stages": len(stages),
            "stages_done": sum(done for *_, done in stages),
            "tasks": sum(tasks for tasks, *_ in stages),
            "tasks_done": sum(completed for _, completed, *_ in stages),
            "rows": self._rows,
            "bytes": sum(read for *_, read, _ in stages),
        }

    def _report(self, *, now: bool) -> None:
        with self._lock:
            moment = self._clock()
            if not now and moment - self._last_at < self._interval:
                return
            fields = self.fields()
            if fields == self._last or not any(fields.values()):
                return
            self._last, self._last_at = fields, moment
        # Outside of the lock: the receiver may have to wait for the channel.
        self._on_progress(fields)
