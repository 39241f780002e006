"""The end of an attempt, told to the Dispatcher until it is answered, and only then closed in the journal."""

from __future__ import annotations

import structlog

from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import CompleteRequest
from tracelake.domain import errors
from tracelake.worker.dispatcher_client import DispatcherClient
from tracelake.worker.lambda_.completion_shim import failed
from tracelake.worker.lambda_.journal import Fence, Journal

_KILLED = "the invoker ended while the function ran"

_log = structlog.get_logger(__name__)


class Reports:
    def __init__(self, dispatcher: DispatcherClient, journal: Journal) -> None:
        self._dispatcher = dispatcher
        self._journal = journal

    async def tell(self, fence: Fence, task: Invocation, completion: CompleteRequest | None) -> None:
        """Without a completion there is nobody to tell: the task is canceled, or somebody else's."""
        if completion is None or await self._is_answered(completion, task):
            self._close(fence)

    async def tell_dead(self, fence: Fence) -> None:
        completion = CompleteRequest(
            fence.task_id, "Failed", fence.attempt, fence.lease_token, error_message=_KILLED
        )
        if await self._is_answered(completion, None):
            self._close(fence)

    async def _is_answered(self, completion: CompleteRequest, task: Invocation | None) -> bool:
        """A stale fence is an answer: the function spoke for itself, or is too late. So is a refusal of what the
        function returned, which then is its failure."""
        bound = {"task_id": str(completion.task_id), "attempt": completion.attempt}
        try:
            await self._dispatcher.complete(completion)
        except (errors.Conflict, errors.NotFound) as refusal:
            _log.info("completion_dropped", reason=refusal.reason, **bound)
        except errors.Unavailable:
            return False
        except errors.TracelakeError as refusal:
            _log.warning("completion_refused", reason=refusal.reason, error=refusal.message, **bound)
            if task is not None and completion.status == "Completed":
                why = f"what the function returned was refused: {refusal.reason}: {refusal.message}"
                return await self._is_answered(failed(task, why, retryable=False), None)
        return True

    def _close(self, fence: Fence) -> None:
        """If it can't be written, a successor will tell the Dispatcher once more, and be refused."""
        try:
            self._journal.end(fence)
        except OSError as error:
            _log.warning("journal_unusable", task_id=str(fence.task_id), error=str(error))
