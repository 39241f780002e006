"""Reports the end of an attempt: what to report, sending it, and handling its refusal.

``conclude`` decides the report from the operator's result and the reason it was stopped, without any I/O.
``report_completion`` sends one completion and handles each answer in the one way that is right for every lease
holder:

    accepted                 the task is over for this holder
    Conflict, NotFound       the attempt has been superseded; the report is dropped
    another refusal          a completed attempt becomes a failed one that names the refusal, and isn't retried if
                             another attempt would be refused likewise
    Unavailable              the holder ends before the Dispatcher has answered; the lease runs out

``HeldTaskReporter`` adds what a holder of wake-ups does afterwards: heartbeats end, and the wake-ups are settled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from tracelake.contracts.dispatcher_api import MAX_EVENTS, CompleteRequest, CompleteResponse
from tracelake.contracts.operator_protocol import Finished
from tracelake.domain.errors import Conflict, NotFound, TracelakeError, Unavailable
from tracelake.leases.claim import Load, WakeUps
from tracelake.leases.held_task import Heartbeats, HeldTask, Logger, Stop, sendable

_LASTING = frozenset({"PartitionOverlap"})
"""Refusals by what is committed already, which another attempt of the same scope would meet again."""


class CompletionClient(Protocol):
    """Sends a completion until it is answered; a refusal is the future's exception."""

    def complete(self, completion: CompleteRequest) -> asyncio.Future[CompleteResponse]: ...


@dataclass(frozen=True, slots=True)
class CompletionReport:
    """The completion that was sent last, and the Dispatcher's refusal unless it was accepted."""

    completion: CompleteRequest
    refusal: BaseException | None = None

    @property
    def is_accepted(self) -> bool:
        return self.refusal is None

    @property
    def is_answered(self) -> bool:
        if self.refusal is None:
            return True
        return isinstance(self.refusal, TracelakeError) and not isinstance(self.refusal, Unavailable)


def report_completion(
    client: CompletionClient,
    completion: CompleteRequest,
    log: Logger,
    *,
    as_failure: Callable[[str], CompleteRequest] | None = None,
    superseded_level: int = logging.WARNING,
) -> asyncio.Future[CompletionReport]:
    """Send a completion. ``as_failure`` makes the report of an attempt whose result was refused.

    The result is a future and not a coroutine: short tasks are reported at a high rate, and a callback costs a
    fraction of an asyncio task.
    """
    outcome: asyncio.Future[CompletionReport] = asyncio.get_running_loop().create_future()

    def submit(completion: CompleteRequest) -> None:
        client.complete(completion).add_done_callback(partial(answered, completion))

    def answered(completion: CompleteRequest, answer: asyncio.Future[CompleteResponse]) -> None:
        # The process ends, and so does the caller that waits for the outcome.
        if answer.cancelled():
            outcome.cancel()
            return
        # Asked for in any case: asyncio logs exceptions that were never retrieved.
        refusal = answer.exception()
        if outcome.done():
            return
        match refusal:
            case None:
                outcome.set_result(CompletionReport(completion))
                return
            case Conflict() | NotFound():
                log.log(superseded_level, "report_refused", status=completion.status, reason=refusal.reason)
            case TracelakeError() if (
                as_failure is not None
                # Only once: the refusal of a failure must not be reported as another failure.
                and completion.status == "Completed"
                and not isinstance(refusal, Unavailable)
            ):
                log.warning("outputs_refused", reason=refusal.reason, error=refusal.message)
                failure = as_failure(f"its result was refused ({refusal.reason}): {refusal.message}")
                if refusal.reason in _LASTING:
                    failure = msgspec.structs.replace(failure, retryable=False)
                submit(failure)
                return
            case _:
                log.error("report_lost", status=completion.status, error=str(refusal))
        outcome.set_result(CompletionReport(completion, refusal))

    submit(completion)
    return outcome


class HeldTaskReporter:
    """Reports held tasks and lets go of them once their report is answered."""

    def __init__(
        self, client: CompletionClient, load: Load, heartbeats: Heartbeats, wake_ups: WakeUps
    ) -> None:
        self._client = client
        self._load = load
        self._heartbeats = heartbeats
        self._wake_ups = wake_ups

    def report(self, held: HeldTask, completion: CompleteRequest) -> asyncio.Future[CompletionReport]:
        """Until the report is answered the task is kept alive by heartbeats, like one that runs."""
        # First: a stop that comes from here on changes nothing.
        held.reported = True
        outcome = report_completion(
            self._client, completion, held.log, as_failure=partial(held.completion, "Failed")
        )
        outcome.add_done_callback(partial(self._reported, held))
        return outcome

    def let_go(self, held: HeldTask, *, settled: bool = False) -> None:
        """End the heartbeats and settle the wake-ups.

        A wake-up that came while the task was held may be for its next attempt, so it goes back to the queue: the
        next claim finds out.
        """
        self._heartbeats.let_go(held)
        self._load.reported(held)
        if settled:
            self._wake_ups.done(held.receipts)
        else:
            self._wake_ups.give_back(held.receipts)
        self._wake_ups.give_back(held.later_receipts)

    def _reported(self, held: HeldTask, outcome: asyncio.Future[CompletionReport]) -> None:
        # Cancelled when the holder stops waiting for the answer.
        report = None if outcome.cancelled() else outcome.result()
        accepted = report is not None and report.is_accepted
        if report is not None and accepted:
            held.log.info("attempt_reported", status=report.completion.status)
        self.let_go(held, settled=accepted)


def conclude(held: HeldTask, finished: Finished | None, gone: str) -> CompleteRequest | None:
    """The report of an attempt, or None if the attempt has been superseded and no report is expected.

    ``gone`` says what happened to an operator that ended without finishing.
    """
    if held.stopped is Stop.SUPERSEDED:
        return None
    # Before the result: the Dispatcher has given the task up, also if the operator finished in that moment.
    if held.stopped is Stop.CANCELED:
        return held.completion("Canceled")
    # Before other reasons to stop: the operator was faster than the stop, and its result is as good as any.
    if finished is not None and finished.status == "Completed":
        return _completed(held, finished)
    match held.stopped:
        case Stop.RELEASED | Stop.OUTDATED | Stop.POOL_CHANGED:
            return held.completion("Released")
        case Stop.TIMED_OUT:
            limit = held.payload.timeout_seconds
            return held.completion("Failed", f"timed out: it ran longer than its timeout_seconds, {limit} s")
        case Stop.ENGINE_LOST:
            return held.completion("Failed", "the Spark server that it ran on has ended")
        case _:
            return _failed(held, finished, gone)


def _completed(held: HeldTask, finished: Finished) -> CompleteRequest:
    # Events beyond the limit of a completion were sent before it.
    return CompleteRequest.of(
        held, "Completed", outputs=finished.outputs, events=finished.events[-MAX_EVENTS:]
    )


def _failed(held: HeldTask, finished: Finished | None, gone: str) -> CompleteRequest:
    if finished is None:
        return held.completion("Failed", gone)
    name = held.payload.operator
    if finished.status == "Canceled":
        return held.completion("Failed", f"operator {name} reported Canceled, but the task was not canceled")
    message = sendable(finished.error_message or "").strip()
    return held.completion(
        "Failed", message or f"operator {name} failed without an error message", retryable=finished.retryable
    )
