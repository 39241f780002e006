"""How an attempt's end is reported: decided purely, from what the operator said and why it was stopped."""

from __future__ import annotations

from tracelake.contracts.dispatcher_api import MAX_EVENTS, CompleteRequest
from tracelake.contracts.operator_protocol import Finished
from tracelake.worker.held_task import HeldTask, Stop, sendable


def conclude(held: HeldTask, finished: Finished | None, gone: str) -> CompleteRequest | None:
    """``gone`` says what happened when the operator didn't finish. None: nobody is waiting for a report."""
    if held.stopped is Stop.SUPERSEDED:
        return None
    if held.stopped is Stop.CANCELED:
        return held.completion("Canceled")
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
    """The events that don't fit in a completion were sent before it."""
    return CompleteRequest(
        held.task_id,
        "Completed",
        held.attempt,
        held.lease_token,
        outputs=finished.outputs,
        events=finished.events[-MAX_EVENTS:],
    )


def _failed(held: HeldTask, finished: Finished | None, gone: str) -> CompleteRequest:
    if finished is None:
        return held.completion("Failed", gone)
    name = held.payload.operator
    if finished.status == "Canceled":
        return held.completion("Failed", f"operator {name} stopped as if canceled, which it wasn't")
    said = sendable(finished.error_message or "").strip()
    return held.completion(
        "Failed", said or f"operator {name} failed without saying why", retryable=finished.retryable
    )
