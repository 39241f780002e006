"""What routes call for the hot steps.

Claims and completions that arrive together may share a transaction, so routes reach them through a facade
whose implementation is free to merge; everything else is a step called with ``ctx``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse, CompleteRequest, CompleteResponse
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.complete_task import complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import TracelakeError


class Dispatch(Protocol):
    @property
    def ctx(self) -> StepContext: ...

    async def claim(self, request: ClaimRequest) -> ClaimResponse: ...

    async def claim_many(self, requests: Sequence[ClaimRequest]) -> list[ClaimResponse]: ...

    async def complete(self, request: CompleteRequest) -> CompleteResponse:
        """Raises what refuses the completion."""
        ...

    async def complete_many(
        self, requests: Sequence[CompleteRequest]
    ) -> list[CompleteResponse | TracelakeError]:
        """One answer per request, in order; a refusal is returned and spoils nothing else."""
        ...


class DirectDispatch:
    """Each call is a transaction of its own."""

    def __init__(self, ctx: StepContext) -> None:
        self.ctx = ctx

    async def claim(self, request: ClaimRequest) -> ClaimResponse:
        return (await claim_tasks(self.ctx, [request]))[0]

    async def claim_many(self, requests: Sequence[ClaimRequest]) -> list[ClaimResponse]:
        return await claim_tasks(self.ctx, requests)

    async def complete(self, request: CompleteRequest) -> CompleteResponse:
        answer = (await complete_tasks(self.ctx, [request]))[0]
        if isinstance(answer, TracelakeError):
            raise answer
        return answer

    async def complete_many(
        self, requests: Sequence[CompleteRequest]
    ) -> list[CompleteResponse | TracelakeError]:
        return await complete_tasks(self.ctx, requests)
