"""Backpressure, decided purely: which jobs are held because of which others, from a snapshot of the graph.

A job's pressure is the larger of waiting tasks ÷ ``max_queue_depth`` and the age of the oldest ÷ ``max_queue_age``.
At 1 the job *trips*: every producer upstream over triggering edges is held, across DAGs. There are two tiers. In
``bulk``, jobs of priority bulk are held, and bulk work of the others. In ``normal``, all of them: when nothing
upstream is bulk, when pressure has stayed at 1 or above for a while, or at 2. Below the low mark the tiers are
released in reverse, one at a time, and never sooner than ``min_hold`` after the last change.

What a person has paused has no pressure: its tasks wait for the person. A job is never held by one that it reads
from in a cycle of DAGs (each would wait for the other), so in every graph some tripped job can be worked off, and
in the end all are released.

``decide`` knows no database and no clock. The step that applies it (``dispatcher/steps/apply_backpressure.py``)
stores trips and holds, so that a restart changes nothing and replicas agree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Generic, TypeVar

BACKPRESSURE = "backpressure of "
"""Before the name of the job that holds another: so the causes of holds begin, and no other pause's."""
J = TypeVar("J", bound=Hashable)


class Tier(StrEnum):
    """The work upstream of a tripped job that is held: bulk jobs and bulk work, or all of it."""

    BULK = "bulk"
    NORMAL = "normal"


@dataclass(frozen=True, slots=True)
class PressureSettings:
    """``patience`` is how long pressure may stay at 1 before normal jobs are held too; ``min_hold`` the least time
    between a hold and a release. A bulk task waits at most ``max_bulk_wait`` longer than normal ones."""

    low_mark: float = 0.5
    patience: timedelta = timedelta(seconds=30)
    min_hold: timedelta = timedelta(seconds=5)
    max_bulk_wait: timedelta = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class JobLoad(Generic[J]):
    """A job as a snapshot has it. ``waiting`` counts tasks that wait to be claimed, ``oldest`` is since when the
    first of them waits; tasks that wait for a retry time are in neither. ``bulk_work`` says whether it has any
    tasks of priority bulk. ``producers`` are the jobs whose events make its tasks."""

    bulk: bool = False
    bulk_work: bool = False
    paused_by_person: bool = False
    waiting: int = 0
    oldest: datetime | None = None
    max_depth: int | None = None
    max_age: timedelta | None = None
    producers: tuple[J, ...] = ()


@dataclass(frozen=True, slots=True)
class Trip:
    """A job that holds its producers. ``since`` is when it tripped, ``changed_at`` when its tier last changed,
    ``over_since`` since when its pressure has been at 1 or above without a break."""

    tier: Tier
    since: datetime
    changed_at: datetime
    over_since: datetime | None

    def as_of(self, now: datetime) -> Trip:
        """Times that haven't come yet are those of a clock that was set back: they are now, so that nothing waits
        for the clock to get there again."""
        over_since = None if self.over_since is None else min(self.over_since, now)
        return Trip(self.tier, min(self.since, now), min(self.changed_at, now), over_since)


@dataclass(frozen=True, slots=True)
class PressureSnapshot(Generic[J]):
    jobs: Mapping[J, JobLoad[J]]
    trips: Mapping[J, Trip] = field(default_factory=dict)
    settings: PressureSettings = PressureSettings()


@dataclass(frozen=True, slots=True)
class Hold(Generic[J]):
    """``job`` is held because of ``cause``. ``chain`` leads from it to the cause by the shortest way, both
    included. With ``bulk_only``, its other tasks go on."""

    job: J
    cause: J
    bulk_only: bool
    chain: tuple[J, ...]


@dataclass(frozen=True, slots=True)
class PressureDecision(Generic[J]):
    """Trips and holds as they should be. Nothing changes before ``look_again`` unless queues do."""

    trips: Mapping[J, Trip]
    holds: tuple[Hold[J], ...]
    look_again: datetime | None = None


def pressure_of(load: JobLoad[J], now: datetime) -> float:
    if load.paused_by_person:
        return 0.0
    depth = load.waiting / load.max_depth if load.max_depth else 0.0
    age = 0.0
    if load.max_age and load.oldest is not None:
        age = max(0.0, (now - load.oldest) / load.max_age)
    return max(depth, age)


