"""How much one attempt may emit: events, and records for buffered datasets. What is above is refused, for good.

Each event is a row, and mostly a task: an operator gone wrong, or a range of 2^62 blocks in chunks of one, would
fill the state database until somebody notices. A source has no end, so what holds for an attempt holds for it
within an hour.

A process counts what it has accepted and asks the database only now and then, where what other replicas accepted
counts too, so the cap may be passed by a tenth for each replica. Before an attempt is refused the database has the
last word: a request that came twice counts once there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime, timedelta
from uuid import UUID

from tracelake.domain.errors import Invalid
from tracelake.domain.events import MAX_TASK_BYTES, MAX_TASK_EVENTS, MAX_TASK_RECORDS
from tracelake.domain.task import TaskKind
from tracelake.store import events
from tracelake.store.db import Transaction
from tracelake.store.tasks import TaskRow

_KEPT = 10_000
_SOURCE_PERIOD = timedelta(hours=1)


@dataclass(slots=True)
class Tally:
    """What an attempt has emitted. ``unseen`` is how much of it came after the last look at the database."""

    since: datetime
    events: int = 0
    unseen: int = 0
    records: int = 0
    bytes: int = 0
    refused: bool = False


class Emissions:
    """Tallies of the attempts that emitted last; those that were forgotten begin anew."""

    def __init__(
        self, *, events: int = MAX_TASK_EVENTS, records: int = MAX_TASK_RECORDS, size: int = MAX_TASK_BYTES
    ) -> None:
        self.max_events = events
        self.max_records = records
        self.max_bytes = size
        self._tallies: OrderedDict[tuple[UUID, int], Tally] = OrderedDict()

    def refused(self, task: TaskRow) -> bool:
        """Has the task's current attempt been refused something? Another one would emit as much again."""
        tally = self._tallies.get((task.task_id, task.state.attempt))
        return tally is not None and tally.refused

    def check_records(self, task: TaskRow, records: int, size: int) -> None:
        tally = self.of(task)
        for what, more, before, most in (
            ("records", records, tally.records, self.max_records),
            ("bytes of records", size, tally.bytes, self.max_bytes),
        ):
            if before + more > most:
                raise _refused(tally, task, what, before, more, most)

    def add_events(self, task: TaskRow, more: int) -> None:
        """After the commit that accepted them."""
        tally = self.of(task)
        tally.events += more
        tally.unseen += more

    def add_records(self, task: TaskRow, records: int, size: int) -> None:
        tally = self.of(task)
        tally.records += records
        tally.bytes += size

    def known(self, task: TaskRow) -> bool:
        return (task.task_id, task.state.attempt) in self._tallies

    def of(self, task: TaskRow) -> Tally:
        key = (task.task_id, task.state.attempt)
        tally = self._tallies.get(key)
        if tally is None or (task.state.kind is TaskKind.SOURCE and task.now - tally.since >= _SOURCE_PERIOD):
            tally = self._tallies[key] = Tally(task.now)
        self._tallies.move_to_end(key)
        while len(self._tallies) > _KEPT:
            self._tallies.popitem(last=False)
        return tally


async def check_events(emissions: Emissions, tx: Transaction, task: TaskRow, more: int) -> None:
    """May the attempt emit so many more events? Called under its fence."""
    if not more:
        return
    tally, most = emissions.of(task), emissions.max_events
    due = tally.unseen >= most // 10 or tally.events + more > most
    if due and not tally.refused and task.state.kind is not TaskKind.SOURCE:
        tally.events = await events.count_of_attempt(tx, task.task_id, task.state.attempt, most + 1)
        tally.unseen = 0
    if tally.refused or tally.events + more > most:
        raise _refused(tally, task, "events", tally.events, more, most)


def _refused(tally: Tally, task: TaskRow, what: str, before: int, more: int, most: int) -> Invalid:
    tally.refused = True
    period = "within an hour" if task.state.kind is TaskKind.SOURCE else "in all"
    return Invalid(
        "TooMuchEmitted",
        f"attempt {task.state.attempt} of task {task.task_id} has emitted {before:,} {what}, {more:,} more are "
        f"refused: one attempt may emit {most:,} {period}; split the work, or raise the limit",
    )
