"""Step 4, claim: wake-ups in, leased tasks out.

A wake-up is only a hint. One that names no task, a task that is unknown, done or somebody else's costs a line in
the log; one for a task that this worker already holds waits until that attempt is over. A claim is repeated with
the same key until it is answered, so a lost response gives the same lease; the key is new with every start of a
worker, so that nobody takes up the lease of a process that has died.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from uuid import UUID

import structlog

from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse
from tracelake.domain.errors import TracelakeError
from tracelake.queue.base import Message
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.held_task import HeldTask
from tracelake.worker.load import Load
from tracelake.worker.wake_ups import WakeUps

_REFUSED_PAUSE = 1.0

_log = structlog.get_logger(__name__)


class Poller:
    """``accept`` takes over what was claimed."""

    def __init__(
        self,
        *,
        wake_ups: WakeUps,
        client: DispatcherClient,
        load: Load,
        worker_id: str,
        accept: Callable[[HeldTask], None],
    ) -> None:
        self._wake_ups = wake_ups
        self._client = client
        self._load = load
        self._worker_id = worker_id
        self._accept = accept
        self._start = secrets.token_hex(4)

    async def poll(self, max_messages: int, wait_seconds: float) -> int:
        """One round; answers how many wake-ups there were."""
        messages = await self._wake_ups.receive(max_messages, wait_seconds)
        wanted = self._sort(messages)
        if wanted:
            await self._claim(wanted)
        return len(messages)

    def _sort(self, messages: Iterable[Message]) -> dict[UUID, list[Message]]:
        """By task, without those that need no claim."""
        wanted: dict[UUID, list[Message]] = {}
        for message in messages:
            task_id = _task_id(message)
            if task_id is None:
                _log.warning("wake_up_malformed", message_id=message.id)
                self._wake_ups.done([message.receipt])
                continue
            held = self._load.get(task_id)
            if held is not None:
                held.later_receipts.append(message.receipt)
            else:
                wanted.setdefault(task_id, []).append(message)
        return wanted

    async def _claim(self, wanted: dict[UUID, list[Message]]) -> None:
        claims = [
            ClaimRequest(task_id, self._worker_id, f"{self._start}-{messages[0].id}")
            for task_id, messages in wanted.items()
        ]
        unsettled = {message.receipt for messages in wanted.values() for message in messages}
        try:
            for answer in await self._client.claim(claims):
                receipts = [message.receipt for message in wanted[answer.task_id]]
                self._take(answer, receipts)
                unsettled.difference_update(receipts)
        except TracelakeError as error:
            _log.error("claims_refused", reason=error.reason, error=error.message, claims=len(claims))
            await asyncio.sleep(_REFUSED_PAUSE)
        finally:
            self._wake_ups.give_back(unsettled)

    def _take(self, answer: ClaimResponse, receipts: list[str]) -> None:
        if answer.task is None or answer.lease_token is None:
            _log.debug("not_claimed", task_id=str(answer.task_id), reason=answer.reason)
            self._wake_ups.done(receipts)
            return
        self._accept(HeldTask(answer, answer.task, answer.lease_token, receipts))


def _task_id(message: Message) -> UUID | None:
    named = message.body.get("task_id") if isinstance(message.body, dict) else None
    try:
        return UUID(named) if isinstance(named, str) else None
    except ValueError:
        return None
