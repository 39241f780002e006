"""A follower looks alive only while it is: what is old, paused, unreachable or dead says so, and since when."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracelake.domain.chain_status import (
    SILENT_SECONDS,
    ChainCondition,
    FollowerFacts,
    PauseFact,
    follower_status,
)

NOW = datetime(2026, 11, 18, 12, 0, tzinfo=UTC)
STAMP = int(NOW.timestamp())
LIVE = FollowerFacts(
    now=NOW,
    status="Running",
    runtime="ecs_spark",
    claimed_at=NOW - timedelta(hours=1),
    lease_expires_at=NOW + timedelta(minutes=1),
    reported={"message": "following the tip", "lag": 0, "head_at": STAMP - 2, "head_time": STAMP - 12},
)
PAUSE = PauseFact("person", "ann", NOW - timedelta(minutes=7))


def reported(facts: FollowerFacts = LIVE, **fields: Any) -> FollowerFacts:
    return replace(facts, reported={**(facts.reported or {}), **fields})


def test_a_follower_that_reads_the_head_follows() -> None:
    found = follower_status(LIVE)
    assert (found.condition, found.state) == (ChainCondition.FOLLOWING, "following the tip")
    assert (found.known_age_seconds, found.head_age_seconds) == (2.0, 12.0)


def test_one_that_is_far_behind_catches_up_at_its_speed() -> None:
    found = follower_status(reported(lag=5_000, message="catching up", blocks_per_second=12.34))
    assert (found.condition, found.state) == (ChainCondition.CATCHING_UP, "catching up at 12.3 blocks/s")


def test_a_paused_one_is_paused_whatever_it_reported_last() -> None:
    found = follower_status(replace(LIVE, pauses=[PAUSE]))
    assert found.condition is ChainCondition.PAUSED
    assert found.state == "paused by ann since 2026-11-18 11:53:00Z"
    assert found.since == PAUSE.since


def test_a_hold_beside_a_pause_names_both() -> None:
    held = PauseFact("backpressure of chain/work", None, NOW - timedelta(minutes=9))
    found = follower_status(replace(LIVE, pauses=[PAUSE, held]))
    assert found.condition is ChainCondition.PAUSED
    assert found.state.endswith("; held by backpressure of chain/work since 2026-11-18 11:51:00Z")
    assert found.since == held.since
    found = follower_status(replace(LIVE, pauses=[held]))
    assert found.condition is ChainCondition.HELD
    assert found.state == "held by backpressure of chain/work since 2026-11-18 11:51:00Z"


@pytest.mark.parametrize("message", ["following the tip", "catching up", "waiting: temporary problem"])
def test_a_dead_endpoint_is_named_with_its_error_and_since_when(message: str) -> None:
    found = follower_status(
        reported(message=message, problem="node0: refused", problem_since=STAMP - 60, problem_of="chain")
    )
    assert found.condition is ChainCondition.UNREACHABLE
    assert found.state == "endpoint unreachable since 2026-11-18 11:59:00Z: node0: refused"
    assert found.last_error == "node0: refused"


def test_an_endpoint_is_unreachable_since_its_last_answer() -> None:
    found = follower_status(
        reported(problem="refused", problem_since=STAMP - 5, problem_of="chain", head_at=STAMP - 65)
    )
    assert found.since == NOW - timedelta(seconds=65)


def test_a_problem_of_the_platform_is_not_the_endpoints() -> None:
    found = follower_status(reported(problem="no data database", problem_since=STAMP, problem_of="platform"))
    assert found.condition is ChainCondition.TROUBLED


def test_a_report_that_grows_old_is_no_life() -> None:
    found = follower_status(reported(head_at=STAMP - SILENT_SECONDS - 1))
    assert found.condition is ChainCondition.SILENT
    assert found.state == "nothing read from the chain since 2026-11-18 11:59:29Z"


def test_a_worker_that_has_died_is_gone_before_its_task_is_reaped() -> None:
    found = follower_status(replace(LIVE, lease_expires_at=NOW - timedelta(seconds=1)))
    assert found.condition is ChainCondition.GONE


@pytest.mark.parametrize(
    ("facts", "condition"),
    [
        (FollowerFacts(now=NOW, status=None), ChainCondition.STOPPED),
        (replace(LIVE, status="Queued", ready_at=NOW), ChainCondition.QUEUED),
        (replace(LIVE, status="Queued", ready_at=NOW + timedelta(minutes=1)), ChainCondition.QUEUED),
        (replace(LIVE, status="Failed", error_message="WrongChain"), ChainCondition.FAILED),
        (replace(LIVE, reported=None), ChainCondition.STARTING),
        (reported(message="the endpoints don't agree about the chain"), ChainCondition.WAITING),
    ],
)
def test_what_does_not_follow_is_not_called_following(
    facts: FollowerFacts, condition: ChainCondition
) -> None:
    found = follower_status(facts)
    assert found.condition is condition
    assert "following" not in found.state


def test_an_error_has_a_time_and_ends_when_a_later_attempt_has_read_the_head() -> None:
    failed_at = NOW - timedelta(hours=2)
    failed = replace(LIVE, error_message="boom", failed_at=failed_at)
    found = follower_status(failed)
    assert (found.last_error, found.last_error_since) == (None, None)
    starting = follower_status(replace(failed, reported=None))
    assert (starting.last_error, starting.last_error_since) == ("boom", failed_at)
    queued = follower_status(replace(failed, status="Queued", ready_at=NOW))
    assert (queued.last_error, queued.last_error_since) == ("boom", failed_at)
    assert queued.state.endswith(": boom (at 2026-11-18 10:00:00Z)")
    troubled = follower_status(reported(failed, problem="refused", problem_since=STAMP - 60))
    assert (troubled.last_error, troubled.last_error_since) == ("refused", NOW - timedelta(seconds=60))


@given(
    st.dictionaries(
        st.sampled_from(
            ["message", "lag", "head_at", "head_time", "problem", "problem_since", "blocks_per_second"]
        ),
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    )
)
def test_a_report_may_be_anything(fields: dict[str, Any]) -> None:
    found = follower_status(replace(LIVE, reported=fields))
    assert found.state
    assert found.known_age_seconds is None or found.known_age_seconds >= 0
