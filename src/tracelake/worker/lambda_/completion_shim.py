"""How a function's end becomes its task's end.

A function may complete its task itself; whatever is said here is then too late and refused, which is as it
should be. For one that merely returns:

    nothing, or {}              completed
    {"events": [...]}           completed with exactly these events
    {"outputs": [...]}          completed with these outputs
    anything else               completed; what it was is noted in the attempt's log

An output without storage is nothing but its events, so a function that said nothing about one, neither while it
ran nor in its value, is taken to have done the task's whole scope. An exception, a failed start and a broken
environment fail the attempt; the Dispatcher decides about another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import CompleteRequest, EventIn, Events, OutputIn
from tracelake.worker.lambda_.runtime_api import Broken, Raised, Result, Returned

_SAID = frozenset({"events", "outputs"})
_MAX_MESSAGE = 16 * 1024
_MAX_NOTE = 500
_NO_STORAGE = "none"


class Ending(NamedTuple):
    completion: CompleteRequest
    note: str | None = None


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    events: Events | None = None
    outputs: list[OutputIn] = []


def ending_of(task: Invocation, result: Result, *, emitted: bool) -> Ending:
    """``emitted``: the function sent events of its own while it ran."""
    match result:
        case Returned(value):
            return _returned(task, value, emitted)
        case Raised(kind, message, at_start):
            told = f"{kind}: {message}" if message else kind
            return Ending(failed(task, f"the function could not be started: {told}" if at_start else told))
        case Broken(reason):
            return Ending(failed(task, reason, retryable=result.retryable))


def failed(task: Invocation, message: str, *, retryable: bool = True) -> CompleteRequest:
    return CompleteRequest(
        task.task_id,
        "Failed",
        task.attempt,
        task.lease_token,
        error_message=message[:_MAX_MESSAGE],
        retryable=retryable,
    )


def released(task: Invocation) -> CompleteRequest:
    return CompleteRequest(task.task_id, "Released", task.attempt, task.lease_token)


def _returned(task: Invocation, body: bytes, emitted: bool) -> Ending:
    value = _parse(body)
    if isinstance(value, dict) and value and value.keys() <= _SAID:
        try:
            said = msgspec.convert(value, _Value)
        except msgspec.ValidationError as error:
            why = f"the function's value can't be used: {error}"
            return Ending(failed(task, why, retryable=False))
        return Ending(_completed(task, said, emitted))
    note = None
    if value not in (None, {}):
        shown = body[:_MAX_NOTE].decode("utf-8", "replace")
        note = f"the function returned {shown}{'…' if len(body) > _MAX_NOTE else ''}; nothing follows from it"
    return Ending(_completed(task, _Value(), emitted), note)


def _parse(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body) if body.strip() else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body


def _completed(task: Invocation, said: _Value, emitted: bool) -> CompleteRequest:
    if said.events is None and not emitted:
        named = {output.output_index for output in said.outputs}
        events = list(_own_scope(task, named))
    else:
        events = [_addressed(task, event) for event in said.events or ()]
    return CompleteRequest(
        task.task_id, "Completed", task.attempt, task.lease_token, outputs=said.outputs, events=events
    )


def _addressed(task: Invocation, event: EventIn) -> EventIn:
    """An event that names no dataset can only mean the task's one output."""
    if event.dataset is not None or event.dataset_uuid is not None or len(task.outputs) != 1:
        return event
    [output] = task.outputs
    return msgspec.structs.replace(
        event, dataset_uuid=output.dataset_uuid, dataset_version=output.dataset_version
    )


def _own_scope(task: Invocation, named: set[int]) -> Iterator[EventIn]:
    scope = next((read for read in task.inputs if read.trigger), None)
    for output in task.outputs:
        if scope is None or output.storage != _NO_STORAGE or output.output_index in named:
            continue
        event = EventIn(output.dataset_uuid, output.dataset_version)
        if isinstance(scope.start, int) and isinstance(scope.end, int):
            yield msgspec.structs.replace(event, start=scope.start, end=scope.end)
        elif isinstance(scope.upto, int) and scope.upto >= 0:
            yield msgspec.structs.replace(event, cursor=scope.upto)
