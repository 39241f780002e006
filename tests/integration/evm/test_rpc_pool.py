"""The pool against nodes: what it answers, whom it asks, what it learns, and that it ends when it is closed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import pytest

from tests.support.faulty_rpc import Fault, FaultyRpc
from tracelake.domain.errors import Invalid
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import RunningChain, running
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.raw_block import Verify
from tracelake.evm.rpc.blocks import Head
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.errors import BlockNotFound, RpcRefused, RpcUnavailable
from tracelake.evm.rpc.pool import Pool

HEAD = 200
BLOCK = "eth_getBlockByNumber"
RECEIPTS = "eth_getBlockReceipts"


@pytest.fixture(scope="module")
def node() -> Iterator[RunningChain]:
    with running(DevChain(seed=3, blocks=HEAD)) as running_chain:
        yield running_chain


@pytest.fixture
def faulty(node: RunningChain) -> Iterator[FaultyRpc]:
    with FaultyRpc(node.url) as server:
        yield server


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rpc-")] == []


def test_what_a_node_says_is_what_the_pool_says(node: RunningChain) -> None:
    with Pool(pool_of(node.url, chain_id=node.chain.chain_id)) as pool:
        head = pool.head()
        name = node.url.removeprefix("http://")
        assert pool.chain_id() == node.chain.chain_id
        newest = pool.header(HEAD)
        assert newest is not None
        assert head == Head(HEAD, newest["hash"], name)
        assert (pool.finalized(), pool.safe()) == (node.chain.finalized, node.chain.safe)
        assert pool.header(head.hash) == pool.header(HEAD)
        assert pool.header(HEAD + 1) is None
        assert pool.header("0x" + "12" * 32) is None
        assert pool.call("eth_blockNumber") == hex(HEAD)
        asked = [(BLOCK, (hex(number), False)) for number in range(150)]
        assert [int(each["number"], 16) for each in pool.batch(asked)] == list(range(150))


def test_a_chain_without_finality_has_no_final_block(faulty: FaultyRpc) -> None:
    for fault, value in (
        (Fault.NULL, None),
        (Fault.ITEM_ERROR, {"code": -32000, "message": "finalized block not found"}),
        (Fault.ITEM_ERROR, {"code": -32602, "message": "unknown block tag"}),
    ):
        faulty.honest()
        faulty.lie(fault, method=BLOCK, value=value)
        with Pool(pool_of(faulty.url)) as pool:
            assert (pool.finalized(), pool.safe()) == (None, None)
    faulty.honest()
    faulty.lie(Fault.SERVER_ERROR, method=BLOCK)
    with (
        Pool(pool_of(faulty.url, deadline_seconds=0.5)) as pool,
        pytest.raises(RpcUnavailable, match="HTTP 500"),
    ):
        pool.finalized()


@pytest.mark.parametrize("blocks", [range(0), range(1), range(7, 8), range(190, 201), range(201)])
def test_ranges_of_every_length_come_whole_and_in_order(node: RunningChain, blocks: range) -> None:
    with Pool(pool_of(node.url)) as pool:
        got = list(fetch_blocks(pool, blocks, receipts=True))
    assert [raw.number for raw in got] == list(blocks)
    for raw in got:
        sealed = node.chain.block(raw.number)
        assert sealed is not None
        assert raw.block["hash"] == sealed.hash
        assert raw.receipts is not None
        assert [each["transactionHash"] for each in raw.receipts] == [
            each["hash"] for each in raw.block["transactions"]
        ]
        assert raw.traces is None


def test_only_what_is_asked_for_is_fetched(faulty: FaultyRpc) -> None:
    with Pool(pool_of(faulty.url)) as pool:
        bare = list(fetch_blocks(pool, range(10), receipts=False))
        assert all(raw.receipts is None and raw.traces is None for raw in bare)
        assert (faulty.calls(RECEIPTS), faulty.calls("trace_block")) == (0, 0)
        traced = list(fetch_blocks(pool, range(10), receipts=False, traces=True))
        assert all(raw.receipts is None and raw.traces is not None for raw in traced)


@pytest.mark.parametrize("blocks", [range(9, 5, -1), range(0, 10, 2), range(-3, 5)])
def test_a_range_that_is_none_is_refused_at_once(node: RunningChain, blocks: range) -> None:
    with Pool(pool_of(node.url)) as pool, pytest.raises(Invalid, match="upwards, one by one"):
        fetch_blocks(pool, blocks, receipts=True)


def test_a_reader_that_waits_is_not_overrun(faulty: FaultyRpc) -> None:
    with Pool(pool_of(faulty.url, max_concurrency=2)) as pool:
        reading = fetch_blocks(pool, range(HEAD + 1), receipts=False, verify=Verify.OFF)
        seen = [raw.number for raw in islice(reading, 3)]
        asked = faulty.calls(BLOCK)
        assert seen == [0, 1, 2]
        assert asked <= 100
        assert [raw.number for raw in reading] == list(range(3, HEAD + 1))
        assert faulty.calls(BLOCK) == HEAD + 1


def test_large_blocks_are_fetched_less_far_ahead() -> None:
    dense = DevChain(seed=5, blocks=24, transactions_per_block=20, logs_per_transaction=50, steady=True)
    with running(dense) as node, FaultyRpc(node.url) as faulty, Pool(pool_of(faulty.url)) as pool:
        reading = fetch_blocks(pool, range(1, 25), receipts=True, verify=Verify.OFF)
        seen = [raw.number for raw in islice(reading, 5)]
        assert seen == [1, 2, 3, 4, 5]
        assert faulty.calls(RECEIPTS) <= 18
        assert [raw.number for raw in reading] == list(range(6, 25))


def test_a_reader_that_stops_leaves_the_pool_as_it_was(node: RunningChain) -> None:
    with Pool(pool_of(node.url)) as pool:
        reading = fetch_blocks(pool, range(HEAD + 1), receipts=True)
        next(reading)
        reading.close()
        assert len(list(fetch_blocks(pool, range(20), receipts=True))) == 20


def test_the_work_is_spread_over_the_endpoints(node: RunningChain) -> None:
    with FaultyRpc(node.url) as one, FaultyRpc(node.url) as other, Pool(pool_of(one.url, other.url)) as pool:
        pool.chain_id()
        list(fetch_blocks(pool, range(HEAD + 1), receipts=True))
        assert one.calls(BLOCK) + other.calls(BLOCK) == HEAD + 1
        assert min(one.calls(BLOCK), other.calls(BLOCK)) > 0


def test_the_size_of_batches_is_learnt_and_kept(faulty: FaultyRpc) -> None:
    limit = faulty.lie(Fault.MAX_BATCH, value=10)
    with Pool(pool_of(faulty.url)) as pool:
        list(fetch_blocks(pool, range(100), receipts=True))
        refused = limit.applied
        assert 1 <= refused <= 10
        assert pool.stats()[0].batch <= 10
        list(fetch_blocks(pool, range(100), receipts=True))
        assert limit.applied == refused


def test_receipts_are_read_one_by_one_where_there_is_no_other_way(
    faulty: FaultyRpc, node: RunningChain
) -> None:
    lacking = faulty.lie(Fault.NO_METHOD, method=RECEIPTS)
    with Pool(pool_of(faulty.url)) as pool:
        got = list(fetch_blocks(pool, range(60), receipts=True))
        assert pool.stats()[0].missing_methods == (RECEIPTS,)
    transactions = sum(len(raw.block["transactions"]) for raw in got)
    assert faulty.calls("eth_getTransactionReceipt") == transactions
    assert lacking.applied < 60
    with Pool(pool_of(faulty.url, node.url)) as pool:
        pool.chain_id()
        assert [raw.receipts for raw in fetch_blocks(pool, range(60), receipts=True)] == [
            raw.receipts for raw in got
        ]


def test_a_rest_that_an_endpoint_asks_for_is_kept(faulty: FaultyRpc) -> None:
    with Pool(pool_of(faulty.url)) as pool:
        pool.chain_id()
        before = faulty.requests
        faulty.lie(Fault.TOO_MANY_REQUESTS, times=1, value=1)
        assert pool.call("eth_blockNumber") == hex(HEAD)
        assert faulty.requests - before == 2
        assert pool.stats()[0].rate_limited == 1


def test_waiting_for_an_own_limit_is_no_failure(faulty: FaultyRpc) -> None:
    limits = {"requests_per_second": 40, "max_concurrency": 2, "deadline_seconds": 0.5}
    with Pool(pool_of(faulty.url, **limits)) as pool:
        got = list(fetch_blocks(pool, range(50), receipts=True))
        assert [raw.number for raw in got] == list(range(50))
        assert pool.stats()[0].rate_limited == 0


def test_a_lagging_endpoint_is_told_from_a_chain_that_has_no_such_block(
    faulty: FaultyRpc, node: RunningChain
) -> None:
    faulty.lie(Fault.LAG, value=5)
    with Pool(pool_of(faulty.url, node.url)) as pool:
        assert pool.head().number == HEAD
        assert pool.header(HEAD) is not None
        seen = pool.headers_by_endpoint(HEAD)
        assert seen[faulty.name] is None
        assert seen[node.url.removeprefix("http://")] == pool.header(HEAD)
        assert pool.headers_by_endpoint(HEAD + 1) == dict.fromkeys(seen)
        assert {each.name: each.head for each in pool.stats()}[faulty.name] == HEAD - 5


def test_none_is_not_said_for_endpoints_that_say_nothing(faulty: FaultyRpc) -> None:
    faulty.lie(Fault.SERVER_ERROR, method=BLOCK)
    with Pool(pool_of(faulty.url, deadline_seconds=0.5)) as pool:
        with pytest.raises(RpcUnavailable, match=f"{faulty.name}: HTTP 500"):
            pool.header(5)
        with pytest.raises(RpcUnavailable, match=f"{faulty.name}: HTTP 500"):
            pool.headers_by_endpoint(5)
        with pytest.raises(RpcUnavailable, match=f"{faulty.name}: HTTP 500"):
            pool.head()


def test_the_head_does_not_wait_for_an_endpoint_that_hangs(faulty: FaultyRpc, node: RunningChain) -> None:
    with Pool(pool_of(faulty.url, node.url)) as pool:
        pool.chain_id()
        faulty.lie(Fault.HANG)
        for _ in range(20):
            assert pool.head().endpoint == node.url.removeprefix("http://")
        assert faulty.calls(BLOCK) <= 1


def test_without_a_chain_id_in_the_configuration_most_of_them_decide(node: RunningChain) -> None:
    with FaultyRpc(node.url) as one, FaultyRpc(node.url) as liar:
        liar.lie(Fault.OTHER_CHAIN, value=5)
        with Pool(pool_of(liar.url, one.url, node.url)) as pool:
            assert pool.chain_id() == node.chain.chain_id
            assert [each.state for each in pool.stats()] == ["left out", "ok", "ok"]


def test_a_question_that_is_refused_by_all_is_not_worth_asking_again(node: RunningChain) -> None:
    with Pool(pool_of(node.url)) as pool:
        with pytest.raises(RpcRefused, match="eth_noSuchThing"):
            pool.call("eth_noSuchThing")
        with pytest.raises(RpcRefused, match=node.url.removeprefix("http://")):
            pool.call(BLOCK, ["no block", False])


def test_logs_by_address_and_topic_are_those_of_the_receipts(node: RunningChain) -> None:
    with Pool(pool_of(node.url)) as pool:
        blocks = list(fetch_blocks(pool, range(50), receipts=True))
        every = [log for raw in blocks for receipt in raw.receipts or [] for log in receipt["logs"]]
        assert pool.logs(0, 49) == every
        one = every[0]
        assert pool.logs(0, 49, address=one["address"]) == [
            log for log in every if log["address"] == one["address"]
        ]
        assert pool.logs(0, 49, topics=[one["topics"][0]]) == [
            log for log in every if log["topics"][:1] == one["topics"][:1]
        ]
        with pytest.raises(Invalid, match="no range"):
            pool.logs(5, 4)


def test_no_key_is_shown_whatever_an_endpoint_says(faulty: FaultyRpc) -> None:
    key = "SECRET-KEY-0001"
    faulty.lie(
        Fault.ITEM_ERROR, value={"code": -32603, "message": f"the key {key} at /v2/{key} has a problem"}
    )
    config = pool_of(f"{faulty.url}/v2/{key}", headers={"X-Key": f"Bearer {key}2"}, deadline_seconds=0.3)
    with Pool(config) as pool:
        for ask in (
            pool.chain_id,
            pool.head,
            lambda: pool.call("eth_call"),
            lambda: pool.fetch([1], receipts=True),
        ):
            with pytest.raises(RpcUnavailable) as failed:
                ask()
            assert "has a problem" in failed.value.message
            assert key not in f"{failed.value!r}{failed.value.problems}"
        assert key not in repr(pool.stats())


def test_closing_ends_what_waits(node: RunningChain) -> None:
    with FaultyRpc(node.url) as faulty:
        pool = Pool(pool_of(faulty.url))
        pool.chain_id()
        hanging = faulty.lie(Fault.HANG)
        with ThreadPoolExecutor(2) as threads:
            waiting = [
                threads.submit(pool.call, "eth_blockNumber"),
                threads.submit(lambda: list(fetch_blocks(pool, range(50), receipts=True))),
            ]
            while hanging.applied < 2:
                threading.Event().wait(0.001)
            pool.close()
            for each in waiting:
                with pytest.raises(RpcUnavailable, match="closed"):
                    each.result()
        with pytest.raises(RpcUnavailable, match="closed"):
            pool.call("eth_blockNumber")


def test_a_pool_is_used_from_many_threads_within_an_endpoints_limit(node: RunningChain) -> None:
    at_once, most, lock = 0, 0, threading.Lock()
    gate = threading.Semaphore(0)

    def slow(params: list[Any]) -> str:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        gate.acquire(timeout=0.02)
        with lock:
            at_once -= 1
        return params[0]

    with (
        FaultyRpc({"eth_chainId": "0x1", "echo": slow}) as server,
        Pool(pool_of(server.url, max_concurrency=3)) as pool,
        ThreadPoolExecutor(12) as threads,
    ):
        asked = [hex(number) for number in range(40)]
        assert list(threads.map(lambda each: pool.call("echo", [each]), asked)) == asked
    assert most == 3


def test_an_endpoint_that_is_started_again_is_found_again(node: RunningChain) -> None:
    with FaultyRpc(node.url) as faulty, Pool(pool_of(faulty.url)) as pool:
        assert pool.call("eth_blockNumber") == hex(HEAD)
        faulty.lie(Fault.CLOSE, times=3)
        assert pool.call("eth_blockNumber") == hex(HEAD)


def test_errors_travel_between_processes() -> None:
    for error in (
        RpcUnavailable("block 5", {"alpha": "HTTP 500"}),
        BlockNotFound(5, "the newest block is 4, as alpha says"),
        RpcRefused("eth_call", "alpha", -32602, "no"),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("share", [0, -1, 1.5])
def test_a_share_is_a_part_of_the_whole(share: float) -> None:
    with pytest.raises(ValueError, match="share"):
        Pool(pool_of("http://127.0.0.1:1"), share=share)
