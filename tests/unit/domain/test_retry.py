"""Backoff: ``min(max, base·2^n)`` with jitter, until the attempts are used up."""

from __future__ import annotations

from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.entropy import Entropy
from tracelake.domain.task import RetryPolicy

bases = st.floats(0, 1000)


@given(bases, bases, st.integers(1, 10_000), st.integers(0))
def test_the_delay_lies_within_its_jitter_around_the_nominal_one(
    base: float, more: float, failures: int, seed: int
) -> None:
    policy = RetryPolicy(None, base, base + more)
    nominal = min(base + more, base * 2 ** min(failures - 1, 62))
    delay = policy.delay_after(failures, Entropy(seed).jitter())
    assert delay is not None
    slack = timedelta(microseconds=1)
    assert timedelta(seconds=0.5 * nominal) - slack <= delay <= timedelta(seconds=1.5 * nominal) + slack


@given(st.integers(1, 100), st.integers(1, 200))
def test_it_gives_up_exactly_when_the_attempts_are_used_up(limit: int, failures: int) -> None:
    delay = RetryPolicy(limit, 30, 600).delay_after(failures, 1.0)
    assert (delay is None) == (failures >= limit)


@given(st.integers(1, 10_000))
def test_without_a_limit_it_never_gives_up_and_never_waits_longer_than_the_maximum(failures: int) -> None:
    delay = RetryPolicy(None, 30, 600).delay_after(failures, 1.0)
    assert delay is not None
    assert delay <= timedelta(seconds=600)


@given(st.integers(1, 60))
def test_the_delay_never_shrinks_with_another_failure(failures: int) -> None:
    policy = RetryPolicy(None, 30, 600)
    one, two = policy.delay_after(failures, 1.0), policy.delay_after(failures + 1, 1.0)
    assert one is not None
    assert two is not None
    assert one <= two


def test_the_contracts_defaults() -> None:
    policy = RetryPolicy(3, 30, 600)
    assert [policy.delay_after(n, 1.0) for n in (1, 2, 3)] == [
        timedelta(seconds=30),
        timedelta(seconds=60),
        None,
    ]
