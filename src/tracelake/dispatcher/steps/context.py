"""The context of every step: the state database and its companions, and the limits on what one attempt may emit.

Each event is a row, and mostly a task: a faulty operator, or a range of 2^62 blocks in chunks of one, would fill
the state database until a person notices. So events and records beyond a limit are refused, for good. A source
never ends, so for it the limit holds per hour.

A process counts what it has accepted and queries the database only now and then, where the events accepted by other
replicas are seen too, so the limit may be exceeded by a tenth for each replica. Before an attempt is refused the
database decides: a request that was sent twice counts once there.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from prometheus_client import CollectorRegistry

from tracelake.contracts.token_claims import AUDIENCE, ISSUER
from tracelake.dispatcher.metrics import StepMetrics
from tracelake.dispatcher.runtimes import RuntimeRegistry
from tracelake.domain.entropy import Entropy
from tracelake.domain.errors import Invalid
from tracelake.domain.events import MAX_TASK_BYTES, MAX_TASK_EVENTS, MAX_TASK_RECORDS
from tracelake.domain.pressure import PressureSettings
from tracelake.domain.task import TaskKind
from tracelake.objects.base import ObjectStore
from tracelake.store import datasets
from tracelake.store.buffers import KnownBuffer
from tracelake.store.db import Database, Transaction
from tracelake.store.jobs import JobDefinitions
from tracelake.store.tasks import TaskRow
from tracelake.tokens.signing import Signer

_KEPT = 10_000
_SOURCE_PERIOD = timedelta(hours=1)


@dataclass(slots=True)
class EmissionTally:
    """The emissions of an attempt. ``unseen`` counts the events since the last query of the database."""

    since: datetime
    events: int = 0
    unseen: int = 0
    records: int = 0
    bytes: int = 0
    refused: bool = False


class Emissions:
    """Tallies of the attempts that emitted most recently; one that was dropped starts again at zero."""

    def __init__(
        self, *, events: int = MAX_TASK_EVENTS, records: int = MAX_TASK_RECORDS, size: int = MAX_TASK_BYTES
    ) -> None:
        self.max_events = events
        self.max_records = records
        self.max_bytes = size
        self._tallies: OrderedDict[tuple[UUID, int], EmissionTally] = OrderedDict()

    def refused(self, task: TaskRow) -> bool:
        """Whether the task's current attempt has exceeded a limit: another attempt would emit as much again."""
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
        """Call after the commit that accepted them."""
        tally = self.of(task)
        tally.events += more
        tally.unseen += more

    def add_records(self, task: TaskRow, records: int, size: int) -> None:
        tally = self.of(task)
        tally.records += records
        tally.bytes += size

    def known(self, task: TaskRow) -> bool:
        return (task.task_id, task.state.attempt) in self._tallies

    def of(self, task: TaskRow) -> EmissionTally:
        key = (task.task_id, task.state.attempt)
        tally = self._tallies.get(key)
        if tally is None or (task.state.kind is TaskKind.SOURCE and task.now - tally.since >= _SOURCE_PERIOD):
            tally = self._tallies[key] = EmissionTally(task.now)
        self._tallies.move_to_end(key)
        # A forgotten attempt counts from zero here, but the database still knows its events.
        while len(self._tallies) > _KEPT:
            self._tallies.popitem(last=False)
        return tally


async def check_events(emissions: Emissions, tx: Transaction, task: TaskRow, more: int) -> None:
    """Raises when the attempt may not emit ``more`` events. Called under its fence."""
    if not more:
        return
    tally, most = emissions.of(task), emissions.max_events
    due = tally.unseen >= most // 10 or tally.events + more > most
    # A refusal is final: a flood of refused requests isn't counted again each time.
    if due and not tally.refused and task.state.kind is not TaskKind.SOURCE:
        tally.events = await datasets.count_events_of_attempt(tx, task.task_id, task.state.attempt, most + 1)
        tally.unseen = 0
    if tally.refused or tally.events + more > most:
        raise _refused(tally, task, "events", tally.events, more, most)


def _refused(tally: EmissionTally, task: TaskRow, what: str, before: int, more: int, most: int) -> Invalid:
    tally.refused = True
    period = "within an hour" if task.state.kind is TaskKind.SOURCE else "in all"
    return Invalid(
        "TooMuchEmitted",
        f"attempt {task.state.attempt} of task {task.task_id} has emitted {before:,} {what}, {more:,} more are "
        f"refused: one attempt may emit {most:,} {period}; split the work, or raise the limit",
    )


@dataclass(slots=True)
class QueueChanges:
    """Tasks that this process has created and claimed since the last look at the queues. ``due`` is set when they
    may have filled a queue, or emptied one: so most commits cost no look, and the one that matters causes it at
    once."""

    due: asyncio.Event = field(default_factory=asyncio.Event)
    created: int = 0
    claimed: int = 0
    until_full: int = 1
    until_empty: int = 1

    def note(self, *, created: int = 0, claimed: int = 0) -> None:
        self.created += created
        self.claimed += claimed
        if self.created >= self.until_full or self.claimed >= self.until_empty:
            self.due.set()

    def look_soon(self) -> None:
        """Something else has changed: a pause, a deploy, a kept event."""
        self.due.set()

    def looking(self) -> None:
        """A look begins: what it doesn't see is noted for the next one."""
        self.due.clear()
        self.created = self.claimed = 0

    def looked(self, until_full: int, until_empty: int) -> None:
        """Half of the way to the next change: other replicas create and claim as well."""
        self.until_full = max(1, until_full // 2)
        self.until_empty = max(1, until_empty // 2)
        self.note()


@dataclass(frozen=True, slots=True)
class HookLimits:
    """Deliveries that a webhook accepts per second on average, and at once."""

    rate: float = 20.0
    burst: float = 100.0


@dataclass(frozen=True, slots=True)
class StepContext:
    db: Database
    entropy: Entropy
    definitions: JobDefinitions
    objects: ObjectStore
    signer: Signer
    runtimes: RuntimeRegistry
    org_id: UUID
    issuer: str = ISSUER
    audience: str = AUDIENCE
    missing_work: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a deploy or a resume may have left missing tasks for the reconciler to create."""
    queues: QueueChanges = field(default_factory=QueueChanges)
    """Noted after commits: a job may have to be held or released."""
    pressure: PressureSettings = field(default_factory=PressureSettings)
    waiting_requests: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a source may have been released that has kept requests."""
    buffers: dict[UUID | str, KnownBuffer] = field(default_factory=dict)
    """Cached buffered datasets by uuid and by name; verified again in the transaction that uses them."""
    emissions: Emissions = field(default_factory=Emissions)
    """Emissions of attempts, as counted by this process."""
    hook_limits: HookLimits = field(default_factory=HookLimits)
    metrics: StepMetrics = field(default_factory=lambda: StepMetrics(CollectorRegistry()))
