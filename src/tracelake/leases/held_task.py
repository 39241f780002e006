"""A task that a lease holder holds, from its claim until its completion is answered, and its heartbeats.

``HeldTask`` connects three parties that don't know each other: the heartbeat applies the Dispatcher's answers, the
attempt that runs the operator acts on them, and the poller keeps the wake-ups that came for the task. The first
reason to stop an attempt is final; later ones change nothing.

``Heartbeats`` are sent for every held task, running or waiting: each a quarter of the lease after the last answer,
and earlier when an operator has reported progress or is paused. One timer serves all tasks, so a task that ends
before its first heartbeat costs one dictionary entry. While the Dispatcher can't be reached, a heartbeat is
repeated until the task is let go."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
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
from tracelake.domain.errors import Conflict, NotFound, TracelakeError
from tracelake.settings import Secret

MAX_ERROR_CHARS = 16 * 1024
_MAX_PROGRESS_TEXT = 500
Logger = structlog.stdlib.BoundLogger
PROGRESS_SECONDS = 2.0
PAUSED_SECONDS = 2.0
"""Between heartbeats of a paused attempt: it goes on within this time after its release."""
_SHORTEST_TRY = 1.0

_log = structlog.get_logger(__name__)


class Stop(StrEnum):
    """Why an attempt must end before it has finished."""

    CANCELED = "the task was canceled"
    SUPERSEDED = "the attempt is no longer the current one"
    TIMED_OUT = "the attempt took too long"
    RELEASED = "the worker is shutting down"
    OUTDATED = "others have invalidated what it reads or writes: it begins again with the current revisions"
    POOL_CHANGED = "its RPC pool has changed: it begins again with the new one"
    ENGINE_LOST = "the Spark that the attempt ran on is gone"


class Control(Protocol):
    """Controls the party that runs the operator."""

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
        "on_pause",
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
        """Receipts of wake-ups that came while the task was already held."""
        self.stopped: Stop | None = None
        self.reported = False
        self.paused = False
        self.on_pause: Callable[[HeldTask], None] | None = None
        """Called when it is paused, by whichever answer."""
        self.generation: int | None = None
        """Generation of the Spark server that the attempt runs on."""
        self.rpc_pool: PoolConfig | None = None
        """The RPC pool that the attempt was started with."""
        self.hide: Callable[[str], str] = str
        """Redacts the attempt's secrets in text that every user may read."""
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
        """A source has no inputs, never completes and has no time limit."""
        return not self.payload.inputs

    @property
    def heartbeat_seconds(self) -> float:
        quarter = self.payload.heartbeat_timeout_seconds / 4
        # What is paused waits for the answer that lets it go on.
        return min(quarter, PAUSED_SECONDS) if self.paused else quarter

    def controlled_by(self, control: Control | None) -> None:
        self._control = control

    def stop(self, why: Stop) -> None:
        # After the report the outcome is fixed: a stop could only contradict it.
        if self.stopped is None and not self.reported:
            self.stopped = why
            if self._control is not None:
                self._control.stop(why)

    def kill(self) -> None:
        """End an attempt that was asked to stop and hasn't."""
        if self._control is not None:
            self._control.kill()

    def apply_heartbeat(self, answer: HeartbeatResponse) -> None:
        """Act on the Dispatcher's answer to a heartbeat."""
        if answer.cancel:
            self.stop(Stop.CANCELED)
            return
        if answer.capability_token is not None:
            self.token = Secret(answer.capability_token)
            if self._control is not None:
                self._control.renew(self.token)
        self.pause(answer.pause)

    def pause(self, paused: bool) -> None:
        """Stop producing, or go on, as the Dispatcher has answered."""
        if paused != self.paused:
            self.paused = paused
            if self._control is not None:
                self._control.pause(paused)
            if paused and self.on_pause is not None:
                self.on_pause(self)

    def progressed(self, fields: Mapping[str, object]) -> None:
        """Record progress for the next heartbeat; it replaces progress that hasn't been sent."""
        self._progress = _flat(fields, self.hide)

    @property
    def has_progress(self) -> bool:
        return self._progress is not None

    def heartbeat(self) -> HeartbeatRequest:
        # Taken here: progress that is reported while this heartbeat is under way belongs to the next one.
        progress, self._progress = self._progress, None
        # Converted and not constructed: operators choose the fields, and the constructor checks no constraints.
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
        return CompleteRequest.of(
            self, status, None if error is None else sendable(error), retryable=retryable
        )


def sendable(text: str) -> str:
    """Text as the Dispatcher accepts it: without NUL and lone surrogates; a long text keeps both its ends."""
    # Postgres' text refuses NUL, and UTF-8 has no lone surrogates.
    text = text.replace("\0", "").encode("utf-8", "replace").decode()
    if len(text) <= MAX_ERROR_CHARS:
        return text
    half = MAX_ERROR_CHARS // 2 - 10
    return f"{text[:half]}\n…\n{text[-half:]}"


