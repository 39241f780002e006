"""Simulated workers: they take wake-ups, claim, work and report; and they crash, stall and return after their
lease.

``Lease`` is a lease as its holder knows it, with its heartbeats. Tasks read their inputs at their time and
write their outputs. They trust the Dispatcher: a reader that finds nothing committed makes an empty output, as
an engine with an empty list of files does; the Dispatcher decides whether such work counts. The always-on
source follows the chain into its hot table, and sends its events before it goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from uuid import UUID

import msgspec

from tests.support.simulation import calls
from tests.support.simulation.calls import CallLost
from tests.support.simulation.connection import SQL
from tests.support.simulation.graph import CHUNK, LEASE, RANGE
from tests.support.simulation.world import HotTable, OutboxEntry, World
from tracelake.contracts.dispatcher_api import (
    ClaimRequest,
    ClaimResponse,
    CompleteRequest,
    EventIn,
    EventsRequest,
    EventsResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    InvalidateRange,
    OutputIn,
    PayloadInput,
    TaskPayload,
)
from tracelake.domain.block_range import BlockRange
from tracelake.objects.base import ObjectPrefix

MAX_OBJECT = 1 << 20
OLD_CURSOR = 9_999


class LeaseSignal(Enum):
    """The meaning of a heartbeat's answer to the holder."""

    GO_ON = "go on"
    CANCEL = "cancel"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Lease:
    payload: TaskPayload
    attempt: int
    token: UUID

    @classmethod
    def of(cls, answer: ClaimResponse) -> Lease | None:
        if answer.task is None or answer.attempt is None or answer.lease_token is None:
            return None
        return cls(answer.task, answer.attempt, answer.lease_token)

    @property
    def task_id(self) -> UUID:
        return self.payload.task_id

    def ended(self, status: str, *, retryable: bool = True) -> CompleteRequest:
        match status:
            case "Failed":
                return CompleteRequest(
                    self.task_id, "Failed", self.attempt, self.token, error_message="no", retryable=retryable
                )
            case "Released":
                return CompleteRequest(self.task_id, "Released", self.attempt, self.token)
            case "Canceled":
                return CompleteRequest(self.task_id, "Canceled", self.attempt, self.token)
            case _:
                return CompleteRequest(self.task_id, "Completed", self.attempt, self.token)

    async def beat(self, world: World) -> LeaseSignal:
        answer = await calls.beat(world, HeartbeatRequest(self.task_id, self.attempt, self.token))
        if isinstance(answer, HeartbeatResponse):
            return LeaseSignal.CANCEL if answer.cancel else LeaseSignal.GO_ON
        return LeaseSignal.LOST


@dataclass(frozen=True, slots=True)
class Made:
    """What an attempt has to report: outputs that it wrote, events about scopes without storage."""

    outputs: list[OutputIn] = field(default_factory=list)
    events: list[EventIn] = field(default_factory=list)


def span_of(payload: TaskPayload) -> tuple[int, int]:
    """The first and last block that an attempt works on; empty when the first is above the last."""
    first = payload.inputs[0]
    if isinstance(first.start, int) and isinstance(first.end, int):
        return first.start, first.end
    after = [i.after for i in payload.inputs if isinstance(i.after, int)]
    upto = [i.upto for i in payload.inputs if isinstance(i.upto, int)]
    return min(after) + 1, max(upto)


def first_act(world: World, payload: TaskPayload) -> None:
    """Writers of hot tables fence what they will write before they do anything else."""
    output = payload.outputs[0]
    if output.storage == "postgres" and payload.epoch is not None:
        start, _ = span_of(payload) if payload.inputs else (0, 0)
        world.data.table(output.dataset_version).fence(payload.epoch, start)


async def read_inputs(world: World, payload: TaskPayload) -> dict[int, str]:
    """The rows that this attempt makes, from what it finds in its inputs right now."""
    start, end = span_of(payload)
    tag = payload.config["tag"]
    if payload.operator == "ingest":
        return {block: f"{tag}(m{block})" for block in range(start, end + 1)}
    columns = [await _rows(world, i, start, end) for i in payload.inputs if i.storage != "none"]
    return {
        block: f"{tag}({','.join(column[block] for column in columns)})"
        for block in range(start, end + 1)
        if columns and all(block in column for column in columns)
    }


async def _rows(world: World, source: PayloadInput, start: int, end: int) -> dict[int, str]:
    if source.storage == "postgres":
        rows = world.data.table(source.dataset_version).rows
        return {block: row for block, row in rows.items() if start <= block <= end}
    return await committed_rows(world, source.dataset_version, start, end)


async def committed_rows(world: World, version: UUID, start: int, end: int) -> dict[int, str]:
    """What the committed files of a version say about a range."""
    found = await world.scheduler.turn(
        "reads committed partitions",
        lambda: world.observer.read(SQL.committed_partitions, version, start, end),
    )
    rows: dict[int, str] = {}
    for partition in found:
        for stat in await world.objects.list(ObjectPrefix.parse(partition["location"])):
            content = json.loads(await world.objects.read(stat.location, MAX_OBJECT))
            rows |= {int(block): row for block, row in content.items() if start <= int(block) <= end}
    return rows


