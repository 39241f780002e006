"""Schedules: what is refused, daylight saving as Debian's cron has it, and which ticks are due."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from itertools import takewhile
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import given, settings
from hypothesis import strategies as st

from tracelake.domain.dag.model import CatchUp
from tracelake.domain.errors import Invalid
from tracelake.domain.schedule import (
    MAX_CATCH_UP,
    CronSchedule,
    DueTicks,
    due_ticks,
    next_tick,
    next_ticks,
    parse_schedule,
)

MINUTE = timedelta(minutes=1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("@reboot", "'@reboot' is not supported: write its five fields"),
        ("@daily", "not supported"),
        ("* * * * * *", "has 6 fields, not five"),
        ("*/5 * * *", "has 4 fields, not five"),
        ("", "has 1 field, not five"),
        ("0 0 30 2 *", "never fires: no such day exists"),
        ("0 0 31 4,6,9,11 *", "never fires"),
        ("0 0 * 2 mon#6", "'mon#6' is no day of week"),
        ("60 * * * *", "'60' is no minute"),
        ("* 24 * * *", "'24' is no hour"),
        ("* * 0 * *", "'0' is no day of month"),
        ("* * 32 * *", "'32' is no day of month"),
        ("* * * 13 *", "'13' is no month"),
        ("* * * * 8", "'8' is no day of week"),
        ("*/0 * * * *", "'*/0' is no minute"),
        ("5-1 * * * *", "'5-1' is no minute"),
        ("every 5 minutes or so", "'every' is no minute"),
        ("٥ * * * *", "ASCII"),
        ("0," * 200 + "0 * * * *", "at most 256"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_field_that_is_wrong(text: str, why: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_schedule(text, "UTC")
    assert why in refused.value.message


@pytest.mark.parametrize(
    "zone", ["Mars/Olympus", "europe/berlin", "../../etc/passwd", "", "UTC+1", "/etc/localtime"]
)
def test_what_is_no_time_zone_is_refused(zone: str) -> None:
    with pytest.raises(Invalid, match="no time zone"):
        parse_schedule("* * * * *", zone)


def test_a_day_that_comes_once_in_four_years_fires() -> None:
    leap = parse_schedule("0 0 29 2 *", "UTC")
    assert next_tick(leap, datetime(2025, 1, 1, tzinfo=UTC)) == datetime(2028, 2, 29, tzinfo=UTC)


def test_a_day_of_month_and_a_day_of_week_fire_on_either_unless_one_begins_with_a_star() -> None:
    def days(text: str) -> list[int]:
        ticks = next_ticks(parse_schedule(text, "UTC"), datetime(2026, 10, 31, tzinfo=UTC), 30)
        return [tick.day for tick in ticks if (tick.year, tick.month) == (2026, 11)]

    assert days("0 9 12 * FRI") == [6, 12, 13, 20, 27]
    assert days("0 9 */2 * FRI") == [13, 27]


SKIPPED_ONLY = [
    ("* 2 * 3 SUN#2", "America/New_York"),
    ("*/10 2 * 3 0L", "Europe/Berlin"),
    ("* 0 * 3 0L", "Asia/Beirut"),
]


@pytest.mark.parametrize(("text", "zone"), SKIPPED_ONLY)
def test_a_schedule_whose_times_are_all_skipped_by_its_zones_clocks_never_fires(text: str, zone: str) -> None:
    with pytest.raises(Invalid, match=f"never fires in {zone}") as refused:
        parse_schedule(text, zone)
    assert refused.value.reason == "NeverFires"
    assert next_tick(parse_schedule(text, "UTC"), datetime(2025, 1, 1, tzinfo=UTC)) is not None
    # Without stars it runs at the end of the hour.
    fixed = " ".join(["0", *text.split()[1:]])
    assert next_tick(parse_schedule(fixed, zone), datetime(2025, 1, 1, tzinfo=UTC)) is not None


@pytest.mark.parametrize(("text", "zone"), SKIPPED_ONLY)
def test_what_never_fires_is_looked_for_in_a_bounded_time(text: str, zone: str) -> None:
    """As of a machine whose list of zones is older than the one that a schedule was accepted by."""
    never = CronSchedule(text, ZoneInfo(zone))
    year = timedelta(days=366)
    walked = []
    moments = CronSchedule._moments

    def counted(schedule: CronSchedule, first: datetime, begins: datetime) -> Iterator[datetime]:
        walked.append(begins)
        return moments(schedule, first, begins)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CronSchedule, "_moments", counted)
        assert next_tick(never, NOW) is None
        assert next_ticks(never, NOW, 5) == []
        assert walked
        assert max(walked) < NOW + 60 * year
        walked.clear()
        for catch_up in CatchUp:
            assert due_ticks(never, NOW - 10 * year, NOW, catch_up) == ([], 0)
        assert not [begins for begins in walked if begins > NOW + 2 * timedelta(days=1)]


def times(text: str, zone: str, day: date) -> list[str]:
    """Ticks of a local day, as local times with their offset."""
    start = datetime.combine(day, time(), ZoneInfo(zone)).astimezone(UTC)
    found = next_ticks(parse_schedule(text, zone), start - timedelta(seconds=1), 200)
    end = datetime.combine(day + timedelta(days=1), time(), ZoneInfo(zone))
    return [tick.astimezone(ZoneInfo(zone)).strftime("%H:%M%z") for tick in found if tick < end]


BERLIN_SKIPS, BERLIN_REPEATS = date(2026, 3, 29), date(2026, 10, 25)


@pytest.mark.parametrize(
    ("text", "zone", "day", "expected"),
    [
        # A fixed time in the skipped hour runs as soon as the hour is over; in the repeated one, once.
        ("30 2 * * *", "Europe/Berlin", BERLIN_SKIPS, ["03:00+0200"]),
        ("30 2 * * *", "Europe/Berlin", BERLIN_REPEATS, ["02:30+0200"]),
        # Several of them fall together, and with one that was there already.
        ("0,30 2,3 * * *", "Europe/Berlin", BERLIN_SKIPS, ["03:00+0200", "03:30+0200"]),
        ("0,30 2,3 * * *", "Europe/Berlin", BERLIN_REPEATS,
         ["02:00+0200", "02:30+0200", "03:00+0100", "03:30+0100"]),
        # A star follows the wall clock: never in an hour that isn't there, twice in one that is there twice.
        ("*/30 2 * * *", "Europe/Berlin", BERLIN_SKIPS, []),
        ("*/30 2 * * *", "Europe/Berlin", BERLIN_REPEATS,
         ["02:00+0200", "02:30+0200", "02:00+0100", "02:30+0100"]),
        # A change at midnight: the day has no first hour.
        ("30 0 * * *", "Asia/Beirut", date(2025, 3, 30), ["01:00+0300"]),
        ("*/30 0 * * *", "Asia/Beirut", date(2025, 3, 30), []),
        # Half an hour, in the south.
        ("15 2 * * *", "Australia/Lord_Howe", date(2025, 10, 5), ["02:30+1100"]),
    ],
)  # fmt: skip
def test_daylight_saving_is_that_of_debians_cron(
    text: str, zone: str, day: date, expected: list[str]
) -> None:
    assert times(text, zone, day) == expected


def debian(schedule: CronSchedule, start: datetime, minutes: int) -> list[datetime]:
    """Debian's cron, minute by minute: jobs with a star run by the clock on the wall; the others run once for each
    time that the wall clock passes for the first time, those that it jumps over at the jump."""
    found = []
    fields = CronSim(schedule.text, datetime(2026, 1, 1))  # noqa: DTZ001
    wall_before = (start - MINUTE).astimezone(schedule.zone).replace(tzinfo=None)
    furthest = wall_before
    for minute in range(minutes):
        moment = start + minute * MINUTE
        wall = moment.astimezone(schedule.zone).replace(tzinfo=None)
        if schedule.follows_the_wall:
            passed = [wall]
        else:
            passed = []
            while furthest < wall:
                furthest += MINUTE
                passed.append(furthest)
        if any(each.minute in fields.minutes and each.hour in fields.hours for each in passed):
            found.append(moment)
    return found


FIELDS = (
    st.sampled_from(["0", "30", "59", "*", "*/20", "0,45", "10-12"]),
    st.sampled_from(["0", "1", "2", "3", "*", "*/2", "1-3", "0,23"]),
)
CHANGES = [
    ("Europe/Berlin", datetime(2026, 3, 29, 1, tzinfo=UTC)),
    ("Europe/Berlin", datetime(2026, 10, 25, 1, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 3, 8, 7, tzinfo=UTC)),
    ("America/New_York", datetime(2026, 11, 1, 6, tzinfo=UTC)),
    ("Asia/Beirut", datetime(2025, 3, 29, 22, tzinfo=UTC)),
    ("America/Havana", datetime(2025, 11, 2, 5, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2025, 4, 5, 15, tzinfo=UTC)),
    ("Australia/Lord_Howe", datetime(2025, 10, 4, 15, 30, tzinfo=UTC)),
]


@settings(max_examples=40, deadline=None)
@given(minute=FIELDS[0], hour=FIELDS[1], change=st.sampled_from(CHANGES), back=st.integers(0, 180))
def test_around_a_change_of_clocks_ticks_are_debians_wherever_one_begins_to_look(
    minute: str, hour: str, change: tuple[str, datetime], back: int
) -> None:
    zone, at = change
    schedule = parse_schedule(f"{minute} {hour} * * *", zone)
    begin = at - timedelta(hours=5)
    expected = [tick for tick in debian(schedule, begin, 10 * 60) if tick > at - back * MINUTE]
    until = begin + 600 * MINUTE
    found = list(takewhile(lambda tick: tick < until, schedule.after(at - back * MINUTE)))
    assert found == expected


NOW = datetime(2026, 11, 18, 12, 0, 5, tzinfo=UTC)
EVERY_MINUTE = parse_schedule("* * * * *", "UTC")


def due(
    after: datetime, catch_up: CatchUp, schedule: CronSchedule = EVERY_MINUTE, now: datetime = NOW
) -> DueTicks:
    return due_ticks(schedule, after, now, catch_up)


def epoch(moment: datetime) -> int:
    return int(moment.timestamp())


NOON = NOW.replace(second=0)


@pytest.mark.parametrize("catch_up", CatchUp)
def test_a_tick_is_due_once(catch_up: CatchUp) -> None:
    assert due(NOON - MINUTE, catch_up) == ([epoch(NOON)], 0)
    assert due(NOON, catch_up) == ([], 0)
    assert due(NOW, catch_up) == ([], 0)


@pytest.mark.parametrize("catch_up", CatchUp)
def test_a_clock_that_is_set_back_has_nothing_due(catch_up: CatchUp) -> None:
    assert due(NOW + timedelta(days=1), catch_up) == ([], 0)


def test_after_an_outage_all_ticks_are_made_or_the_latest_or_none() -> None:
    missed = [epoch(NOON - n * MINUTE) for n in (4, 3, 2, 1, 0)]
    assert due(NOON - 5 * MINUTE, CatchUp.ALL) == (missed, 0)
    assert due(NOON - 5 * MINUTE, CatchUp.LATEST).ticks == missed[-1:]
    assert due(NOON - 5 * MINUTE, CatchUp.NONE).ticks == missed[-1:]
    hourly = parse_schedule("0 * * * *", "UTC")
    late = NOW + timedelta(minutes=10)
    assert due(NOON - timedelta(hours=3), CatchUp.LATEST, hourly, late).ticks == missed[-1:]
    assert due(NOON - timedelta(hours=3), CatchUp.NONE, hourly, late).ticks == []


def test_all_means_all_however_many_rounds_it_takes() -> None:
    after, made = NOON - 2500 * MINUTE, list[int]()
    while found := due(after, CatchUp.ALL).ticks:
        assert len(found) <= MAX_CATCH_UP
        made += found
        after = datetime.fromtimestamp(found[-1], UTC)
    assert made == [epoch(NOON - n * MINUTE) for n in reversed(range(2500))]


def test_an_outage_of_years_costs_a_round_no_more_than_one_of_hours() -> None:
    long_ago = NOON - timedelta(days=3650)
    assert due(long_ago, CatchUp.LATEST).ticks == [epoch(NOON)]
    oldest = due(long_ago, CatchUp.ALL)
    assert oldest.ticks == [epoch(long_ago + n * MINUTE) for n in range(1, MAX_CATCH_UP + 1)]
    assert oldest.skipped == 0
    yearly = parse_schedule("0 0 1 1 *", "UTC")
    assert len(due(long_ago, CatchUp.ALL, yearly).ticks) == 10
    assert due(long_ago, CatchUp.LATEST, yearly).ticks == [epoch(datetime(2026, 1, 1, tzinfo=UTC))]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(0, 4 * 86400), min_size=1, max_size=8),
    st.sampled_from(["*/7 * * * *", "30 2 * * *", "0 3 * * mon", "15 */6 * * *"]),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York"]),
)
def test_however_late_or_out_of_order_one_looks_no_tick_is_made_twice_and_all_misses_none(
    looks: list[int], text: str, zone: str
) -> None:
    schedule = parse_schedule(text, zone)
    start = datetime(2026, 10, 22, tzinfo=UTC)
    made: list[int] = []
    last = start
    for seconds in looks:
        made += due_ticks(schedule, last, start + timedelta(seconds=seconds), CatchUp.ALL).ticks
        last = max([last, *(datetime.fromtimestamp(tick, UTC) for tick in made)])
    end = start + timedelta(seconds=max(looks))
    assert made == [epoch(tick) for tick in takewhile(lambda tick: tick <= end, schedule.after(start))]
