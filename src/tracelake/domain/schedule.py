"""Schedules of cron sources: five fields in a time zone, and which of their ticks are due.

A tick is a time at which a schedule fires, in epoch seconds. ``due_ticks`` decides from a schedule, the last tick
and the time which ticks are due; it is pure, so the scheduler process, a Lambda and a test decide alike. No call
looks further than ``_NEVER``, whatever the schedule is: what doesn't come until then never comes.

Around a change of clocks ticks fall as Debian's cron has them. A schedule whose minute or hour begins with ``*``
follows the clock on the wall: not at all in an hour that is skipped, twice in one that is repeated. Any other one
runs once each day whatever the clock does: at the end of an hour that is skipped, and only in the first of two. Two
times that a change of clocks moves to the same second are one tick.

``cronsim`` reads the fields and walks from one time of the wall clock to the next. Which moments such a time is,
none, one or two, is found here: its own walk through a zone is wrong where clocks change at midnight, or by half
an hour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from cronsim import CronSim, CronSimError

from tracelake.domain.dag.model import CatchUp
from tracelake.domain.errors import Invalid

MAX_SCHEDULE = 256
MAX_CATCH_UP = 1000
"""The most ticks of a source that one round makes; the next one goes on after them."""
ON_TIME_SECONDS = 60
"""A tick that is made within this time isn't a missed one."""
_FIELDS = ("minute", "hour", "day of month", "month", "day of week")
_MINUTE = timedelta(minutes=1)
_NEAR = timedelta(hours=25)
"""More than any change of clocks, the skipped day of Samoa included."""
_NEVER = timedelta(days=51 * 366)
_FIRST_WINDOW = timedelta(hours=1)
_REFERENCE = datetime(2024, 1, 1, tzinfo=UTC)


class DueTicks(NamedTuple):
    """Ticks in their order; ``skipped`` is how many more were missed and are not made up for."""

    ticks: list[int]
    skipped: int


@dataclass(frozen=True, slots=True)
class CronSchedule:
    """A valid schedule; made by ``parse_schedule``."""

    text: str
    zone: ZoneInfo

    @property
    def follows_the_wall(self) -> bool:
        minute, hour = self.text.split()[:2]
        return minute.startswith("*") or hour.startswith("*")

    def after(self, moment: datetime, until: datetime | None = None) -> Iterator[datetime]:
        """The times at which it fires after ``moment``, up to ``until``, in UTC and in order. Without it they
        end when nothing comes for ``_NEVER``: all of its times may be skipped ones."""
        latest = moment.astimezone(UTC)
        # Times that a repeated hour brings again come after later times of the wall clock.
        waiting: list[datetime] = []
        for wall in CronSim(self.text, self._wall_before(latest)):
            first = wall.replace(tzinfo=self.zone)
            begins = first.astimezone(UTC)
            while waiting and waiting[0] <= begins:
                again = heappop(waiting)
                if until is not None and again > until:
                    return
                if again > latest:
                    latest = again
                    yield again
            if begins > (latest + _NEVER if until is None else until + _NEAR):
                return
            for found in self._moments(first, begins):
                heappush(waiting, found)

    def _moments(self, first: datetime, begins: datetime) -> Iterator[datetime]:
        """When the wall clock shows this time, as far as the schedule fires then."""
        again = first.replace(fold=1).astimezone(UTC)
        if begins.astimezone(self.zone).replace(tzinfo=None) != first.replace(tzinfo=None):
            # Skipped. By the offset from before the change it lies as far behind the change as it should have been.
            if not self.follows_the_wall:
                yield self._end_of_gap(begins, again)
            return
        yield begins
        if self.follows_the_wall and again != begins:
            yield again

    def _end_of_gap(self, late: datetime, early: datetime) -> datetime:
        """The change of clocks between two moments, to the minute."""
        offset = early.astimezone(self.zone).utcoffset()
        while late - early > _MINUTE:
            middle = early + (late - early) // (2 * _MINUTE) * _MINUTE
            if middle.astimezone(self.zone).utcoffset() == offset:
                early = middle
            else:
                late = middle
        return late

    def _wall_before(self, moment: datetime) -> datetime:
        """A time of the wall clock, without its zone, after which all times are found that come after ``moment``:
        earlier than what the clock shows if it is changed about then."""
        offsets = [_offset(each, self.zone) for each in (moment - _NEAR, moment, moment + _NEAR)]
        changed = max(offsets) - min(offsets)
        return (moment + offsets[1]).replace(tzinfo=None) - (changed + _MINUTE if changed else timedelta(0))


