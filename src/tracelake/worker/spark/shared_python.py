"""Attempts on a worker's own Spark share its Python workers.

Spark keeps the Python workers of one session from those of another, for the sake of files that a session may bring
along; so every attempt would start a Python anew, and pay a second or more for what it imports. Operators bring no
files. A server only takes that into account when a session is made, and only for copies: so there is a parent
session, made by whoever comes first, and every attempt's session is a copy of it, empty like any other. Views,
settings, registered functions and what is interrupted stay the session's own; what Python code leaves behind in
its process is found by the next attempt's.
"""

from __future__ import annotations

import time
from typing import Any

import grpc
from pyspark.sql.connect.proto import (
    CloneSessionRequest,
    ConfigRequest,
    KeyValue,
    SparkConnectServiceStub,
    UserContext,
)

from tracelake.worker.spark import channel as spark_channel
from tracelake.worker.spark import ids as spark_ids
from tracelake.worker.spark.client import SparkConnection

_ISOLATION = "spark.sql.artifact.isolation.enabled"
_WITHIN = 10.0
_AGE = 6 * 3600
"""Much less than the time after which a server forgets a session that nobody uses (``conf``)."""


def share_python(connection: SparkConnection, session_id: str) -> None:
    """Make the session as such a copy. Failing that, its first query makes it, with Python workers of its own."""
    if not spark_channel.is_supervised(connection.target):
        return
    make_stub: Any = SparkConnectServiceStub
    stub = make_stub(connection.channel)
    parent = spark_ids.parent_session_id(connection.target.token, int(time.time() / _AGE))
    for known in (connection.has_parent, False):
        try:
            if not known:
                _make_parent(stub, parent)
            stub.CloneSession(
                CloneSessionRequest(session_id=parent, user_context=_user(), new_session_id=session_id),
                timeout=_WITHIN,
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
        ConfigRequest(session_id=session_id, user_context=_user(), operation=operation), timeout=_WITHIN
    )


def _user() -> UserContext:
    return UserContext(user_id=spark_ids.USER)
