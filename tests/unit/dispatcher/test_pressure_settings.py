"""The Dispatcher's settings of backpressure: with each that is accepted, an empty queue releases."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tracelake.dispatcher.settings import DispatcherSettings, tuned
from tracelake.domain.errors import Invalid
from tracelake.domain.pressure import JobLoad, PressureSettings, PressureSnapshot, Tier, Trip, decide
from tracelake.settings import Secret
from tracelake.tokens.home_copies import HomeCopies

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)
LOW_MARK = "TRACELAKE_PRESSURE_LOW_MARK"
PATIENCE = "TRACELAKE_PRESSURE_PATIENCE_SECONDS"
MIN_HOLD = "TRACELAKE_PRESSURE_MIN_HOLD_SECONDS"
BULK_WAIT = "TRACELAKE_MAX_BULK_WAIT_SECONDS"


def settings_of(folder: Path, name: str, value: str) -> DispatcherSettings:
    nothing = Secret("")
    return tuned(
        DispatcherSettings(state_dsn=nothing, queue_dsn=nothing, home=HomeCopies(folder), objects=""),
        {name: value},
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        (LOW_MARK, "0.001"),
        (LOW_MARK, "1"),
        (PATIENCE, "0"),
        (PATIENCE, "86400"),
        (MIN_HOLD, "0"),
        (MIN_HOLD, "86400"),
        (BULK_WAIT, "0"),
        (BULK_WAIT, "3600"),
    ],
)
def test_the_lowest_and_the_highest_value_trip_and_release(tmp_path: Path, name: str, value: str) -> None:
    chosen = settings_of(tmp_path, name, value)
    min_hold = timedelta(seconds=chosen.pressure_min_hold_seconds)
    marks = PressureSettings(
        chosen.pressure_low_mark,
        timedelta(seconds=chosen.pressure_patience_seconds),
        min_hold,
        timedelta(seconds=chosen.max_bulk_wait_seconds),
    )

    def trips(waiting: int, before: dict[str, Trip], now: datetime) -> dict[str, Trip]:
        jobs: dict[str, JobLoad[str]] = {
            "up": JobLoad(),
            "down": JobLoad(waiting=waiting, max_depth=2, producers=("up",)),
        }
        return dict(decide(PressureSnapshot(jobs, before, marks), now).trips)

    tripped = trips(2, {}, NOW)
    assert tripped["down"].tier is Tier.NORMAL
    assert trips(0, tripped, NOW + min_hold) == {}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        (LOW_MARK, "0.001 and 1"),
        (PATIENCE, "0 and 86400"),
        (MIN_HOLD, "0 and 86400"),
        (BULK_WAIT, "0 and 3600"),
    ],
)
@pytest.mark.parametrize("value", ["-1", "-0.001", "86401", "1e400", "inf", "nan", "", "half"])
def test_what_would_never_trip_or_release_is_refused(
    tmp_path: Path, name: str, bounds: str, value: str
) -> None:
    with pytest.raises(Invalid, match=re.escape(f"{name} must be a number between {bounds}")):
        settings_of(tmp_path, name, value)


@pytest.mark.parametrize("value", ["0", "0.0", "-0", "0.0001", "1e-320"])
def test_no_pressure_is_below_a_low_mark_of_nothing_so_it_is_refused(tmp_path: Path, value: str) -> None:
    with pytest.raises(Invalid, match=r"LOW_MARK must be a number between 0\.001 and 1"):
        settings_of(tmp_path, LOW_MARK, value)


@pytest.mark.parametrize("most", ["0", "-1", "1e3", "1000001", "null", '"4"'])
def test_a_cap_that_lets_nothing_run_is_refused(tmp_path: Path, most: str) -> None:
    with pytest.raises(Invalid, match="TRACELAKE_OPERATORS must be JSON"):
        settings_of(tmp_path, "TRACELAKE_OPERATORS", f'{{"noop": {{"max_in_flight": {most}}}}}')
