"""What simulated tasks do: read what is there at their time, and put it where their outputs go.

They trust the Dispatcher: a reader that finds nothing committed makes an output with nothing in it, as an
engine that is given an empty list of files does. Whether such work may count is for the Dispatcher to say.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from uuid import UUID

from tracelake.contracts.dispatcher_api import EventIn, OutputIn, PayloadInput, TaskPayload
from tracelake.domain.block_range import BlockRange
from tracelake.objects.prefix import ObjectPrefix
from tracelake.testing.simulation.connection import SQL
from tracelake.testing.simulation.graph import CHUNK, RANGE
from tracelake.testing.simulation.world import World

MAX_OBJECT = 1 << 20


@dataclass(frozen=True, slots=True)
class Made:
    """What an attempt has to report: outputs that it wrote, events about scopes without storage."""

    outputs: list[OutputIn] = field(default_factory=list)
    events: list[EventIn] = field(default_factory=list)


def span(payload: TaskPayload) -> tuple[int, int]:
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
        start, _ = span(payload) if payload.inputs else (0, 0)
        world.data.table(output.dataset_version).fence(payload.epoch, start)


async def read(world: World, payload: TaskPayload) -> dict[int, str]:
    """The rows that this attempt makes, from what it finds in its inputs right now."""
    start, end = span(payload)
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


async def write(world: World, payload: TaskPayload, rows: dict[int, str]) -> Made | None:
    """Put the rows where they belong; None when a newer attempt has fenced this one off."""
    start, end = span(payload)
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
            return Made(events=[_event(payload, last - RANGE + 1, last) for last in ends])
        case "split":
            chunks = BlockRange(start, end).split_on_grid(CHUNK)
            return Made(events=[_event(payload, chunk.start, chunk.end) for chunk in chunks])
        case _:
            assert output.staging is not None
            place = ObjectPrefix.parse(output.staging)
            content = json.dumps({str(block): row for block, row in sorted(rows.items())}).encode()
            await world.objects.put(place.location(f"rows_{start}_{end}.parquet"), content)
            return Made([OutputIn(0, location=place.uri, row_count=len(rows), start=start, end=end)])


def _event(payload: TaskPayload, start: int, end: int) -> EventIn:
    output = payload.outputs[0]
    return EventIn(
        dataset_uuid=output.dataset_uuid,
        dataset_version=output.dataset_version,
        start=start,
        end=end,
        revision=output.revision,
    )
