"""What a follower is doing, decided purely from its task, its job's pauses and what it last reported.

A report is only as good as its age: a follower that is paused, whose worker has died or whose endpoints don't
answer goes on showing the numbers of its last report. So the condition is decided by what could make them old, in
order, and only a follower that has read the chain's head a moment ago is called following or catching up. A time of
a report is by the clock of the worker; leases and pauses are by the database's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

BEHIND = 100
"""A follower that is this many blocks behind is catching up."""
SILENT_SECONDS = 30.0
"""A follower that hasn't read the head for this time is silent. One that is catching up is busy with its blocks."""
SILENT_CATCHING_UP_SECONDS = 180.0
PERSON = "person"
_LATEST = 2**40
"""Seconds; a later time in a report isn't one."""


class ChainCondition(StrEnum):
    FOLLOWING = "following"
    CATCHING_UP = "catching_up"
    STARTING = "starting"
    WAITING = "waiting"
    """The endpoints answer, but not in a way that can be followed now."""
    PAUSED = "paused"
    """By a person, whatever holds it beside that."""
    HELD = "held"
    """By the pressure of another job."""
    UNREACHABLE = "unreachable"
    """No endpoint gives an answer that can be used."""
    TROUBLED = "troubled"
    """Something else fails, such as the data database."""
    SILENT = "silent"
    """Its task runs, but it hasn't read the head for a while."""
    GONE = "gone"
    """Its worker doesn't extend the lease any more."""
    QUEUED = "queued"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class PauseFact:
    """One of the causes why a job is paused; ``actor`` is the person, if it was one."""

    cause: str
    actor: str | None
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerFacts:
    """The newest task of a follower that isn't canceled; ``status`` None when there is none. ``claimed_at`` is of
    its current attempt, ``reported`` what that attempt last reported. ``error_message`` is of the attempt that
    failed last, at ``failed_at``."""

    now: datetime
    status: str | None
    runtime: str = ""
    pauses: Sequence[PauseFact] = ()
    reported: Mapping[str, Any] | None = None
    claimed_at: datetime | None = None
    lease_expires_at: datetime | None = None
    ready_at: datetime | None = None
    ended_at: datetime | None = None
    error_message: str | None = None
    failed_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerStatus:
    """``state`` is the condition in words. ``known_age_seconds``: the time since the head was read last, which is
    how old all numbers of the report are. ``lag_seconds``: the time between the block that the tables end with and
    the head. ``head_age_seconds``: the age of the head itself. ``last_error`` is what is wrong now, or what ended
    the attempt before the one that runs, until this one has read the head."""

    condition: ChainCondition
    since: datetime | None
    state: str
    last_error: str | None = None
    last_error_since: datetime | None = None
    known_at: datetime | None = None
    known_age_seconds: float | None = None
    lag_seconds: float | None = None
    head_age_seconds: float | None = None


def follower_status(facts: FollowerFacts) -> FollowerStatus:
    reported = facts.reported or {}
    known_at = _time(reported.get("head_at"))
    head_time = _time(reported.get("head_time"))
    condition, since, state = _condition(facts, reported, known_at)
    error, error_since = _last_error(facts, reported, known_at)
    return FollowerStatus(
        condition=condition,
        since=since,
        state=state,
        last_error=error,
        last_error_since=error_since,
        known_at=known_at,
        known_age_seconds=_age(facts.now, known_at),
        lag_seconds=_number(reported.get("lag_seconds")),
        head_age_seconds=_age(facts.now, head_time),
    )


def _last_error(
    facts: FollowerFacts, reported: Mapping[str, Any], known_at: datetime | None
) -> tuple[str | None, datetime | None]:
    if problem := _text(reported.get("problem")):
        return problem, _time(reported.get("problem_since"))
    recovered = facts.status == "Running" and known_at is not None
    if facts.error_message is None or recovered:
        return None, None
    return facts.error_message, facts.failed_at


