"""What a function's end means for its task."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tests.support.functions import invocation
from tracelake.contracts.dispatcher_api import PayloadInput
from tracelake.worker.lambda_.completion_shim import FunctionEnding, ending_of
from tracelake.worker.lambda_.runtime_api import Broken, Raised, Returned

TASK = invocation(b"some bundle")
[OUTPUT] = TASK.outputs


def returned(value: Any, *, emitted: bool = False) -> FunctionEnding:
    return ending_of(TASK, Returned(json.dumps(value).encode()), emitted=emitted)


def scopes(ending: FunctionEnding) -> list[tuple[Any, ...]]:
    return [(event.start, event.end, event.cursor) for event in ending.completion.events]


@pytest.mark.parametrize("value", [None, {}])
def test_a_function_that_returns_nothing_has_done_its_whole_scope(value: Any) -> None:
    ending = returned(value)
    assert (ending.completion.status, ending.note, scopes(ending)) == ("Completed", None, [(0, 9, None)])
    assert ending.completion.lease_token == TASK.lease_token


def test_a_function_that_sent_its_own_events_needs_no_more_of_them() -> None:
    assert scopes(returned(None, emitted=True)) == []


def test_a_per_update_task_is_announced_up_to_where_it_read() -> None:
    read = TASK.inputs[0]
    moved = PayloadInput(0, read.dataset_uuid, read.dataset_version, 0, None, "none", after=3, upto=8)
    ending = ending_of(msgspec.structs.replace(TASK, inputs=[moved]), Returned(b"null"), emitted=False)
    assert scopes(ending) == [(None, None, 8)]


def test_an_output_with_storage_is_never_announced_by_itself() -> None:
    stored = msgspec.structs.replace(OUTPUT, storage="postgres")
    ending = ending_of(msgspec.structs.replace(TASK, outputs=[stored]), Returned(b""), emitted=False)
    assert scopes(ending) == []


def test_returned_events_are_the_tasks_events_and_mean_its_only_output() -> None:
    ending = returned({"events": [{"start": 0, "end": 4}, {"cursor": 7}]})
    assert scopes(ending) == [(0, 4, None), (None, None, 7)]
    assert {event.dataset_uuid for event in ending.completion.events} == {OUTPUT.dataset_uuid}
    assert scopes(returned({"events": []})) == []


def test_returned_outputs_are_the_tasks_outputs() -> None:
    ending = returned({"outputs": [{"output_index": 0, "start": 0, "end": 9, "row_count": 0}]})
    assert [output.output_index for output in ending.completion.outputs] == [0]
    assert scopes(ending) == []


@pytest.mark.parametrize("value", ["text", 3, [1], True, {"events": [], "more": 1}, {"statusCode": 200}])
def test_any_other_value_completes_the_task_and_is_noted(value: Any) -> None:
    ending = returned(value)
    assert (ending.completion.status, scopes(ending)) == ("Completed", [(0, 9, None)])
    assert json.dumps(value) in (ending.note or "")


@pytest.mark.parametrize("body", [b"not json", b"\xff\x00", b"[" * 100_000], ids=["text", "bytes", "deep"])
def test_a_value_that_is_no_json_completes_the_task_and_is_noted(body: bytes) -> None:
    ending = ending_of(TASK, Returned(body), emitted=False)
    assert ending.completion.status == "Completed"
    assert len(ending.note or "") in range(1, 1000)


@pytest.mark.parametrize("value", [{"events": 3}, {"events": [{"cursor": -1}]}, {"outputs": [{"x": 1}]}])
def test_events_and_outputs_that_make_no_sense_fail_the_task_for_good(value: Any) -> None:
    completion = returned(value).completion
    assert (completion.status, completion.retryable) == ("Failed", False)
    assert "can't be used" in (completion.error_message or "")


def test_errors_fail_the_attempt_and_may_be_tried_again() -> None:
    for result, message in (
        (Raised("ValueError", "no"), "ValueError: no"),
        (Raised("ValueError", ""), "ValueError"),
        (Raised("ImportError", "x", at_start=True), "the function could not be started: ImportError: x"),
        (Broken("gone"), "gone"),
    ):
        completion = ending_of(TASK, result, emitted=False).completion
        assert (completion.status, completion.retryable) == ("Failed", True)
        assert completion.error_message == message


def test_an_endless_error_message_is_cut() -> None:
    completion = ending_of(TASK, Raised("E", "x" * 1_000_000), emitted=False).completion
    assert len(completion.error_message or "") <= 64 * 1024