def decide(snapshot: PressureSnapshot[J], now: datetime) -> PressureDecision[J]:
    graph = _Graph(snapshot.jobs)
    trips: dict[J, Trip] = {}
    holds: list[Hold[J]] = []
    looks: list[datetime] = []
    for job, load in snapshot.jobs.items():
        before = snapshot.trips.get(job)
        before = before and before.as_of(now)
        if load.max_depth is None and load.max_age is None and before is None:
            continue
        pressure = pressure_of(load, now)
        chains = graph.upstream(job) if before is not None or pressure >= 1 else {}
        bulk_upstream = any(snapshot.jobs[each].bulk or snapshot.jobs[each].bulk_work for each in chains)
        trip = _trip(before, pressure, now, snapshot.settings, bulk_upstream=bulk_upstream)
        looks += _changes(load, trip, pressure, now, snapshot.settings)
        if trip is None:
            continue
        trips[job] = trip
        for each, chain in chains.items():
            bulk_only = trip.tier is Tier.BULK and not snapshot.jobs[each].bulk
            holds.append(Hold(each, job, bulk_only, chain))
    return PressureDecision(trips, tuple(holds), min(looks, default=None))


def _trip(
    before: Trip | None, pressure: float, now: datetime, settings: PressureSettings, *, bulk_upstream: bool
) -> Trip | None:
    if before is None:
        if pressure < 1:
            return None
        tier = Tier.BULK if bulk_upstream and pressure < 2 else Tier.NORMAL
        return Trip(tier, now, now, now)
    over_since = (before.over_since or now) if pressure >= 1 else None
    trip = replace(before, over_since=over_since)
    if trip.tier is Tier.BULK and pressure >= 1:
        patient = over_since is not None and now - over_since < settings.patience
        if not bulk_upstream or pressure >= 2 or not patient:
            return replace(trip, tier=Tier.NORMAL, changed_at=now)
    if pressure >= settings.low_mark or now - trip.changed_at < settings.min_hold:
        return trip
    # In reverse, and one tier at a time: bulk work comes back only when normal work has not refilled the queue.
    if trip.tier is Tier.NORMAL and bulk_upstream:
        return replace(trip, tier=Tier.BULK, changed_at=now)
    return None


def _changes(
    load: JobLoad[J], trip: Trip | None, pressure: float, now: datetime, settings: PressureSettings
) -> Iterable[datetime]:
    """When time alone may change the decision about a job."""
    aging = load.max_age if load.oldest is not None and not load.paused_by_person else None
    oldest = min(load.oldest or now, now)
    if trip is None:
        if aging:
            yield oldest + aging
        return
    if pressure < settings.low_mark:
        yield trip.changed_at + settings.min_hold
    if trip.tier is Tier.BULK:
        if trip.over_since is not None:
            yield trip.over_since + settings.patience
        if aging:
            yield oldest + (aging if trip.over_since is None else 2 * aging)


class _Graph(Generic[J]):
    """Upstream searches; only those of tripped jobs are made, so that a calm graph costs nothing."""

    def __init__(self, jobs: Mapping[J, JobLoad[J]]) -> None:
        self._jobs = jobs
        self._consumers: dict[J, list[J]] | None = None

    def upstream(self, job: J) -> dict[J, tuple[J, ...]]:
        """Every producer from which ``job`` gets work, with its chain down to it. Not those that get work from it
        in turn: of two jobs that held each other, neither would ever be released."""
        chains: dict[J, tuple[J, ...]] = {job: (job,)}
        waiting = deque([job])
        while waiting:
            each = waiting.popleft()
            for producer in self._jobs[each].producers:
                if producer not in chains and producer in self._jobs:
                    chains[producer] = (producer, *chains[each])
                    waiting.append(producer)
        del chains[job]
        if not chains:
            return chains
        below = self._downstream(job, chains)
        return {each: chain for each, chain in chains.items() if each not in below}

    def _downstream(self, job: J, within: Mapping[J, object]) -> set[J]:
        """Those of ``within`` that get work from ``job``: any way from it to them stays within its producers."""
        if self._consumers is None:
            self._consumers = {}
            for each, load in self._jobs.items():
                for producer in load.producers:
                    self._consumers.setdefault(producer, []).append(each)
        below: set[J] = set()
        waiting = deque([job])
        while waiting:
            for consumer in self._consumers.get(waiting.popleft(), ()):
                if consumer in within and consumer not in below:
                    below.add(consumer)
                    waiting.append(consumer)
        return below