def _condition(
    facts: FollowerFacts, reported: Mapping[str, Any], known_at: datetime | None
) -> tuple[ChainCondition, datetime | None, str]:
    if facts.status is None or facts.status == "Canceled":
        return ChainCondition.STOPPED, facts.ended_at, "stopped: it has no task"
    if facts.status == "Failed":
        return ChainCondition.FAILED, facts.ended_at, _since("failed", facts.ended_at, facts.error_message)
    if facts.pauses:
        since = min(each.since for each in facts.pauses)
        by_person = any(each.cause == PERSON for each in facts.pauses)
        condition = ChainCondition.PAUSED if by_person else ChainCondition.HELD
        return condition, since, "; ".join(map(_pause, facts.pauses))
    if facts.status != "Running":
        if facts.ready_at is not None and facts.ready_at > facts.now:
            when = f"{facts.ready_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z"
            return ChainCondition.QUEUED, None, _since(f"queued: next try at {when}", None, _failed(facts))
        waits = f"queued: waits for a worker of {facts.runtime}"
        return ChainCondition.QUEUED, facts.ready_at, _since(waits, facts.ready_at, _failed(facts))
    if facts.lease_expires_at is not None and facts.lease_expires_at <= facts.now:
        return (
            ChainCondition.GONE,
            facts.lease_expires_at,
            _since("its worker is gone", facts.lease_expires_at),
        )
    return _running(facts, reported, known_at)


def _running(
    facts: FollowerFacts, reported: Mapping[str, Any], known_at: datetime | None
) -> tuple[ChainCondition, datetime | None, str]:
    if problem := _text(reported.get("problem")):
        since = _time(reported.get("problem_since"))
        if reported.get("problem_of") == "chain":
            # The pool repeats a request for a minute before it gives up: the last good answer is older.
            since = min((each for each in (since, known_at) if each is not None), default=None)
            return ChainCondition.UNREACHABLE, since, _since("endpoint unreachable", since, problem)
        return ChainCondition.TROUBLED, since, _since("waiting: temporary problem", since, problem)
    behind = _number(reported.get("lag"))
    far = behind is not None and behind >= BEHIND
    age = _age(facts.now, known_at)
    if age is not None and age > (SILENT_CATCHING_UP_SECONDS if far else SILENT_SECONDS):
        return ChainCondition.SILENT, known_at, _since("nothing read from the chain", known_at)
    message = _text(reported.get("message"))
    if message is None:
        return ChainCondition.STARTING, facts.claimed_at, _since("starting", facts.claimed_at)
    if message not in ("following the tip", "catching up"):
        return ChainCondition.WAITING, known_at, message
    if far:
        rate = _number(reported.get("blocks_per_second"))
        speed = f" at {rate:,.1f} blocks/s" if rate is not None else ""
        return ChainCondition.CATCHING_UP, facts.claimed_at, f"catching up{speed}"
    return ChainCondition.FOLLOWING, facts.claimed_at, "following the tip"


def _pause(pause: PauseFact) -> str:
    if pause.cause == PERSON:
        by = f" by {pause.actor}" if pause.actor else ""
        return _since(f"paused{by}", pause.since)
    return _since(f"held by {pause.cause}", pause.since)


def _failed(facts: FollowerFacts) -> str | None:
    """Why the last attempt failed, and when."""
    if facts.error_message is None or facts.failed_at is None:
        return facts.error_message
    return f"{facts.error_message} (at {facts.failed_at.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z)"


def _since(what: str, since: datetime | None, why: str | None = None) -> str:
    at = f" since {since.astimezone(UTC):%Y-%m-%d %H:%M:%S}Z" if since is not None else ""
    return f"{what}{at}" + (f": {why}" if why else "")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _time(value: object) -> datetime | None:
    """A time in seconds since 1970, as a report has it."""
    seconds = _number(value)
    return None if seconds is None or not 0 <= seconds < _LATEST else datetime.fromtimestamp(seconds, UTC)


def _age(now: datetime, then: datetime | None) -> float | None:
    # Clocks of two machines differ a little.
    return None if then is None else max(0.0, (now - then).total_seconds())