def parse_schedule(text: str, zone: str) -> CronSchedule:
    """Raises ``Invalid`` for a schedule that isn't one, or never fires there, and for an unknown zone."""
    schedule = CronSchedule(_checked(text), parse_zone(zone))
    if not _fires(schedule):
        raise Invalid(
            "NeverFires",
            f"{schedule.text!r} never fires in {zone}: all of its times are in hours that are skipped there",
        )
    return schedule


def parse_zone(name: str) -> ZoneInfo:
    if name not in _zones():
        raise Invalid(
            "UnknownZone", f"{name[:80]!r} is no time zone; they are named like Europe/Berlin or UTC"
        )
    return ZoneInfo(name)


def zone_names() -> frozenset[str]:
    return _zones()


@lru_cache(maxsize=1024)
def _fires(schedule: CronSchedule) -> bool:
    """Whether any of its times is ever shown by a clock of its zone. A scheduler asks in each round."""
    return next_tick(schedule, _REFERENCE) is not None


@lru_cache(maxsize=1)
def _zones() -> frozenset[str]:
    return frozenset(available_timezones())


def _checked(text: str) -> str:
    text = " ".join(text.split())
    fields = text.split(" ")
    if text.startswith("@"):
        raise Invalid("InvalidSchedule", f"{fields[0][:20]!r} is not supported: write its five fields")
    if len(text) > MAX_SCHEDULE or not text.isascii():
        raise Invalid("InvalidSchedule", f"must be at most {MAX_SCHEDULE} ASCII characters")
    if len(fields) != len(_FIELDS):
        has = f"has {len(fields)} field{'s' * (len(fields) != 1)}"
        raise Invalid("InvalidSchedule", f"{has}, not five: {', '.join(_FIELDS)}")
    try:
        found = next(CronSim(text, _REFERENCE), None)
    except CronSimError as error:
        raise Invalid("InvalidSchedule", _explained(text, str(error))) from None
    # What cronsim hasn't found in 50 years never comes.
    if found is None or found - _REFERENCE > _NEVER:
        raise Invalid("NeverFires", f"{text!r} never fires: no such day exists")
    return text


def _explained(text: str, problem: str) -> str:
    name = problem.removeprefix("Bad ").replace("-", " ")
    if name not in _FIELDS:
        return f"{text!r} is no schedule: {problem}"
    value = text.split(" ")[_FIELDS.index(name)]
    # cronsim refuses days beyond the end of every named month as a bad day of month.
    if name == "day of month" and value.isdigit() and 1 <= int(value) <= 31:
        return f"{text!r} never fires: no such day exists"
    return f"{value!r} is no {name}"


def _offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta(0)


def next_ticks(schedule: CronSchedule, after: datetime, count: int) -> list[datetime]:
    return list(islice(schedule.after(after), count))


def next_tick(schedule: CronSchedule, after: datetime) -> datetime | None:
    return next(schedule.after(after), None)


def due_ticks(schedule: CronSchedule, after: datetime, now: datetime, catch_up: CatchUp) -> DueTicks:
    """The ticks after ``after`` and up to ``now`` that are to be made.

    With ``all`` every one, the oldest ``MAX_CATCH_UP`` of them first; with ``latest`` the last one; with ``none``
    only those that aren't late. A clock that is before ``after`` has no tick due: none of them fires twice.
    """
    match catch_up:
        case CatchUp.ALL:
            found = _Found(list(islice(schedule.after(after, now), MAX_CATCH_UP)), 0)
        case CatchUp.LATEST:
            found = _latest(schedule, after, now, 1)
        case CatchUp.NONE:
            found = _latest(schedule, max(after, now - timedelta(seconds=ON_TIME_SECONDS)), now, MAX_CATCH_UP)
    return DueTicks([int(tick.timestamp()) for tick in found.ticks], found.skipped)


class _Found(NamedTuple):
    ticks: list[datetime]
    skipped: int


def _latest(schedule: CronSchedule, after: datetime, now: datetime, most: int) -> _Found:
    """The last ``most`` ticks within ``(after, now]``. Looks back further and further, so that a long outage of a
    schedule that fires often costs no more than a short one; ``skipped`` then counts those that it came across."""
    window = _FIRST_WINDOW
    while True:
        begin = max(after, now - window)
        found = list(schedule.after(begin, now))
        if len(found) > most or begin <= after:
            return _Found(found[-most:], max(0, len(found) - most))
        window *= 4
