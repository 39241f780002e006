"""What ``tracelake sources`` shows of a cron source whose clock was set back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tracelake.cli.sources import _next, _state
from tracelake.contracts.sources import SourceSummary

NOW = datetime(2026, 3, 1, 12, 0, 30, tzinfo=UTC)
HOUR = timedelta(hours=1)


def cron(since: datetime, last_tick: datetime | None) -> SourceSummary:
    return SourceSummary(
        dag_name="chain",
        job="src",
        kind="cron",
        runs_code=False,
        operator="noop",
        runtime="dispatcher",
        paused=False,
        schedule="* * * * *",
        timezone="UTC",
        since=since,
        last_tick=None if last_tick is None else int(last_tick.timestamp()),
    )


@pytest.mark.parametrize(
    ("since", "last_tick", "state", "next_at"),
    [
        (NOW - HOUR, NOW, "-", NOW + timedelta(seconds=30)),
        (NOW - HOUR, NOW + HOUR, "its last tick is in the future", NOW + HOUR + timedelta(seconds=30)),
        (NOW + HOUR, None, "the deploy of its schedule is in the future", NOW + HOUR + timedelta(seconds=30)),
    ],
)
def test_nothing_fires_before_the_last_tick_and_the_deploy(
    since: datetime, last_tick: datetime | None, state: str, next_at: datetime
) -> None:
    source = cron(since, last_tick)
    assert _state(source, NOW).startswith(state)
    assert _next(source, NOW, 1) == [next_at]
