"""A task that this worker holds: from its claim until its completion was answered.

Three parties meet here and none of them knows the others: the heartbeat brings word from the Dispatcher, the
attempt that runs the operator acts on it, and the poller keeps the wake-ups that came for it. Why an attempt must
stop is decided once; whoever comes second changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol
from uuid import UUID

import msgspec
import structlog

from tracelake.contracts.dispatcher_api import (
    MAX_PROGRESS_BYTES,
    ClaimResponse,
    CompleteRequest,
    CompletionStatus,
    HeartbeatRequest,
    HeartbeatResponse,
    TaskPayload,
)
from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.secret import Secret

MAX_ERROR_CHARS = 16 * 1024
_MAX_PROGRESS_TEXT = 500

Logger = structlog.stdlib.BoundLogger
_log = structlog.get_logger(__name__)


class Stop(StrEnum):
    """Why an attempt must end before it has finished."""

    CANCELED = "the task was canceled"
    SUPERSEDED = "the attempt is no longer the current one"
    TIMED_OUT = "the attempt took too long"
    RELEASED = "the worker is shutting down"
    OUTDATED = "others have invalidated what it reads or writes: it begins again with what they said"
    POOL_CHANGED = "its RPC pool has changed: it begins again with the new one"
    ENGINE_LOST = "the Spark that the attempt ran on is gone"


class Control(Protocol):
    """What the party that runs the operator can be told."""

    def stop(self, why: Stop) -> None: ...

    def kill(self) -> None: ...

    def pause(self, paused: bool) -> None: ...

    def renew(self, token: Secret) -> None: ...


class HeldTask:
    __slots__ = (
        "_control",
        "_progress",
        "attempt",
        "generation",
        "hide",
        "later_receipts",
        "lease_token",
        "paused",
        "payload",
        "receipts",
        "reported",
        "rpc_pool",
        "stopped",
        "task_id",
        "token",
    )

    def __init__(
        self, claim: ClaimResponse, payload: TaskPayload, lease_token: UUID, receipts: list[str]
    ) -> None:
        self.payload = payload
        self.task_id = payload.task_id
        self.attempt = payload.attempt
        self.lease_token = lease_token
        self.token = Secret(claim.capability_token or "")
        self.receipts = receipts
        self.later_receipts: list[str] = []
        """Of wake-ups that came while the task was held already."""
        self.stopped: Stop | None = None
        self.reported = False
        self.paused = False
        self.generation: int | None = None
        """Of the Spark that the attempt runs on."""
        self.rpc_pool: PoolConfig | None = None
        """What the attempt was given to reach a chain by."""
        self.hide: Callable[[str], str] = str
        """Takes the attempt's secrets out of what everybody may read."""
        self._progress: Mapping[str, object] | None = None
        self._control: Control | None = None

    @property
    def log(self) -> Logger:
        job = self.payload.job
        logger: Logger = _log.bind(
            task_id=str(self.task_id),
            attempt=self.attempt,
            job=f"{job.dag_name}/{job.name}",
            operator=self.payload.operator,
        )
        return logger

    @property
    def is_source(self) -> bool:
        """A source reads nothing, never completes, and has no longest run."""
        return not self.payload.inputs

    @property
    def heartbeat_seconds(self) -> float:
        return self.payload.heartbeat_timeout_seconds / 4

    def controlled_by(self, control: Control | None) -> None:
        self._control = control

    def stop(self, why: Stop) -> None:
        if self.stopped is None and not self.reported:
            self.stopped = why
            if self._control is not None:
                self._control.stop(why)

    def kill(self) -> None:
        """No more patience with an attempt that was told to stop."""
        if self._control is not None:
            self._control.kill()

    def heard(self, answer: HeartbeatResponse) -> None:
        if answer.cancel:
            self.stop(Stop.CANCELED)
            return
        if answer.capability_token is not None:
            self.token = Secret(answer.capability_token)
            if self._control is not None:
                self._control.renew(self.token)
        if answer.pause != self.paused:
            self.paused = answer.pause
            if self._control is not None:
                self._control.pause(answer.pause)

    def progressed(self, fields: Mapping[str, object]) -> None:
        """Only the latest counts: it takes the place of what wasn't sent yet."""
        self._progress = _flat(fields, self.hide)

    @property
    def has_progress(self) -> bool:
        return self._progress is not None

    def heartbeat(self) -> HeartbeatRequest:
        progress, self._progress = self._progress, None
        return msgspec.convert(
            {
                "task_id": self.task_id,
                "attempt": self.attempt,
                "lease_token": self.lease_token,
                "progress": progress,
            },
            HeartbeatRequest,
        )

    def completion(
        self, status: CompletionStatus, error: str | None = None, *, retryable: bool = True
    ) -> CompleteRequest:
        return CompleteRequest(
            self.task_id,
            status,
            self.attempt,
            self.lease_token,
            error_message=None if error is None else sendable(error),
            retryable=retryable,
        )


def sendable(text: str) -> str:
    """As the Dispatcher takes it: no NUL, no lone surrogates, not too long; of a long text both ends count."""
    text = text.replace("\0", "").encode("utf-8", "replace").decode()
    if len(text) <= MAX_ERROR_CHARS:
        return text
    half = MAX_ERROR_CHARS // 2 - 10
    return f"{text[:half]}\n…\n{text[-half:]}"


def _flat(fields: Mapping[str, object], hide: Callable[[str], str]) -> dict[str, object] | None:
    """What fits on a task's row: scalars, short texts, a few kilobytes; the rest is left out."""
    kept: dict[str, object] = {}
    room = MAX_PROGRESS_BYTES - 2
    for name, value in fields.items():
        if not isinstance(value, str | int | float | bool | None) or not 1 <= len(name) <= 200:
            continue
        if isinstance(value, str):
            value = hide(value).replace("\0", "")[:_MAX_PROGRESS_TEXT]
        try:
            room -= len(msgspec.json.encode({name.replace("\0", ""): value}))
        except (OverflowError, UnicodeEncodeError, msgspec.MsgspecError):
            continue
        if room < 0:
            break
        kept[name.replace("\0", "")] = value
    return kept or None
