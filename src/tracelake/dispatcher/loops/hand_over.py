"""One function handed over: leased, offered to an invoker, and ended here if nobody took it.

The lease is taken right before the call and lasts for the function's whole timeout and a margin, so nobody needs
to heartbeat. Then exactly one of these ends our part:

- an invoker took it: the function reports by itself, or the lease runs out;
- it was certainly not taken (nobody listens, no slot came free in time, we are stopping): ``Released``, which costs
  the task no attempt;
- nobody knows (a lost answer): ``Failed``. The function may be running; its own report is refused from then on, and
  the retry is another attempt. The same attempt is never handed over twice.

A crash between the claim and the call leaves a lease that runs out.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from uuid import UUID

import structlog
from prometheus_client import CollectorRegistry, Counter

from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import ClaimRequest, CompleteRequest
from tracelake.dispatcher.api.dispatch import Dispatch
from tracelake.dispatcher.invoker_client import Handed, HandOver, InvokerClient
from tracelake.dispatcher.loops.invokers import Invokers, Turn
from tracelake.dispatcher.loops.until_answered import until_answered
from tracelake.dispatcher.runtimes import INVOKE_MARGIN_SECONDS
from tracelake.domain.errors import TracelakeError, Unavailable

log = structlog.get_logger(__name__)

WORKER_ID = "lambda"
DOOR_SECONDS = INVOKE_MARGIN_SECONDS / 2
"""How long a lease waits for a slot: the other half of the margin is the function's."""
_PAUSES = (0.01, 0.25)


class HandOvers:
    """``look`` brings ``invokers`` up to date: one that left is often followed by another at once."""

    def __init__(
        self,
        dispatch: Dispatch,
        client: InvokerClient,
        invokers: Invokers,
        look: Callable[[], Awaitable[None]],
        registry: CollectorRegistry,
        *,
        door_seconds: float = DOOR_SECONDS,
    ) -> None:
        self._dispatch = dispatch
        self._client = client
        self._invokers = invokers
        self._look = look
        self._door_seconds = door_seconds
        self._stopping = asyncio.Event()
        self._ended = Counter(
            "tracelake_invocations_total",
            "Hand-overs to invokers by outcome.",
            ["outcome"],
            registry=registry,
        )

    def stop(self) -> None:
        """What waits for a slot is released; nothing more is handed over."""
        self._stopping.set()

    async def deliver(self, task_id: UUID, turn: Turn, settled: Callable[[], None]) -> None:
        """``settled`` is called once the task is claimed, or known not to be claimable: its wake-up is spent."""
        try:
            invocation = await self._lease(task_id)
            settled()
            if invocation is not None:
                await self._end(invocation, await self._offer(invocation, turn))
        except TracelakeError as error:
            log.warning("hand-over given up", task_id=str(task_id), reason=error.reason, error=error.message)
        except Exception:
            log.exception("hand-over crashed", task_id=str(task_id))
        finally:
            turn.end()

    async def _lease(self, task_id: UUID) -> Invocation | None:
        request = ClaimRequest(task_id, WORKER_ID, secrets.token_hex(8))
        claimed = await until_answered(lambda: self._dispatch.claim(request), stopping=self._stopping.is_set)
        if claimed.status != "Claimed":
            return None
        assert claimed.task is not None
        assert claimed.lease_token is not None
        assert claimed.lease_expires_at is not None
        assert claimed.capability_token is not None
        return Invocation.of(
            claimed.task, claimed.lease_token, claimed.lease_expires_at, claimed.capability_token
        )

    async def _offer(self, invocation: Invocation, turn: Turn) -> HandOver:
        """Until somebody took it or may have, or nobody did in time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._door_seconds
        pause, longest = _PAUSES
        while True:
            if self._stopping.is_set():
                return HandOver(Handed.FULL, "the Dispatcher was stopped before an invoker took it")
            handed = await self._ask(turn, invocation)
            if handed.outcome not in (Handed.FULL, Handed.AWAY):
                return handed
            other = self._invokers.choose_other(turn.invoker, loop.time())
            if other is None and handed.outcome is Handed.AWAY:
                with suppress(Unavailable):
                    await self._look()
                other = self._invokers.choose_other(turn.invoker, loop.time())
            if other is not None:
                turn.move(other)
            elif handed.outcome is Handed.AWAY or loop.time() + pause > until:
                return handed
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._stopping.wait()
                pause = min(longest, pause * 2)

    async def _ask(self, turn: Turn, invocation: Invocation) -> HandOver:
        invoker = turn.invoker
        try:
            handed = await self._client.invoke(invoker.url, invocation)
        except asyncio.CancelledError:
            # Stopping can wait no longer, and the lease must not be left to run out.
            handed = HandOver(Handed.UNKNOWN, "the Dispatcher was stopped before the invoker answered")
        match handed.outcome:
            case Handed.ACCEPTED | Handed.REJECTED:
                invoker.answered()
            case Handed.FULL:
                invoker.had_no_slot()
            case Handed.AWAY | Handed.UNKNOWN:
                invoker.is_away(asyncio.get_running_loop().time(), handed.detail)
        return handed

    async def _end(self, invocation: Invocation, handed: HandOver) -> None:
        self._ended.labels(handed.outcome.value).inc()
        bound = log.bind(task_id=str(invocation.task_id), attempt=invocation.attempt)
        fence = (invocation.attempt, invocation.lease_token)
        match handed.outcome:
            case Handed.ACCEPTED:
                bound.info("function invoked", job=f"{invocation.job.dag_name}/{invocation.job.name}")
                return
            case Handed.FULL | Handed.AWAY:
                over = CompleteRequest(invocation.task_id, "Released", *fence, error_message=handed.detail)
            case Handed.REJECTED:
                over = CompleteRequest(invocation.task_id, "Failed", *fence, error_message=handed.detail)
            case Handed.UNKNOWN:
                why = f"the invocation's outcome is unknown: {handed.detail}"
                over = CompleteRequest(invocation.task_id, "Failed", *fence, error_message=why)
        bound.warning("function not invoked", outcome=handed.outcome.value, detail=handed.detail)
        await until_answered(lambda: self._dispatch.complete(over), stopping=self._stopping.is_set)
