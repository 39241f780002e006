"""One round of a scheduler: what is scheduled, which ticks are due, and sending them.

``due_of`` decides; ``run_round`` asks and sends. Nothing is kept between rounds, so a round may be run by a process
that waits for the next tick, by several of them, or by a Lambda that a rule invokes every minute. A round that is
repeated, or cut off anywhere, makes no tick twice and loses none: the next one finds it due again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import structlog

from tracelake.contracts.sources import MAX_TICKS, ScheduledSource, SchedulesResponse, TickIn, TickOut
from tracelake.domain.dag.model import CatchUp
from tracelake.domain.schedule import due_ticks, next_tick, parse_schedule

_log = structlog.get_logger(__name__)


class TickClient(Protocol):
    """The Dispatcher as a scheduler sees it."""

    async def schedules(self, scheduler_id: str) -> SchedulesResponse: ...

    async def send_ticks(self, ticks: Sequence[TickIn]) -> list[TickOut]: ...


@dataclass(frozen=True, slots=True)
class DueRound:
    """The result of a decision: ticks to send, how many missed ones are left out, and when the next one comes."""

    ticks: list[TickIn]
    skipped: int
    next_at: datetime | None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """``now`` is the state database's time at the round's beginning."""

    acting: bool
    now: datetime
    next_at: datetime | None
    sent: list[TickOut]
    skipped: int


def due_of(sources: Sequence[ScheduledSource], now: datetime) -> DueRound:
    ticks: list[TickIn] = []
    skipped = 0
    upcoming: list[datetime] = []
    for source in sources:
        # This machine may have another list of zones than the one that accepted the schedule. Whatever is wrong
        # with one source, the others have their ticks.
        try:
            schedule = parse_schedule(source.schedule, source.timezone)
            due = due_ticks(schedule, source.after, now, source.catch_up)
            # Of more than one round makes, the next one is due already.
            made = source.catch_up is CatchUp.ALL and due.ticks
            last = datetime.fromtimestamp(due.ticks[-1], now.tzinfo) if made else max(now, source.after)
            following = next_tick(schedule, last)
        except Exception as error:
            _log.error("schedule_unusable", job=f"{source.dag_name}/{source.job}", error=str(error))
            continue
        ticks += [TickIn(source.dag_name, source.job, tick) for tick in due.ticks]
        skipped += due.skipped
        if following is not None:
            upcoming.append(following)
    return DueRound(ticks, skipped, min(upcoming, default=None))


async def run_round(
    client: TickClient, scheduler_id: str, on_answer: Callable[[bool], None] = lambda acting: None
) -> RoundResult:
    """``on_answer`` is called with each of the Dispatcher's answers: whether this scheduler acts."""
    answer = await client.schedules(scheduler_id)
    on_answer(answer.acting)
    if not answer.acting:
        return RoundResult(False, answer.now, None, [], 0)
    found = due_of(answer.sources, answer.now)
    sent: list[TickOut] = []
    # In order: a later tick of a source makes the earlier ones known.
    for start in range(0, len(found.ticks), MAX_TICKS):
        sent += await client.send_ticks(found.ticks[start : start + MAX_TICKS])
        on_answer(True)
    return RoundResult(True, answer.now, found.next_at, sent, found.skipped)
