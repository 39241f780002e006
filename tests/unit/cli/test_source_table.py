"""What ``tracelake sources`` shows of a cron source whose clock was set back, and of a tick that is kept."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec import structs
from typer.testing import CliRunner

from tracelake.cli import sources
from tracelake.cli.main import app
from tracelake.cli.sources import _next, _state
from tracelake.contracts.sources import SourcePage, SourceRan, SourceSummary

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
    ("fields", "why"),
    [
        ({"paused": True, "pause_causes": ["person"]}, "is paused"),
        (
            {"paused": True, "pause_causes": ["backpressure of chain/down"]},
            "is held by backpressure of chain/down",
        ),
        (
            {"paused": True, "pause_causes": ["backpressure of chain/down", "person"]},
            "is paused and is held by backpressure of chain/down",
        ),
        ({"waiting_for": "5 kept requests wait for room"}, "has no room: 5 kept requests wait for room"),
        ({}, "has earlier ones to route first"),
    ],
)
def test_a_tick_that_is_kept_says_what_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], why: str
) -> None:
    class Stub:
        def run_source(self, dag: str, job: str) -> SourceRan:
            return SourceRan(dag, job, 7, True, None, 0)

        def sources(self) -> SourcePage:
            return SourcePage(NOW, [structs.replace(cron(NOW, None), **fields)], None)

    monkeypatch.setattr(sources, "connect", lambda *_: nullcontext(Stub()))
    done = CliRunner().invoke(app, ["sources", "run", "chain/src"])
    assert done.output == f"tick 7 is kept: chain/src {why}\n"


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
