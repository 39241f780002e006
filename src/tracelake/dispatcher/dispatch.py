"""Claims and completions as routes and runtimes call them: concurrent calls share transactions.

Calls that arrive at once share a transaction, and so its commit. A call that finds no other waiting runs at once
and alone; under load the next transaction takes all calls that have gathered meanwhile. Each call gets its own
answer or its own error; when a whole batch fails for a reason that may be one call's alone, each is tried by
itself. Routes see only the ``Dispatch`` protocol, so that the implementation is free to merge calls; all other
steps are called with ``ctx``.

``until_database_answers`` is for this process's own calls: it repeats a step whose answer was lost in an outage of
the database, as any worker would, because a lost answer must not cost a lease period. ``OwnCompletions`` reports
the attempts that this process runs itself or gives up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse, CompleteRequest, CompleteResponse
from tracelake.dispatcher.steps.claim_task import claim_tasks
from tracelake.dispatcher.steps.complete_task import CompletionAnswer, complete_tasks
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.backoff import Backoff
from tracelake.domain.errors import TracelakeError, Unavailable
from tracelake.leases.held_task import Logger
from tracelake.leases.report import CompletionReport, report_completion
from tracelake.leases.until_answered import is_unavailable, until_answered

Q = TypeVar("Q")
A = TypeVar("A")
PATIENCE_SECONDS = 30.0
_BACKOFF = Backoff(0.1, 2.0)
T = TypeVar("T")


class Dispatch(Protocol):
    @property
    def ctx(self) -> StepContext: ...

    async def claim(self, request: ClaimRequest) -> ClaimResponse: ...

    async def claim_many(self, requests: Sequence[ClaimRequest]) -> list[ClaimResponse]: ...

    async def complete(self, request: CompleteRequest) -> CompleteResponse:
        """Raises the error that refuses the completion."""
        ...

    async def complete_many(
        self, requests: Sequence[CompleteRequest]
    ) -> list[CompleteResponse | TracelakeError]:
        """One answer per request, in order; a refusal is returned and doesn't affect the others."""
        ...


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

    async def _complete(self, requests: Sequence[CompleteRequest]) -> Sequence[CompletionAnswer]:
        return await complete_tasks(self.ctx, requests)


class Coalescer(Generic[Q, A]):
    """Gathers calls into batches. ``run`` answers a batch in order, and a refused call with its error."""

    def __init__(
        self,
        run: Callable[[Sequence[Q]], Awaitable[Sequence[A | TracelakeError]]],
        *,
        max_batch: int = 64,
        max_running: int = 2,
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self._max_running = max_running
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._running: set[asyncio.Task[None]] = set()

    async def submit(self, request: Q) -> A:
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        if len(self._running) < self._max_running:
            self._running.add(asyncio.create_task(self._drain()))
        # A caller that goes away leaves its request in the batch. The call may have committed by then anyway.
        return await future

    async def _drain(self) -> None:
        worker = asyncio.current_task()
        assert worker is not None
        try:
            while self._waiting:
                size = min(len(self._waiting), self._max_batch)
                batch = [self._waiting.popleft() for _ in range(size)]
                await self._answer(batch)
        finally:
            # Here and not in a callback, which runs later: a caller may call again as soon as it has its answer,
            # and must not count on a task that no longer looks at the queue.
            self._running.discard(worker)

    async def _answer(self, batch: Sequence[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._run([request for request, _ in batch])
        # Each would fail the same way, one timeout after the other.
        except Unavailable as error:
            _fail(batch, error)
        except Exception as error:
            # The error may be one request's alone, and its neighbours must not pay for it.
            if len(batch) == 1:
                _fail(batch, error)
            for entry in batch if len(batch) > 1 else ():
                await self._answer([entry])
        # A cancelled drain must still answer, or its callers would wait forever.
        except BaseException as error:
            _fail(batch, error)
            raise
        else:
            for (_, future), answer in zip(batch, answers, strict=True):
                # Its caller was cancelled meanwhile, and a done future takes no result.
                if future.done():
                    continue
                if isinstance(answer, TracelakeError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)


def _fail(batch: Sequence[tuple[Q, asyncio.Future[A]]], error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)


async def until_database_answers(call: Callable[[], Awaitable[T]], *, stopping: Callable[[], bool]) -> T:
    """Raises ``Unavailable`` when the time is over, or at the first failure while the process is stopping."""
    return await until_answered(
        call,
        _BACKOFF,
        until=asyncio.get_running_loop().time() + PATIENCE_SECONDS,
        is_outage=lambda error: is_unavailable(error) and not stopping(),
    )


class OwnCompletions:
    """Reports the end of attempts that this process leased, as every lease holder does."""

    def __init__(self, dispatch: Dispatch, stopping: Callable[[], bool]) -> None:
        self._dispatch = dispatch
        self._stopping = stopping
        self._sending: set[asyncio.Task[CompleteResponse]] = set()

    def complete(self, completion: CompleteRequest) -> asyncio.Future[CompleteResponse]:
        sending = asyncio.create_task(
            until_database_answers(lambda: self._dispatch.complete(completion), stopping=self._stopping)
        )
        # The event loop keeps weak references to tasks only.
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
        return sending

    async def report(
        self,
        completion: CompleteRequest,
        log: Logger,
        *,
        as_failure: Callable[[str], CompleteRequest] | None = None,
    ) -> CompletionReport:
        """Handles and logs a refusal; an error that isn't one is a bug, and is raised."""
        report = await report_completion(self, completion, log, as_failure=as_failure)
        if report.refusal is not None and not isinstance(report.refusal, TracelakeError):
            raise report.refusal
        return report
