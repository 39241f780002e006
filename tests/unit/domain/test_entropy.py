"""Ids and jitter: as random as it gets, or the same again from a seed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.entropy import Entropy


@given(st.integers())
def test_a_seed_gives_the_same_ids_and_jitter_again(seed: int) -> None:
    one, two = Entropy(seed), Entropy(seed)
    assert [one.uuid() for _ in range(3)] == [two.uuid() for _ in range(3)]
    assert one.jitter() == two.jitter()


def test_without_a_seed_no_two_are_alike() -> None:
    one, two = Entropy(), Entropy()
    ids = [source.uuid() for source in (one, two) for _ in range(100)]
    assert len(set(ids)) == 200
    assert {uuid.version for uuid in ids} == {4}


@given(st.integers())
def test_jitter_is_a_factor_between_one_half_and_one_and_a_half(seed: int) -> None:
    entropy = Entropy(seed)
    assert all(0.5 <= entropy.jitter() < 1.5 for _ in range(20))