async def write_outputs(world: World, payload: TaskPayload, rows: dict[int, str]) -> Made | None:
    """Put the rows where they belong; None when a newer attempt has fenced this one off."""
    start, end = span_of(payload)
    output = payload.outputs[0]
    match payload.operator:
        case "map":
            table = world.data.table(output.dataset_version)
            taken_back = [i.invalidation.end for i in payload.inputs if i.invalidation is not None]
            last = max([end, *taken_back])
            assert payload.epoch is not None
            if last >= start and not table.replace(payload.epoch, start, last, rows):
                return None
            return Made([OutputIn(0, cursor=end)] if end >= 0 else [])
        case "append":
            world.data.table(output.dataset_version).append(rows)
            return Made([OutputIn(0, cursor=end)] if end >= 0 else [])
        case "aggregate":
            ends = [last for last in range(start, end + 1) if last % RANGE == RANGE - 1]
            return Made(events=[_made_event(payload, last - RANGE + 1, last) for last in ends])
        case "split":
            chunks = BlockRange(start, end).split_on_grid(CHUNK)
            return Made(events=[_made_event(payload, chunk.start, chunk.end) for chunk in chunks])
        case _:
            assert output.staging is not None
            place = ObjectPrefix.parse(output.staging)
            content = json.dumps({str(block): row for block, row in sorted(rows.items())}).encode()
            await world.objects.put(place.location(f"rows_{start}_{end}.parquet"), content)
            return Made([OutputIn(0, location=place.uri, row_count=len(rows), start=start, end=end)])


def _made_event(payload: TaskPayload, start: int, end: int) -> EventIn:
    output = payload.outputs[0]
    return EventIn(
        dataset_uuid=output.dataset_uuid,
        dataset_version=output.dataset_version,
        start=start,
        end=end,
        revision=output.revision,
    )


async def follow(world: World, lease: Lease, maybe_crash: Callable[[], None]) -> bool:
    """Follow for a while; False when the lease was lost or taken away."""
    output, epoch = lease.payload.outputs[0], lease.payload.epoch
    assert epoch is not None
    table = world.data.table(output.dataset_version)
    table.fence(epoch, 0)
    revision = await drain_outbox(world, lease, table, output.revision)
    for _ in range(world.rng.randint(2, 8)):
        if revision is None:
            return False
        maybe_crash()
        if world.chance(world.profile.zombie / 4):
            await world.scheduler.sleep(world.rng.uniform(1, 2) * LEASE)
        await world.scheduler.turn("looks at the chain")
        if not table.follow(epoch, world.chain, world.rng.randint(1, 6)):
            return False
        maybe_crash()
        revision = await drain_outbox(world, lease, table, revision)
        await _maybe_old_version(world, lease)
        if world.chance(0.6) and await lease.beat(world) is not LeaseSignal.GO_ON:
            return False
        await world.scheduler.sleep(world.rng.uniform(0, 0.5) * LEASE)
    return revision is not None


async def drain_outbox(world: World, lease: Lease, table: HotTable, revision: int) -> int | None:
    """Send the table's outbox to the Dispatcher, in order; return the revision of its answer, or None."""
    while table.outbox:
        entry = table.outbox[0]
        request = EventsRequest(
            lease.task_id, lease.attempt, [_outbox_event(lease, entry, revision)], lease.token
        )
        answer = await calls.send_events(world, request)
        if not isinstance(answer, EventsResponse):
            return None
        if table.outbox and table.outbox[0] is entry:
            table.outbox.popleft()
        revision = answer.events[0].revision
    return revision


def _outbox_event(lease: Lease, entry: OutboxEntry, revision: int) -> EventIn:
    output = lease.payload.outputs[0]
    if entry.invalidated is not None:
        return EventIn(
            dataset_uuid=output.dataset_uuid,
            dataset_version=output.dataset_version,
            id=entry.id,
            invalidate=InvalidateRange(*entry.invalidated),
            reason="reorg",
        )
    return EventIn(
        dataset_uuid=output.dataset_uuid,
        dataset_version=output.dataset_version,
        cursor=entry.cursor,
        revision=revision,
    )


async def _maybe_old_version(world: World, lease: Lease) -> None:
    """Now and then a word about a generation that a deploy has replaced."""
    output = lease.payload.outputs[0]
    old = [v for u, v in world.old_versions if u == output.dataset_uuid and v != output.dataset_version]
    version = world.pick(old)
    if version is not None and world.chance(0.3):
        event = EventIn(dataset_uuid=output.dataset_uuid, dataset_version=version, cursor=OLD_CURSOR)
        await calls.send_events(world, EventsRequest(lease.task_id, lease.attempt, [event], lease.token))


class Crashed(Exception):
    """The worker's process is gone; another one starts in its place."""


