"""Spark as an operator process sees it: one open connection, and a session of its own for every attempt.

    connection = open_session(target)                       once; later calls with the same target return it
    work = begin(connection, task_id, attempt, epoch, on_progress)
    work.session.sql("select 1").collect()
    work.interrupt()                                        from any thread
    work.end()

The channel outlives the attempts: a warm process reaches a new session without a handshake. A session's id
follows from the attempt (``spark_ids``), so that the wrapper can end it when this process no longer can, and so
that a process which goes on after that is refused by the server. Temporary views, conf and registered functions
are the session's alone; everything it runs carries the tag ``tracelake-{task_id}-{attempt}``.
"""

from __future__ import annotations

import logging
import os

from pyspark.errors import PySparkException
from pyspark.sql.connect.session import SparkSession

from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.worker.spark import ids as spark_ids
from tracelake.worker.spark.client import AttemptClient, SparkConnection
from tracelake.worker.spark.progress import SparkProgress, Told
from tracelake.worker.spark.shared_python import share_python

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
        """Release the session on the server: its views, its cached data, what it still runs."""
        self._progress.finish()
        _deactivate(self.session)
        if self._client.is_closed:
            # By the operator, with ``stop()``.
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
    on_progress: Told | None = None,
) -> SparkAttempt:
    """A fresh session for this attempt, active in the calling thread.

    ``on_progress`` gets flat fields (stages, stages_done, tasks, tasks_done, rows, bytes), throttled.
    """
    # Without them, ``pyspark.sql.functions`` and ``builder.getOrCreate`` mean a Spark inside of this process.
    os.environ["SPARK_CONNECT_MODE_ENABLED"] = "1"
    os.environ["SPARK_REMOTE"] = connection.target.url
    progress = SparkProgress(on_progress or _ignored)
    client = AttemptClient(
        connection,
        session_id=spark_ids.session_id(task_id, attempt, epoch),
        attempt_tag=spark_ids.tag(task_id, attempt),
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
    """As Spark's own ``newSession`` does it: a session around a client that exists."""
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
