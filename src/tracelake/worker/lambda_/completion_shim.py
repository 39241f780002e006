"""Turns the end of a function into the completion of its task.

A function may complete its task itself; the completion made here is then refused as too late, which is intended.
For a function that merely returns:

    nothing, or {}              completed
    {"events": [...]}           completed with exactly these events
    {"outputs": [...]}          completed with these outputs
    anything else               completed; the value is noted in the attempt's log

An output without storage consists of its events alone, so a function that sent none for it, neither while it ran
nor in its value, counts as having done the task's whole scope. An exception, a failed start and a broken
environment fail the attempt; the Dispatcher decides about a retry.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from tracelake.contracts.bundles import Invocation
from tracelake.contracts.dispatcher_api import CompleteRequest, EventIn, Events, OutputIn
from tracelake.worker.lambda_.runtime_api import Broken, Raised, Result, Returned

_RESULT_FIELDS = frozenset({"events", "outputs"})
_MAX_MESSAGE = 16 * 1024
_MAX_NOTE = 500
_NO_STORAGE = "none"


class FunctionEnding(NamedTuple):
    completion: CompleteRequest
    note: str | None = None


class _Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    events: Events | None = None
    outputs: list[OutputIn] = []


def ending_of(task: Invocation, result: Result, *, emitted: bool) -> FunctionEnding:
    """``emitted``: the function sent events of its own while it ran."""
    match result:
        case Returned(value):
            return _returned(task, value, emitted)
        case Raised(kind, message, at_start):
            message = f"{kind}: {message}" if message else kind
            return FunctionEnding(
                failed(task, f"the function could not be started: {message}" if at_start else message)
            )
        case Broken(reason):
            return FunctionEnding(failed(task, reason, retryable=result.retryable))


def failed(task: Invocation, message: str, *, retryable: bool = True) -> CompleteRequest:
    return CompleteRequest.of(task, "Failed", message[:_MAX_MESSAGE], retryable=retryable)


def released(task: Invocation) -> CompleteRequest:
    return CompleteRequest.of(task, "Released")


def _returned(task: Invocation, body: bytes, emitted: bool) -> FunctionEnding:
    value = _parse(body)
    if isinstance(value, dict) and value and value.keys() <= _RESULT_FIELDS:
        try:
            result = msgspec.convert(value, _Value)
        except msgspec.ValidationError as error:
            why = f"the function's value can't be used: {error}"
            return FunctionEnding(failed(task, why, retryable=False))
        return FunctionEnding(_completed(task, result, emitted))
    note = None
    if value not in (None, {}):
        shown = body[:_MAX_NOTE].decode("utf-8", "replace")
        note = f"the function returned {shown}{'…' if len(body) > _MAX_NOTE else ''}; the value is ignored"
    return FunctionEnding(_completed(task, _Value(), emitted), note)


def _parse(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body) if body.strip() else None
    # The function chose these bytes: JSON may be nested deeper than a decoder goes.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body


def _completed(task: Invocation, result: _Value, emitted: bool) -> CompleteRequest:
    if result.events is None and not emitted:
        named = {output.output_index for output in result.outputs}
        events = list(_own_scope(task, named))
    else:
        events = [_addressed(task, event) for event in result.events or ()]
    return CompleteRequest.of(task, "Completed", outputs=result.outputs, events=events)


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
