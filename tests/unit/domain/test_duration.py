"""Durations as people write them."""

from __future__ import annotations

import pytest

from tracelake.domain.duration import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("0s", 0), ("30s", 30), ("10m", 600), ("2h", 7200), ("1d", 86400)]
)
def test_a_number_with_a_unit(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "10", "-1s", "1.5s", "500ms", "1w", "1 s", "1s ", "1s\n", "10S", "1" * 10 + "s"]
)
def test_nothing_else(text: str) -> None:
    assert parse_duration(text) is None


def test_what_a_caller_allows_besides() -> None:
    assert parse_duration("10", bare=True) == 10
    assert parse_duration("1.5", bare=True) is None
    assert parse_duration("1.5", bare=True, fractions=True) == 1.5
    assert parse_duration("1.5m", fractions=True) == 90
    assert parse_duration("500ms", units=("ms", "s")) == 0.5
    assert parse_duration("1h", units=("ms", "s")) is None
