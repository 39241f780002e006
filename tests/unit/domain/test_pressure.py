"""Backpressure as a pure decision: properties over any graph, and the tiers one by one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tracelake.domain.pressure import (
    JobLoad,
    PressureDecision,
    PressureSettings,
    PressureSnapshot,
    Tier,
    Trip,
    decide,
)

NOW = datetime(2026, 11, 2, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)


@st.composite
def graphs(draw: st.DrawFn, *, cycles: bool = True) -> dict[int, JobLoad[int]]:
    size = draw(st.integers(1, 6))
    jobs = {}
    for job in range(size):
        others = st.integers(0, size - 1) if cycles else st.integers(0, max(0, job - 1))
        producers = draw(st.sets(others, max_size=3)) if cycles or job else set()
        waiting = draw(st.integers(0, 25))
        jobs[job] = JobLoad(
            bulk=draw(st.booleans()),
            bulk_work=draw(st.booleans()),
            paused_by_person=draw(st.integers(0, 5)) == 0,
            waiting=waiting,
            oldest=NOW - draw(st.integers(0, 200)) * SECOND if waiting else None,
            max_depth=draw(st.none() | st.integers(1, 20)),
            max_age=draw(st.none() | st.integers(1, 100).map(lambda n: n * SECOND)),
            producers=tuple(sorted(producers)),
        )
    return jobs


@st.composite
def snapshots(draw: st.DrawFn) -> PressureSnapshot[int]:
    jobs = draw(graphs())
    trips = {}
    for job in draw(st.sets(st.sampled_from(sorted(jobs)), max_size=4)):
        since = NOW - draw(st.integers(0, 60)) * SECOND
        trips[job] = Trip(draw(st.sampled_from(Tier)), since, since, draw(st.none() | st.just(since)))
    return PressureSnapshot(jobs, trips)


def reaches(jobs: dict[int, JobLoad[int]], start: int, end: int) -> bool:
    """Whether work of ``start`` becomes work of ``end``."""
    seen, waiting = set(), [end]
    while waiting:
        for producer in jobs[waiting.pop()].producers:
            if producer not in seen:
                seen.add(producer)
                waiting.append(producer)
    return start in seen


def drained(jobs: dict[int, JobLoad[int]], decision: PressureDecision[int]) -> dict[int, JobLoad[int]]:
    """One task of every job that may run is done; those that are held keep theirs."""
    stopped = {hold.job for hold in decision.holds if not hold.bulk_only}
    bulk = {hold.job for hold in decision.holds if hold.bulk_only}
    after = {}
    for job, load in jobs.items():
        may_run = job not in stopped and not (job in bulk and load.bulk_work)
        waiting = max(0, load.waiting - 1) if may_run else load.waiting
        after[job] = JobLoad(
            load.bulk,
            load.bulk_work and waiting > 0,
            False,
            waiting,
            load.oldest if waiting else None,
            load.max_depth,
            load.max_age,
            load.producers,
        )
    return after


@settings(max_examples=50)
@given(snapshots())
def test_only_who_feeds_a_tripped_job_is_held_and_nobody_who_it_feeds(
    snapshot: PressureSnapshot[int],
) -> None:
    jobs = dict(snapshot.jobs)
    decision = decide(snapshot, NOW)
    for hold in decision.holds:
        assert hold.cause in decision.trips
        assert reaches(jobs, hold.job, hold.cause)
        assert not reaches(jobs, hold.cause, hold.job)
        assert (hold.chain[0], hold.chain[-1]) == (hold.job, hold.cause)
        for producer, consumer in zip(hold.chain, hold.chain[1:], strict=False):
            assert producer in jobs[consumer].producers
    for cause, trip in decision.trips.items():
        fed = {job for job in jobs if reaches(jobs, job, cause) and not reaches(jobs, cause, job)}
        held = {hold.job: hold.bulk_only for hold in decision.holds if hold.cause == cause}
        assert set(held) == fed
        for job, bulk_only in held.items():
            assert bulk_only == (trip.tier is Tier.BULK and not jobs[job].bulk)


@settings(max_examples=50)
@given(snapshots())
def test_deciding_again_changes_nothing(snapshot: PressureSnapshot[int]) -> None:
    first = decide(snapshot, NOW)
    again = decide(PressureSnapshot(snapshot.jobs, first.trips), NOW)
    assert (again.trips, again.holds) == (first.trips, first.holds)


@settings(max_examples=50)
@given(snapshots())
def test_time_alone_changes_nothing_before_the_time_that_it_names(snapshot: PressureSnapshot[int]) -> None:
    first = decide(snapshot, NOW)
    if first.look_again is not None and first.look_again <= NOW:
        return
    until = first.look_again - timedelta(microseconds=1) if first.look_again else NOW + timedelta(days=1)
    later = decide(PressureSnapshot(snapshot.jobs, first.trips), max(NOW, until))
    assert {job: trip.tier for job, trip in later.trips.items()} == {
        job: trip.tier for job, trip in first.trips.items()
    }


@settings(max_examples=30)
@given(graphs())
def test_what_may_run_runs_until_everybody_is_released(jobs: dict[int, JobLoad[int]]) -> None:
    trips: dict[int, Trip] = {}
    now = NOW
    for _ in range(500):
        decision = decide(PressureSnapshot(jobs, dict(trips)), now)
        trips = dict(decision.trips)
        if not decision.trips and not any(load.waiting for load in jobs.values()):
            return
        jobs = drained(jobs, decision)
        now += 5 * SECOND
    raise AssertionError(f"deadlock: {trips}")


def one(waiting: int, *, bulk: bool = True, trip: Trip | None = None, now: datetime = NOW) -> Trip | None:
    """The trip of a job with a threshold of 10 behind a producer."""
    jobs: dict[str, JobLoad[str]] = {
        "up": JobLoad(bulk=bulk),
        "down": JobLoad(waiting=waiting, max_depth=10, producers=("up",)),
    }
    return decide(PressureSnapshot(jobs, {"down": trip} if trip else {}), now).trips.get("down")


def test_bulk_is_held_first_then_everything() -> None:
    assert one(9) is None
    tripped = one(10)
    assert tripped is not None
    assert tripped.tier is Tier.BULK
    assert one(19) == tripped
    for more in (one(20), one(10, bulk=False)):
        assert more is not None
        assert more.tier is Tier.NORMAL
    patient = one(10, trip=tripped, now=NOW + 29 * SECOND)
    assert patient is not None
    assert patient.tier is Tier.BULK
    impatient = one(10, trip=tripped, now=NOW + 30 * SECOND)
    assert impatient is not None
    assert impatient.tier is Tier.NORMAL


def test_patience_begins_anew_when_pressure_falls_below_one() -> None:
    tripped = one(10)
    relieved = one(9, trip=tripped, now=NOW + 20 * SECOND)
    assert relieved is not None
    assert relieved.over_since is None
    again = one(10, trip=relieved, now=NOW + 40 * SECOND)
    assert again is not None
    assert again.tier is Tier.BULK


def test_tiers_are_released_in_reverse_below_the_low_mark_and_not_too_soon() -> None:
    held = one(20)
    assert one(5, trip=held, now=NOW + 60 * SECOND) == one(4, trip=held, now=NOW + 4 * SECOND)
    back = one(4, trip=held, now=NOW + 5 * SECOND)
    assert back is not None
    assert back.tier is Tier.BULK
    assert one(0, trip=back, now=NOW + 9 * SECOND) == back
    assert one(0, trip=back, now=NOW + 10 * SECOND) is None


@pytest.mark.parametrize("hours", [1, 12, 24])
def test_a_clock_that_is_set_back_keeps_nobody_held_nor_patient(hours: int) -> None:
    back = NOW - timedelta(hours=hours)
    held = one(20)
    assert held is not None
    noted = one(0, trip=held, now=back)
    assert noted == Trip(Tier.NORMAL, back, back, None), "its least time begins anew"
    assert one(0, trip=noted, now=back + 4 * SECOND) == noted
    assert one(0, trip=noted, now=back + 5 * SECOND) == Trip(Tier.BULK, back, back + 5 * SECOND, None), (
        "normal work goes on"
    )
    patient = one(10, trip=one(10), now=back)
    assert patient == Trip(Tier.BULK, back, back, back)
    assert one(10, trip=patient, now=back + 29 * SECOND) == patient
    impatient = one(10, trip=patient, now=back + 30 * SECOND)
    assert impatient is not None
    assert impatient.tier is Tier.NORMAL


@settings(max_examples=50)
@given(snapshots(), st.integers(1, 100_000))
def test_no_decision_names_a_time_that_has_not_come(snapshot: PressureSnapshot[int], seconds: int) -> None:
    now = NOW - seconds * SECOND
    decision = decide(snapshot, now)
    for trip in decision.trips.values():
        assert max(trip.since, trip.changed_at, trip.over_since or now) <= now
    if decision.look_again is not None:
        longest = max((load.max_age or timedelta() for load in snapshot.jobs.values()), default=timedelta())
        assert decision.look_again <= now + max(2 * longest, PressureSettings().patience)


def test_a_person_takes_the_pressure_away_and_retries_never_had_any() -> None:
    paused = JobLoad(paused_by_person=True, waiting=99, max_depth=1, producers=(0,))
    jobs: dict[int, JobLoad[int]] = {0: JobLoad(), 1: paused}
    assert decide(PressureSnapshot(jobs), NOW).holds == ()


def test_the_marks_can_be_set() -> None:
    jobs: dict[int, JobLoad[int]] = {0: JobLoad(), 1: JobLoad(waiting=3, max_depth=10, producers=(0,))}
    trip = Trip(Tier.NORMAL, NOW, NOW, None)
    quick = PressureSettings(low_mark=0.2, min_hold=timedelta(0))
    assert 1 in decide(PressureSnapshot(jobs, {1: trip}, quick), NOW).trips
    assert decide(PressureSnapshot(jobs, {1: trip}, PressureSettings(min_hold=timedelta(0))), NOW).trips == {}
