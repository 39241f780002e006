"""The Runtime API of one environment, spoken to directly: what a runtime may say, and what ends it."""

from __future__ import annotations

import asyncio
import json

import pytest

from tracelake.serving.small_http import ServedRequest, ServedResponse
from tracelake.worker.lambda_.runtime_api import (
    MAX_VALUE_BYTES,
    Broken,
    Raised,
    Returned,
    RuntimeApi,
    RuntimeCall,
)

CALL = RuntimeCall(b'{"a":1}', deadline_ms=1234, arn="arn:x", trace_id="Root=1")


async def ask(api: RuntimeApi, method: str, place: str, body: bytes = b"") -> ServedResponse:
    return await api.handle(ServedRequest(method, f"/2018-06-01/runtime/{place}", "", {}, body))


async def test_an_invocation_is_handed_out_and_its_value_comes_back() -> None:
    api = RuntimeApi()
    result = asyncio.create_task(api.invoke(CALL))
    answer = await ask(api, "GET", "invocation/next")
    assert (answer.status, answer.body) == (200, b'{"a":1}')
    assert answer.headers["Lambda-Runtime-Aws-Request-Id"] == CALL.request_id
    assert answer.headers["Lambda-Runtime-Deadline-Ms"] == "1234"
    assert answer.headers["Lambda-Runtime-Invoked-Function-Arn"] == "arn:x"
    assert answer.headers["Lambda-Runtime-Trace-Id"] == "Root=1"
    assert (await ask(api, "POST", f"invocation/{CALL.request_id}/response", b"42")).status == 202
    assert await result == Returned(b"42")
    assert api.healthy


async def test_next_waits_until_there_is_an_invocation() -> None:
    api = RuntimeApi()
    waiting = asyncio.create_task(ask(api, "GET", "invocation/next"))
    assert await api.until_asked(10)
    result = asyncio.create_task(api.invoke(CALL))
    assert (await waiting).status == 200
    api.end("over")
    assert await result == Broken("over")


async def test_an_error_is_told_with_its_type_and_message() -> None:
    api = RuntimeApi()
    result = asyncio.create_task(api.invoke(CALL))
    await ask(api, "GET", "invocation/next")
    report = json.dumps({"errorType": "ValueError", "errorMessage": "no"}).encode()
    assert (await ask(api, "POST", f"invocation/{CALL.request_id}/error", report)).status == 202
    assert await result == Raised("ValueError", "no")


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"errorMessage": 1}', b"\xff", b"[" * 9_999], ids=range(6)
)
async def test_an_error_report_that_makes_no_sense_is_an_error_all_the_same(body: bytes) -> None:
    api = RuntimeApi()
    result = asyncio.create_task(api.invoke(CALL))
    await ask(api, "GET", "invocation/next")
    await ask(api, "POST", f"invocation/{CALL.request_id}/error", body)
    assert isinstance(await result, Raised)


async def test_a_failed_start_ends_the_invocation_that_waits_and_any_later_one() -> None:
    api = RuntimeApi()
    result = asyncio.create_task(api.invoke(CALL))
    await asyncio.sleep(0)
    assert (await ask(api, "POST", "init/error", b'{"errorType": "ImportError"}')).status == 202
    assert await result == Raised("ImportError", "", at_start=True)
    assert await api.invoke(CALL) == Raised("ImportError", "", at_start=True)
    assert not api.healthy


async def test_an_answer_for_another_invocation_changes_nothing() -> None:
    api = RuntimeApi()
    result = asyncio.create_task(api.invoke(CALL))
    await ask(api, "GET", "invocation/next")
    assert (await ask(api, "POST", "invocation/another/response", b"1")).status == 400
    assert not result.done()
    await ask(api, "POST", f"invocation/{CALL.request_id}/response", b"2")
    assert await result == Returned(b"2")
    assert (await ask(api, "POST", f"invocation/{CALL.request_id}/response", b"3")).status == 400


async def test_asking_for_more_before_answering_ends_the_invocation() -> None:
    api = RuntimeApi()
    result = asyncio.create_task(api.invoke(CALL))
    await ask(api, "GET", "invocation/next")
    again = asyncio.create_task(ask(api, "GET", "invocation/next"))
    ended = await result
    assert isinstance(ended, Broken)
    assert ended.started
    assert not api.healthy
    api.end("over")
    assert (await again).status == 403


async def test_only_one_may_wait_for_the_next_invocation() -> None:
    api = RuntimeApi()
    first = asyncio.create_task(ask(api, "GET", "invocation/next"))
    assert await api.until_asked(10)
    assert (await ask(api, "GET", "invocation/next")).status == 403
    api.end("over")
    assert (await first).status == 403


async def test_a_runtime_that_hangs_up_while_it_waits_may_ask_again() -> None:
    api = RuntimeApi()
    first = asyncio.create_task(ask(api, "GET", "invocation/next"))
    assert await api.until_asked(10)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(ask(api, "GET", "invocation/next"))
    result = asyncio.create_task(api.invoke(CALL))
    assert (await second).status == 200
    await ask(api, "POST", f"invocation/{CALL.request_id}/response", b"1")
    assert await result == Returned(b"1")


async def test_a_value_that_is_too_large_fails_for_good() -> None:
    api = RuntimeApi()
    result = asyncio.create_task(api.invoke(CALL))
    await ask(api, "GET", "invocation/next")
    value = b"1" * (MAX_VALUE_BYTES + 1)
    assert (await ask(api, "POST", f"invocation/{CALL.request_id}/response", value)).status == 413
    ended = await result
    assert isinstance(ended, Broken)
    assert not ended.retryable


async def test_an_environment_that_ends_before_it_asked_never_started_the_invocation() -> None:
    api = RuntimeApi()
    result = asyncio.create_task(api.invoke(CALL))
    await asyncio.sleep(0)
    api.end("gone")
    assert await result == Broken("gone", started=False)
    assert await api.invoke(CALL) == Broken("gone", started=False)


@pytest.mark.parametrize(
    ("method", "place"),
    [("POST", "invocation/next"), ("GET", "init/error"), ("GET", "restore/next"), ("GET", "")],
)
async def test_what_the_runtime_api_does_not_have_is_not_found(method: str, place: str) -> None:
    assert (await ask(RuntimeApi(), method, place)).status == 404
