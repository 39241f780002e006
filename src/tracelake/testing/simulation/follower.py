"""The always-on source: it follows the chain into its hot table, and says what it did before it goes on."""

from __future__ import annotations

from collections.abc import Callable

from tracelake.contracts.dispatcher_api import EventIn, EventsRequest, EventsResponse, InvalidateRange
from tracelake.testing.simulation import calls
from tracelake.testing.simulation.data_plane import HotTable, Said
from tracelake.testing.simulation.graph import LEASE
from tracelake.testing.simulation.lease import Lease, Word
from tracelake.testing.simulation.world import World

OLD_CURSOR = 9_999


async def follow(world: World, lease: Lease, maybe_crash: Callable[[], None]) -> bool:
    """Follow for a while; False when the lease was lost or taken away."""
    output, epoch = lease.payload.outputs[0], lease.payload.epoch
    assert epoch is not None
    table = world.data.table(output.dataset_version)
    table.fence(epoch, 0)
    revision = await drain(world, lease, table, output.revision)
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
        revision = await drain(world, lease, table, revision)
        await _maybe_old_version(world, lease)
        if world.chance(0.6) and await lease.beat(world) is not Word.GO_ON:
            return False
        await world.scheduler.sleep(world.rng.uniform(0, 0.5) * LEASE)
    return revision is not None


async def drain(world: World, lease: Lease, table: HotTable, revision: int) -> int | None:
    """Tell the Dispatcher what the table's outbox holds, in order; the revision it has told us, or None."""
    while table.outbox:
        said = table.outbox[0]
        request = EventsRequest(lease.task_id, lease.attempt, [_event(lease, said, revision)], lease.token)
        answer = await calls.send_events(world, request)
        if not isinstance(answer, EventsResponse):
            return None
        if table.outbox and table.outbox[0] is said:
            table.outbox.popleft()
        revision = answer.events[0].revision
    return revision


def _event(lease: Lease, said: Said, revision: int) -> EventIn:
    output = lease.payload.outputs[0]
    if said.invalidated is not None:
        return EventIn(
            dataset_uuid=output.dataset_uuid,
            dataset_version=output.dataset_version,
            id=said.id,
            invalidate=InvalidateRange(*said.invalidated),
            reason="reorg",
        )
    return EventIn(
        dataset_uuid=output.dataset_uuid,
        dataset_version=output.dataset_version,
        cursor=said.cursor,
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
