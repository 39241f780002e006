"""What an answer means: of providers' many words for the same thing, and of batches that come back in pieces."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.evm.rpc.errors import ProblemKind, RpcProblem, kind_of_error, problem_of_error
from tracelake.evm.rpc.exchange import EndpointResponse, RpcCall, decode, encode

LOGS = "eth_getLogs"


@pytest.mark.parametrize(
    ("method", "code", "message", "kind"),
    [
        (
            "eth_getBlockReceipts",
            -32601,
            "the method eth_getBlockReceipts does not exist/is not available",
            ProblemKind.NO_METHOD,
        ),
        ("eth_getBlockReceipts", -32000, "Unsupported method: eth_getBlockReceipts", ProblemKind.NO_METHOD),
        ("trace_block", -32004, "", ProblemKind.NO_METHOD),
        ("trace_block", -32000, "method trace_block is not whitelisted", ProblemKind.NO_METHOD),
        ("eth_call", -32005, "daily request count exceeded, request rate limited", ProblemKind.RATE_LIMITED),
        (
            "eth_call",
            429,
            "Your app has exceeded its compute units per second capacity",
            ProblemKind.RATE_LIMITED,
        ),
        ("eth_call", -32029, "Too Many Requests", ProblemKind.RATE_LIMITED),
        (LOGS, -32005, "query returned more than 10000 results", ProblemKind.TOO_MUCH),
        (
            LOGS,
            -32602,
            "Log response size exceeded. You can make eth_getLogs requests with up to a 2K block range",
            ProblemKind.TOO_MUCH,
        ),
        (LOGS, -32000, "block range is too wide", ProblemKind.TOO_MUCH),
        (LOGS, -32000, "exceed maximum block range: 5000", ProblemKind.TOO_MUCH),
        (LOGS, -32602, "eth_getLogs is limited to a 100 range", ProblemKind.TOO_MUCH),
        (LOGS, -32005, "", ProblemKind.TOO_MUCH),
        (LOGS, -32000, "query timeout exceeded", ProblemKind.TOO_MUCH),
        (LOGS, -32614, "eth_getLogs is limited to 0 - 10 blocks range", ProblemKind.TOO_MUCH),
        (
            "eth_getBlockByNumber",
            -32000,
            "batch limit 100 exceeded (can increase by --rpc.batch.limit)",
            ProblemKind.BATCH,
        ),
        ("eth_getBlockByNumber", -32600, "batch too large", ProblemKind.BATCH),
        ("eth_getBlockReceipts", -32003, "response too large", ProblemKind.BATCH),
        ("eth_getBlockByNumber", -32000, "header not found", ProblemKind.MISSING),
        ("eth_getBlockByNumber", -39001, "unknown block", ProblemKind.MISSING),
        ("eth_getBlockByNumber", -32000, "finalized block not found", ProblemKind.MISSING),
        ("eth_call", 3, "execution reverted", ProblemKind.REFUSED),
        ("eth_call", -32602, "invalid argument 0: hex string without 0x prefix", ProblemKind.REFUSED),
        ("eth_call", -32603, "internal error", ProblemKind.SERVER),
        ("eth_call", -32000, "we are having a bad day", ProblemKind.SERVER),
    ],
)
def test_the_words_of_providers_are_understood(
    method: str, code: int, message: str, kind: ProblemKind
) -> None:
    assert kind_of_error(method, code, message) is kind


def test_an_error_of_any_shape_is_a_problem_on_one_short_line() -> None:
    assert problem_of_error("m", "no").kind is ProblemKind.SERVER
    assert problem_of_error("m", {"code": "x", "message": None}).kind is ProblemKind.SERVER
    long = problem_of_error("m", {"code": 1, "message": "a\nb\x1b[31m" + "c" * 10_000})
    assert len(long.text) < 250
    assert long.text.isprintable()
    waits = {"code": -32005, "message": "rate limit", "data": {"rate": {"backoff_seconds": 7}}}
    assert problem_of_error("m", waits).retry_after == 7


def answer(tree: Any, status: int = 200, **headers: str) -> EndpointResponse:
    body = tree if isinstance(tree, bytes) else orjson.dumps(tree)
    return EndpointResponse(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def calls(count: int) -> list[RpcCall]:
    return [("eth_getBlockByNumber", (hex(number), True)) for number in range(count)]


@given(st.integers(2, 30), st.randoms(), st.data())
def test_a_batch_in_any_order_with_gaps_doubles_and_errors_gives_each_call_its_own(
    count: int, shuffle: random.Random, data: st.DataObject
) -> None:
    kinds = data.draw(
        st.lists(st.sampled_from(["ok", "null", "error", "gone", "twice"]), min_size=count, max_size=count)
    )
    items: list[Any] = [{"jsonrpc": "2.0", "id": 999_999, "result": "of another"}, "nonsense", {"id": None}]
    for index, kind in enumerate(kinds):
        item = {"jsonrpc": "2.0", "id": 700 + index, "result": None if kind == "null" else f"result {index}"}
        if kind == "error":
            item = {"id": 700 + index, "error": {"code": -32603, "message": "internal error"}}
        items += [item, dict(item)] if kind == "twice" else [] if kind == "gone" else [item]
    shuffle.shuffle(items)
    if all(kind == "gone" for kind in kinds):
        return
    for index, (kind, outcome) in enumerate(
        zip(kinds, decode(answer(items), calls(count), 700), strict=True)
    ):
        match kind:
            case "ok" | "twice":
                assert outcome == f"result {index}"
            case "null":
                assert outcome is None
            case "error":
                assert outcome.kind is ProblemKind.SERVER
            case _:
                assert outcome.kind is ProblemKind.GARBLED


def test_two_answers_that_differ_are_none() -> None:
    items = [{"id": 0, "result": "a"}, {"id": 1, "result": "b"}, {"id": 0, "result": "c"}]
    first, second = decode(answer(items), calls(2), 0)
    assert (first.kind, second) == (ProblemKind.GARBLED, "b")


def test_null_and_an_empty_list_and_nothing_at_all_are_three_things() -> None:
    items = [{"id": 0, "result": None}, {"id": 1, "result": []}, {"id": 2}]
    null, empty, nothing = decode(answer(items), calls(3), 0)
    assert null is None
    assert empty == []
    assert nothing.kind is ProblemKind.GARBLED


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (answer(b"slow down", 429, retry_after="3"), ProblemKind.RATE_LIMITED),
        (answer(b"", 413), ProblemKind.BATCH),
        (answer(b"<html>", 502), ProblemKind.SERVER),
        (answer(b"", 504), ProblemKind.TIMEOUT),
        (answer(b"", 401), ProblemKind.LOCKED_OUT),
        (answer(b"", 301), ProblemKind.LOCKED_OUT),
        (answer({"error": {"code": -32600, "message": "batch too large"}}, 400), ProblemKind.BATCH),
        (answer({"error": {"code": -32005, "message": "rate limit"}}, 403), ProblemKind.RATE_LIMITED),
        (answer({"error": {"code": -32600, "message": "invalid request"}}), ProblemKind.BATCH),
        (
            answer([{"id": None, "error": {"code": -32600, "message": "too many requests in batch"}}]),
            ProblemKind.BATCH,
        ),
        (answer({"id": 0, "result": 1}), ProblemKind.GARBLED),
        (answer("text"), ProblemKind.GARBLED),
        (answer(b'[{"id":0,"res'), ProblemKind.GARBLED),
        (answer(b"<!doctype html>"), ProblemKind.GARBLED),
    ],
)
def test_an_answer_that_holds_for_no_call_is_refused_as_a_whole(
    given: EndpointResponse, kind: ProblemKind
) -> None:
    with pytest.raises(RpcProblem) as refused:
        decode(given, calls(2), 0)
    assert refused.value.kind is kind


def test_how_long_to_wait_is_taken_in_seconds_and_bounded() -> None:
    def waits(text: str) -> float | None:
        with pytest.raises(RpcProblem) as refused:
            decode(answer(b"", 429, retry_after=text), calls(1), 0)
        return refused.value.retry_after

    assert waits("3") == 3
    assert waits("86400") == 60
    assert waits("Wed, 21 Oct 2026 07:28:00 GMT") is None


def test_a_single_call_goes_without_a_batch_and_takes_no_answer_to_another() -> None:
    assert orjson.loads(encode(calls(1), 5))["id"] == 5
    assert [item["id"] for item in orjson.loads(encode(calls(2), 5))] == [5, 6]
    assert decode(answer({"id": 5, "result": 1}), calls(1), 5) == [1]
    with pytest.raises(RpcProblem, match="the response id does not match the request"):
        decode(answer({"id": 6, "result": 1}), calls(1), 5)