class Worker:
    def __init__(self, world: World, name: str) -> None:
        self._world = world
        self._name = name
        self._lives = 0

    @property
    def worker_id(self) -> str:
        return f"{self._name}.{self._lives}"

    async def live(self) -> None:
        while True:
            try:
                await self._next_message()
            except (Crashed, CallLost):
                self._lives += 1
                await self._world.scheduler.sleep(self._world.rng.uniform(0.5, 5))

    async def _next_message(self) -> None:
        world = self._world
        most = world.rng.randint(1, 3) if world.profile.batches else 1
        received = (world.queue.receive(world.scheduler.now) for _ in range(most))
        messages = list(dict.fromkeys(task_id for task_id in received if task_id is not None))
        if not messages:
            await world.scheduler.sleep(world.rng.uniform(0.5, 4))
            return
        try:
            await world.scheduler.turn(f"has {len(messages)} wake-ups")
            leases = await self._claim(messages)
        except BaseException:
            for task_id in messages:
                world.queue.give_back(task_id, world.scheduler.now)
            raise
        await self._work(leases)

    async def _claim(self, messages: list[UUID]) -> list[Lease]:
        world = self._world
        for task_id in messages:
            world.see(task_id)
        key = f"{self.worker_id}-{world.rng.getrandbits(32):08x}"
        requests = [ClaimRequest(task_id, self.worker_id, key) for task_id in messages]
        answers = await calls.claim(world, requests)
        return [lease for answer in answers if (lease := Lease.of(answer)) is not None]

    async def _work(self, leases: list[Lease]) -> None:
        reports = []
        for lease in leases:
            report = await self._run(lease)
            if report is not None:
                await self._maybe_impostor(report)
                reports.append(report)
        if reports and self._world.chance(0.5):
            await calls.complete(self._world, reports)
        else:
            for report in reports:
                await calls.complete(self._world, [report])

    async def _run(self, lease: Lease) -> CompleteRequest | None:
        """Work on a lease up to its report; None when there is nothing to report any more."""
        world, profile = self._world, self._world.profile
        if lease.payload.operator == "follow":
            return await self._follow(lease)
        zombie = world.chance(profile.zombie)
        first_act(world, lease.payload)
        if (word := await self._spend_time(lease, zombie)) is not None:
            return word
        rows = await read_inputs(world, lease.payload)
        if (word := await self._spend_time(lease, zombie)) is not None:
            return word
        if (status := self._other_end()) is not None:
            return lease.ended(status, retryable=not world.chance(0.2))
        await world.scheduler.turn("writes its outputs")
        made = await write_outputs(world, lease.payload, rows)
        if made is None:
            return None
        if zombie:
            await world.scheduler.sleep(world.rng.uniform(1, 3) * LEASE)
        return await self._report(lease, made)

    async def _report(self, lease: Lease, made: Made) -> CompleteRequest:
        world = self._world
        self._maybe_crash()
        events = made.events
        if events and world.chance(0.4):
            await calls.send_events(world, EventsRequest(lease.task_id, lease.attempt, events, lease.token))
            events = events if world.chance(0.5) else []
        self._maybe_crash()
        done = lease.ended("Completed")
        return msgspec.structs.replace(done, outputs=made.outputs, events=events)

    async def _follow(self, lease: Lease) -> CompleteRequest | None:
        world = self._world
        if not await follow(world, lease, self._maybe_crash):
            return None
        self._maybe_crash()
        return lease.ended(world.rng.choice(("Released", "Failed", "Completed")))

    async def _spend_time(self, lease: Lease, zombie: bool) -> CompleteRequest | None:
        """Time passes; a holder that is alive says so, a slow one when its lease is over already, and listens."""
        world = self._world
        self._maybe_crash()
        if world.chance(0.5):
            await world.scheduler.sleep(world.rng.uniform(0, 0.7) * LEASE)
        if zombie and world.chance(0.5):
            await world.scheduler.sleep(world.rng.uniform(0.9, 1.5) * LEASE)
        elif zombie or world.chance(0.4):
            return None
        match await lease.beat(world):
            case LeaseSignal.CANCEL if world.chance(0.7):
                return lease.ended("Canceled")
            case _:
                return None

    def _other_end(self) -> str | None:
        if self._world.chance(self._world.profile.fails):
            return "Failed"
        return "Released" if self._world.chance(self._world.profile.releases) else None

    def _maybe_crash(self) -> None:
        if self._world.chance(self._world.profile.crash / 4):
            raise Crashed

    async def _maybe_impostor(self, report: CompleteRequest) -> None:
        """A process without the lease sends the same report."""
        world = self._world
        if not world.chance(world.profile.impostor):
            return
        assert report.attempt is not None
        wrong = world.rng.choice(("token", "attempt"))
        if wrong == "token":
            forged = msgspec.structs.replace(report, lease_token=world.uuid())
        else:
            forged = msgspec.structs.replace(report, attempt=report.attempt + world.rng.choice((1, 2)))
        await calls.complete(world, [forged])
