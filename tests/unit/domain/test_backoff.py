"""Delays double with each failure in a row, up to their limit, and start over after a success."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.backoff import Backoff, spread


def test_delays_double_up_to_the_limit() -> None:
    backoff = Backoff(first=0.5, longest=10)
    assert [backoff.delay(failures) for failures in range(1, 8)] == [0.5, 1, 2, 4, 8, 10, 10]


def test_the_ladder_has_every_delay_up_to_the_longest() -> None:
    for backoff in (Backoff(10, 25), Backoff(1, 300), Backoff(2, 2), Backoff(0, 5)):
        ladder = backoff.ladder()
        assert ladder == [backoff.delay(failures) for failures in range(1, len(ladder) + 1)]
        assert backoff.delay(10**6) == ladder[-1]
    assert Backoff(10, 25).ladder() == [10, 20, 25]


def test_a_success_starts_over() -> None:
    counter = Backoff(first=1, longest=60).counter()
    assert [counter.failed(), counter.failed()] == [1, 2]
    counter.succeeded()
    assert counter.failed() == 1


@given(st.integers(min_value=-5, max_value=10**9))
def test_any_number_of_failures_has_a_delay_within_bounds(failures: int) -> None:
    assert 0.1 <= Backoff(first=0.1, longest=30).delay(failures) <= 30


def test_jitter_scales_the_delay() -> None:
    assert Backoff(first=4, longest=8).delay(1, jitter=0.5) == 2
    assert all(0.5 <= spread() < 1.5 for _ in range(100))
    assert all(0.5 <= spread(most=1.0) < 1.0 for _ in range(100))
    assert spread(draw=lambda: 0.25) == 0.75
