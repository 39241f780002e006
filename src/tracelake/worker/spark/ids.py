"""Names of Spark work: what an attempt's session, its jobs and their owner are called.

They follow from the attempt alone, so that the wrapper can stop the Spark work of an operator process that is
gone and can't be asked any more. The epoch is part of it: after a restore from backup an attempt's number may
come again, and must not meet the session of the first one.
"""

from __future__ import annotations

from uuid import UUID, uuid5

USER = "tracelake"

_SESSIONS = UUID("5c1f6a52-94a9-5d4f-8a3c-3f6de0f0a7b1")


def session_id(task_id: str, attempt: int, epoch: int) -> str:
    return str(uuid5(_SESSIONS, f"{task_id}/{attempt}/{epoch}"))


def parent_session_id(token: str, age: int) -> str:
    """The session that those of attempts are copies of. Another one for each life of a server, as its token is, and
    for each ``age`` of it: a session that was idle for too long is gone, and its id refused from then on."""
    return str(uuid5(_SESSIONS, f"parent/{token}/{age}"))


def tag(task_id: str, attempt: int) -> str:
    return f"tracelake-{task_id}-{attempt}"
