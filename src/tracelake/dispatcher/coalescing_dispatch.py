"""The hot steps as the routes call them: concurrent claims and completions share transactions."""

from __future__ import annotations

from collections.abc import Sequence

from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse, CompleteRequest, CompleteResponse
from tracelake.dispatcher.coalesce import Coalescer
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.complete_task import Answer, complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.errors import TracelakeError


class CoalescingDispatch:
    def __init__(self, ctx: StepContext) -> None:
        self.ctx = ctx
        self._claims = Coalescer[ClaimRequest, ClaimResponse](self._claim)
        self._completions = Coalescer[CompleteRequest, CompleteResponse](self._complete)

    async def claim(self, request: ClaimRequest) -> ClaimResponse:
        return await self._claims.submit(request)

    async def claim_many(self, requests: Sequence[ClaimRequest]) -> list[ClaimResponse]:
        return await claim_tasks(self.ctx, requests)

    async def complete(self, request: CompleteRequest) -> CompleteResponse:
        return await self._completions.submit(request)

    async def complete_many(
        self, requests: Sequence[CompleteRequest]
    ) -> list[CompleteResponse | TracelakeError]:
        return await complete_tasks(self.ctx, requests)

    async def _claim(self, requests: Sequence[ClaimRequest]) -> Sequence[ClaimResponse]:
        return await claim_tasks(self.ctx, requests)

    async def _complete(self, requests: Sequence[CompleteRequest]) -> Sequence[Answer]:
        return await complete_tasks(self.ctx, requests)
