"""The contract that every queue driver keeps.

A queue carries small JSON objects from publishers to receivers, at least once and in roughly the order of
publishing. Queues are wake-ups or buffers here, never the record of a task's state.

- ``receive`` hides the messages it returns for ``visibility_seconds``; a message that isn't acknowledged by then
  is delivered again. Time is the driver's (the database's or the service's), never the caller's.
- Each delivery has a receipt of its own. A receipt is good until the message is delivered again; from then on it
  is stale: it changes nothing, and the call returns it.
- A message received ``max_receives`` times without an acknowledgement is moved whole, with the reason, to the
  dead letters of its queue, from where it can be redriven.
- ``durable=False`` may lose the call in a crash of the queue's server (the state database repeats a lost
  wake-up); ``durable=True`` returns once the call would survive one.
- A queue exists from its first message on and needs no creation.
- A server that can't be reached is ``Unavailable``. Then it isn't known whether the call took effect; repeating
  it is always safe, since delivery is at least once. ``receive`` itself keeps trying for as long as it was asked
  to wait, and raises only if the server is still gone then: an outage never looks like an empty queue, and a
  restart within the wait goes unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import orjson

from tracelake.domain.errors import Invalid, TooLarge

MAX_BODY_BYTES = 256 * 1024
MAX_BATCH = 1000
MAX_HEAD_START = 3600.0

_QUEUE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,79}")

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One delivery of a message; ``receive_count`` is 1 the first time."""

    id: str
    receipt: str
    body: Body
    receive_count: int
    enqueued_at: datetime


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message whose delivery was given up, unchanged, with the reason."""

    id: str
    body: Body
    reason: str
    receive_count: int
    enqueued_at: datetime
    dead_at: datetime


@dataclass(frozen=True, slots=True)
class QueueDepth:
    """How full a queue is; the age is that of the oldest message not yet acknowledged."""

    visible: int = 0
    in_flight: int = 0
    delayed: int = 0
    dead: int = 0
    oldest_age_seconds: float = 0.0


class Queue(Protocol):
    """The contract; see the module's docstring for what holds throughout."""

    async def publish(
        self,
        queue: str,
        bodies: Sequence[Body],
        *,
        delay: float = 0.0,
        durable: bool = False,
        head_start: float = 0.0,
    ) -> list[str]:
        """Add all of ``bodies`` or none, visible after ``delay`` seconds; returns their ids in order. With a
        ``head_start`` they are received as if they had been published that many seconds earlier, at most
        ``MAX_HEAD_START``: before what has waited for less."""
        ...

    async def receive(
        self,
        queue: str,
        *,
        max_messages: int = 10,
        wait_seconds: float = 0.0,
        visibility_seconds: float = 30.0,
        max_bytes: int | None = None,
    ) -> list[Message]:
        """Up to ``max_messages``, as soon as there is one, or an empty list after ``wait_seconds``. No message is
        added once the bodies have ``max_bytes`` together, so the limit is exceeded by less than one message."""
        ...

    async def extend(self, receipts: Sequence[str], *, visibility_seconds: float) -> list[str]:
        """Hide for that long from now; returns the stale receipts, lapsed visibility included."""
        ...

    async def release(self, receipts: Sequence[str]) -> list[str]:
        """Make visible again at once; returns the stale receipts, lapsed visibility included."""
        ...

    async def ack(self, receipts: Sequence[str], *, durable: bool = False) -> list[str]:
        """Delete these messages; returns the stale receipts, whose messages stay as they are."""
        ...

    async def dead_letter(self, receipts: Sequence[str], reason: str) -> list[str]:
        """Move these to the dead letters now, durably; returns the stale receipts."""
        ...

    async def dead_letters(self, queue: str, *, limit: int = 100) -> list[DeadLetter]:
        """The oldest dead letters of a queue."""
        ...

    async def redrive(self, queue: str, ids: Sequence[str]) -> int:
        """Put dead letters back as new messages, visible at once; returns how many there were."""
        ...

    async def discard(self, queue: str, ids: Sequence[str]) -> int:
        """Delete dead letters for good; returns how many there were."""
        ...

    async def depth(self, queue: str) -> QueueDepth: ...

    async def depths(self) -> dict[str, QueueDepth]:
        """Every queue that holds anything, dead letters included."""
        ...

    async def purge(self, queue: str) -> int:
        """Drop all messages of a queue, those in flight too, but not its dead letters; returns how many."""
        ...

    async def close(self) -> None: ...


def check_queue_name(queue: str) -> None:
    """Refuse names that not every driver accepts."""
    if not _QUEUE_NAME.fullmatch(queue):
        raise Invalid("BadQueueName", f"a queue's name matches {_QUEUE_NAME.pattern}, not {queue!r}")


def check_receive(
    max_messages: int, wait_seconds: float, visibility_seconds: float, max_bytes: int | None
) -> None:
    if max_bytes is not None and max_bytes < 1:
        raise Invalid("BadBatchSize", f"max_bytes is {max_bytes}, not at least 1")
    if not 1 <= max_messages <= MAX_BATCH:
        raise Invalid("BadBatchSize", f"max_messages is {max_messages}, not within 1 and {MAX_BATCH}")
    check_seconds("wait_seconds", wait_seconds)
    check_seconds("visibility_seconds", visibility_seconds)


def check_seconds(name: str, seconds: float) -> None:
    """SQS hides a message for at most 12 hours, so every driver refuses a longer time."""
    if not 0 <= seconds <= 43_200:
        raise Invalid("BadDuration", f"{name} is {seconds}, not within 0 and 43200 seconds")


def encode_body(body: Body) -> str:
    try:
        raw = orjson.dumps(dict(body))
    except TypeError as error:
        raise Invalid("BadBody", f"a message's body is a JSON object: {error}") from None
    if len(raw) > MAX_BODY_BYTES:
        raise TooLarge("MessageTooLarge", f"a message of {len(raw)} bytes exceeds {MAX_BODY_BYTES}")
    return raw.decode()