def _flat(fields: Mapping[str, object], hide: Callable[[str], str]) -> dict[str, object] | None:
    """The fields that fit on a task's row: scalars and short texts, a few kilobytes in all."""
    kept: dict[str, object] = {}
    # Two for the braces. Each field is measured with braces of its own, which pay for its comma.
    room = MAX_PROGRESS_BYTES - 2
    for name, value in fields.items():
        if not isinstance(value, str | int | float | bool | None) or not 1 <= len(name) <= 200:
            continue
        if isinstance(value, str):
            # Redacted before it is cut: half of a secret wouldn't be recognised.
            value = hide(value).replace("\0", "")[:_MAX_PROGRESS_TEXT]
        try:
            room -= len(msgspec.json.encode({name.replace("\0", ""): value}))
        except (OverflowError, UnicodeEncodeError, msgspec.MsgspecError):
            continue
        if room < 0:
            break
        kept[name.replace("\0", "")] = value
    return kept or None


class Heartbeats:
    def __init__(self, send: Callable[[HeartbeatRequest, float], Awaitable[HeartbeatResponse]]) -> None:
        """``send`` repeats a heartbeat until it is answered; its second argument is the timeout of one try."""
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._due: dict[HeldTask, float] = {}
        self._last: dict[HeldTask, float] = {}
        self._beating: dict[HeldTask, asyncio.Task[None]] = {}
        self._sending_progress: set[HeldTask] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf

    def keep(self, held: HeldTask) -> None:
        # Paused by an answer to its events, it must not sleep until its usual heartbeat.
        held.on_pause = self.send_soon
        self._schedule(held, self._loop.time() + held.heartbeat_seconds)

    def let_go(self, held: HeldTask) -> None:
        self._due.pop(held, None)
        self._last.pop(held, None)
        self._sending_progress.discard(held)
        beat = self._beating.pop(held, None)
        if beat is not None:
            beat.cancel()

    def send_soon(self, held: HeldTask) -> None:
        """Send progress soon; reports within ``PROGRESS_SECONDS`` travel in one heartbeat."""
        due = self._due.get(held)
        if due is not None:
            soon = max(self._loop.time(), self._last.get(held, -math.inf) + PROGRESS_SECONDS)
            if soon < due:
                self._schedule(held, soon)

    def has_unsent(self, held: HeldTask) -> bool:
        """Whether the operator reported progress that the Dispatcher hasn't confirmed yet."""
        return held.has_progress or held in self._sending_progress

    async def flush(self, held: HeldTask) -> None:
        """Send the last progress of a task that ends. Best effort: failures are ignored."""
        # A heartbeat may already be under way with older progress, hence the second round.
        for _ in range(2):
            beat = self._beating.get(held)
            # Out of the schedule first, so that the timer doesn't begin a second heartbeat of the same task.
            if beat is None and held.has_progress and self._due.pop(held, None) is not None:
                beat = self._begin(held)
            if beat is None:
                return
            await asyncio.wait([beat], timeout=_SHORTEST_TRY)

    def close(self) -> None:
        for held in tuple(self._due) + tuple(self._beating):
            self.let_go(held)
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self, held: HeldTask, due: float) -> None:
        self._due[held] = due
        # Only an earlier time moves the timer: one that fires
        # too early finds nothing due and sets itself again.
        if due < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._fire)

    def _fire(self) -> None:
        self._timer, self._timer_at = None, math.inf
        now = self._loop.time()
        earliest = math.inf
        # A copy: entries are removed on the way.
        for held, due in tuple(self._due.items()):
            if due <= now:
                del self._due[held]
                self._begin(held)
            else:
                earliest = min(earliest, due)
        if earliest < self._timer_at:
            self._timer_at = earliest
            self._timer = self._loop.call_at(earliest, self._fire)

    def _begin(self, held: HeldTask) -> asyncio.Task[None]:
        # Before the task runs: between taking the progress and its answer `has_unsent` must see no gap.
        if held.has_progress:
            self._sending_progress.add(held)
        beat = asyncio.create_task(self._beat(held))
        self._beating[held] = beat
        return beat

    async def _beat(self, held: HeldTask) -> None:
        try:
            held.apply_heartbeat(
                await self._send(held.heartbeat(), max(_SHORTEST_TRY, held.heartbeat_seconds))
            )
        except (Conflict, NotFound) as refusal:
            # A heartbeat that the task's own report has overtaken is refused as well.
            if not held.reported:
                held.log.warning("attempt_superseded", reason=refusal.reason)
                held.stop(Stop.SUPERSEDED)
        except TracelakeError as refusal:
            # The attempt goes on: its lease may still hold, and the next heartbeat finds out.
            held.log.error("heartbeat_refused", reason=refusal.reason, error=refusal.message)
        self._sending_progress.discard(held)
        # A task that was let go meanwhile must not be scheduled again.
        if self._beating.pop(held, None) is not None:
            self._last[held] = self._loop.time()
            self._schedule(held, self._last[held] + held.heartbeat_seconds)
            if held.has_progress:
                self.send_soon(held)
