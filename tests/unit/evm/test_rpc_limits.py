"""Limits of an endpoint: the rate that is kept, the batches whose size is learnt, the health that is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.evm.rpc.endpoint import FIRST_BATCH, BatchSize, EndpointHealth, TokenBucket
from tracelake.evm.rpc.errors import ProblemKind, RpcProblem


@given(
    st.floats(0.5, 500),
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 3)), min_size=1, max_size=60),
)
def test_no_more_calls_are_made_than_the_rate_allows(rate: float, asks: list[tuple[int, float]]) -> None:
    bucket = TokenBucket(rate, 0.0)
    most = bucket.most
    assert most is not None
    now, made = 0.0, []
    for calls, pause in asks:
        now += pause
        calls = min(calls, most)
        made.append((now + bucket.take(calls, now), calls))
    for index, (start, _) in enumerate(made):
        for end_index in range(index, len(made)):
            end = made[end_index][0]
            during = sum(calls for at, calls in made[index : end_index + 1])
            assert during <= max(1.0, rate) + rate * (end - start) + 0.01


def test_without_a_rate_nobody_waits_and_a_share_of_a_rate_is_a_smaller_one() -> None:
    assert TokenBucket(None, 0.0).take(10_000, 0.0) == 0
    assert TokenBucket(None, 0.0).most is None
    assert TokenBucket(50 * 0.5, 0.0).most == 25
    assert TokenBucket(0.25, 0.0).most == 1


def test_who_comes_later_waits_longer() -> None:
    bucket = TokenBucket(10, 0.0)
    assert [round(bucket.take(5, 0.0), 3) for _ in range(4)] == [0, 0, 0.5, 1.0]
    assert bucket.wait(5, 1.0) == pytest.approx(0.5)


def test_batches_double_while_all_goes_well_up_to_the_limit() -> None:
    size = BatchSize(100)
    seen = []
    for _ in range(5):
        seen.append(size.size)
        size.went_well(size.size, 0.0)
    assert seen == [FIRST_BATCH, 32, 64, 100, 100]


def test_a_batch_that_is_refused_is_halved_and_grows_slowly_below_what_was_refused() -> None:
    size = BatchSize(1000)
    while size.size < 128:
        size.went_well(size.size, 0.0)
    size.refused(128, 1.0, limit=True)
    assert size.size == 64
    size.went_well(64, 1.0)
    assert size.size == 64
    for _ in range(2000):
        size.went_well(size.size, 2.0)
    assert size.size == 127
    for _ in range(20):
        size.went_well(size.size, 700.0)
    assert size.size > 127


def test_a_small_batch_that_goes_well_says_nothing_and_one_call_is_the_least() -> None:
    size = BatchSize(100)
    size.went_well(3, 0.0)
    assert size.size == FIRST_BATCH
    for _ in range(10):
        size.refused(size.size, 0.0, limit=True)
    assert size.size == 1


def test_suspicion_grows_with_failures_in_a_row_and_ends_with_an_answer() -> None:
    health = EndpointHealth()
    spans = []
    for _ in range(10):
        health.failed(RpcProblem(ProblemKind.SERVER, "HTTP 500"), 0.0)
        spans.append(health.suspicion(0.0))
    assert spans == sorted(spans)
    assert 0 < spans[0] <= 0.5
    assert 10 <= spans[-1] <= 30
    health.answered(0.1, 1, 10)
    assert health.suspicion(0.0) == 0
    assert (health.failures, health.requests, health.last_problem) == (10, 1, "HTTP 500")


def test_a_rest_is_as_long_as_the_endpoint_asks_for_within_reason() -> None:
    health = EndpointHealth()
    health.failed(RpcProblem(ProblemKind.RATE_LIMITED, "429", retry_after=7), 0.0)
    assert health.rest(0.0) == 7
    assert health.suspicion(0.0) == 0
    health.failed(RpcProblem(ProblemKind.RATE_LIMITED, "429", retry_after=100_000), 0.0)
    assert health.rest(0.0) == 60
    unsaid = EndpointHealth()
    for _ in range(20):
        unsaid.failed(RpcProblem(ProblemKind.RATE_LIMITED, "429"), 0.0)
    assert unsaid.rest(0.0) == 8


def test_a_method_that_is_not_there_is_not_asked_for_again_for_a_while() -> None:
    health = EndpointHealth()
    health.has_no("eth_getBlockReceipts", 0.0)
    assert health.lacks("eth_getBlockReceipts", 599.0)
    assert health.missing(599.0) == ["eth_getBlockReceipts"]
    assert not health.lacks("eth_getLogs", 1.0)
    assert not health.lacks("eth_getBlockReceipts", 601.0)


def test_what_concerns_one_call_is_no_fault_of_the_endpoint() -> None:
    health = EndpointHealth()
    for kind in (
        ProblemKind.MISSING,
        ProblemKind.REFUSED,
        ProblemKind.NO_METHOD,
        ProblemKind.TOO_MUCH,
        ProblemKind.BATCH,
    ):
        health.failed(RpcProblem(kind, "x"), 0.0)
    assert (health.failures, health.suspicion(0.0), health.rest(0.0)) == (0, 0, 0)
