"""Answers that are made to hurt: too deep, too large, and numbers that no chain has."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import orjson
import pytest

from tests.support.faulty_rpc import FaultyAnswer, FaultyServer
from tracelake.evm.raw_block import BlockMalformed, BlockMismatch, RawBlock, Verify, portions
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.errors import ProblemKind, RpcProblem, RpcUnavailable, problem_of_error
from tracelake.evm.rpc.exchange import MOST_QUANTITY, EndpointResponse, decode, read_quantity
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.verify import check_block

CHAIN = 7
DEEP = "[" * 1000 + "]" * 1000


@contextmanager
def liar(answer: Callable[[str, int], bytes]) -> Iterator[str]:
    """An endpoint that says its chain, and ``answer`` to a method and an id otherwise."""

    def say(body: bytes, _: Any) -> FaultyAnswer:
        asked = orjson.loads(body)
        if isinstance(asked, dict) and asked["method"] == "eth_chainId":
            return FaultyAnswer(orjson.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": hex(CHAIN)}))
        first = asked if isinstance(asked, dict) else asked[0]
        return FaultyAnswer(answer(first["method"], first["id"]))

    with FaultyServer(lambda: None, say) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.stopping.set()
            server.shutdown()
            serving.join()


@pytest.mark.parametrize(
    "text",
    [
        f'{{"id": %d, "result": {"[" * 3000 + "]" * 3000}}}',
        f'{{"id": %d, "error": {DEEP}}}',
        f'{{"id": %d, "error": {{"code": -32000, "message": {DEEP}, "data": {DEEP}}}}}',
        f'[{{"id": %d, "result": {DEEP}}}, {{"id": %d, "result": {DEEP}}}]',
        '{"id": %d, "error": {"code": -32000, "message": "' + "x" * 5_000_000 + '"}}',
    ],
    ids=["deep result", "deep error", "deep message", "deep and double", "long message"],
)
def test_an_answer_that_is_too_deep_or_too_long_is_one_more_failure_of_its_endpoint(text: str) -> None:
    with (
        liar(lambda _, number: text.replace("%d", str(number)).encode()) as url,
        Pool(pool_of(url, deadline_seconds=0.5)) as pool,
        pytest.raises(RpcUnavailable) as refused,
    ):
        pool.call("eth_getBalance", ["0x0", "latest"])
    assert len(refused.value.message) < 1000


def test_how_deep_python_may_recurse_does_not_decide_what_is_believed() -> None:
    deep = f'{{"id": 1, "result": {DEEP}}}'
    twice = EndpointResponse(200, {}, f"[{deep}, {deep}]".encode())
    usual = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(5000)
        [outcome] = decode(twice, [("eth_getBalance", [])], 1)
    finally:
        sys.setrecursionlimit(usual)
    assert isinstance(outcome, RpcProblem)
    assert outcome.kind is ProblemKind.GARBLED


@pytest.mark.parametrize(
    "number",
    [pytest.param("0x" + "f" * 20_000, id="endless"), "0x8000000000000000", "-0x1", 5, None, "0x_1", "0x"],
)
def test_a_head_that_no_chain_can_have_is_not_believed(number: object) -> None:
    block = {"number": number, "hash": "0x" + "00" * 32}
    with (
        liar(lambda _, asked: orjson.dumps({"id": asked, "result": block})) as url,
        Pool(pool_of(url, deadline_seconds=0.5)) as pool,
        pytest.raises(RpcUnavailable, match="invalid latest block"),
    ):
        pool.head()


def test_quantities_are_what_the_database_can_keep() -> None:
    assert [read_quantity(each) for each in ("0x0", "0xFf", hex(MOST_QUANTITY))] == [0, 255, MOST_QUANTITY]
    assert [read_quantity(each) for each in (hex(MOST_QUANTITY + 1), "ff", "0X1", " 0x1", 1, ["0x1"])] == [
        None
    ] * 6


def test_a_message_of_any_size_is_read_as_far_as_it_can_mean_something() -> None:
    problem = problem_of_error("eth_getLogs", {"code": -32000, "message": "block range is too wide " * 10**6})
    assert problem.kind is ProblemKind.TOO_MUCH
    assert len(problem.text) < 300


@pytest.mark.parametrize("field", ["hash", "gasUsed", "transactionsRoot"])
def test_what_is_quoted_of_a_block_is_short(field: str) -> None:
    block = {"number": "0x1", "hash": "0x1", "transactions": [], field: "0x" + "z" * 10**6}
    with pytest.raises((BlockMismatch, BlockMalformed)) as refused:
        check_block(RawBlock(1, block, [], None, "alpha"), Verify.FULL)
    assert len(refused.value.message) < 3000
    assert str(refused.value).startswith("block 1 from alpha: ")


@pytest.mark.parametrize("receipt", [{}, {"logs": None}, {"logs": 5}])
def test_receipts_without_logs_are_left_to_the_decoder_to_refuse(receipt: dict[str, Any]) -> None:
    raw = RawBlock(1, {"transactions": [{}]}, [receipt], None, "alpha")
    assert list(portions([raw])) == [[raw]]
