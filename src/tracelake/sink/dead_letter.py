"""What becomes of a message that can't be merged: it is given up whole, with its reason, and the others go on.

What is wrong with the records themselves can't pass, so such a message is given up at once. What may pass (a
refusal of the database, an artifact that isn't there) is tried a few times. A dead letter is the Dispatcher's
to keep, where people list and replay it; the queue keeps what even the Dispatcher refuses.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from uuid import UUID

from tracelake.contracts.buffers import DeadLetterRequest, DeadLetterResponse
from tracelake.domain.errors import Conflict, NotFound, TracelakeError, Unavailable
from tracelake.queue.base import Message, Queue
from tracelake.sink.batches import Poison
from tracelake.worker.held_task import HeldTask, sendable
from tracelake.worker.wake_ups import WakeUps

MAX_TRIES = 3
MAX_REASON_CHARS = 4000

Send = Callable[[DeadLetterRequest], Awaitable[DeadLetterResponse]]


class DeadLetters:
    def __init__(
        self, held: HeldTask, dataset_uuid: UUID, *, send: Send, messages: WakeUps, queue: Queue
    ) -> None:
        self._held = held
        self._dataset_uuid = dataset_uuid
        self._send = send
        self._messages = messages
        self._queue = queue

    async def reject(self, message: Message, poison: Poison) -> bool:
        """Whether it was given up; otherwise it comes again. Returns once the dead letter is kept."""
        if not poison.lasting and message.receive_count < MAX_TRIES:
            self._held.log.warning(
                "message_refused",
                message_id=message.id,
                tries=message.receive_count,
                reason=poison.reason[:500],
            )
            self._messages.give_back([message.receipt])
            return False
        request = DeadLetterRequest(
            self._held.task_id,
            self._held.attempt,
            self._held.lease_token,
            self._dataset_uuid,
            dict(message.body),
            sendable(poison.reason)[:MAX_REASON_CHARS] or "it can't be merged",
            message.receive_count,
        )
        try:
            await self._send(request)
        except (Conflict, NotFound, Unavailable):
            raise
        except TracelakeError as error:
            self._held.log.error("dead_letter_refused", message_id=message.id, error=error.message)
            await self._queue.dead_letter([message.receipt], request.reason)
        self._held.log.warning(
            "dead_letter", message_id=message.id, tries=message.receive_count, reason=poison.reason[:500]
        )
        self._messages.done([message.receipt])
        return True
