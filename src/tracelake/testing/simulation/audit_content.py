"""What a reader sees in the end, against the chain as it is and what was acknowledged (invariants 2, 3, 7).

No hole, no row of an abandoned fork, no scope that nobody asked for, nothing twice: for every dataset of the
active generation, from plain reads of committed cursors and partitions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from uuid import UUID

from tracelake.contracts.dispatcher_api import TriggerRequest
from tracelake.dispatcher.steps.deploy_dag import Deployed
from tracelake.domain.block_range import BlockRange
from tracelake.objects.prefix import ObjectPrefix
from tracelake.testing.simulation.connection import SQL
from tracelake.testing.simulation.findings import Finding
from tracelake.testing.simulation.graph import CHUNK, JOBS, RANGE
from tracelake.testing.simulation.operators import MAX_OBJECT
from tracelake.testing.simulation.world import World

EVERYTHING = 2**62
NOTHING_LOST = "2: no acknowledged event, trigger or completion is lost"
NOTHING_TWICE = "3: nothing counts twice"
CANONICAL = "7: committed rows are those of the canonical chain"


async def audit_content(world: World) -> list[Finding]:
    deployed = world.history.of("deploy")[-1].answer
    assert isinstance(deployed, Deployed), deployed
    findings: list[Finding] = []
    for job in JOBS:
        if job in world.layout.jobs:
            version = deployed.jobs[job][0].dataset_version
            if job == "gather":
                findings += await _audit_gathered(world, version, deployed.jobs["ingest"][0].dataset_version)
            else:
                findings += await _audit_job(world, job, version)
    return findings


async def _audit_job(world: World, job: str, version: UUID) -> list[Finding]:
    match job:
        case "head" | "derive" | "derive2":
            return await _audit_rows(world, job, version, world.chain.tip)
        case "tail":
            return await _audit_rows(world, job, version, _last_range_end(world))
        case "log":
            return await _audit_log(world, version)
        case "ask" | "split" | "ingest" | "sum":
            return await _audit_asked(world, job, version)
        case _:
            ranges = [BlockRange(s, s + RANGE - 1) for s in range(0, _last_range_end(world), RANGE)]
            return await _audit_partitions(world, job, version, ranges, ranges)


def _last_range_end(world: World) -> int:
    return (world.chain.tip + 1) // RANGE * RANGE - 1


async def _cursor(world: World, version: UUID) -> int:
    rows = await world.observer.read(SQL.reader_cursor, version)
    cursor: int = rows[0]["cursor"] if rows else -1
    return cursor


async def _audit_rows(world: World, job: str, version: UUID, last: int) -> list[Finding]:
    cursor = await _cursor(world, version)
    if cursor != last:
        return [Finding(NOTHING_LOST, f"{job} is committed up to {last}", f"up to {cursor}")]
    rows = world.data.table(version).rows
    seen = {block: row for block, row in rows.items() if block <= cursor}
    return _compare(world, job, range(last + 1), seen)


def _compare(world: World, job: str, blocks: Iterable[int], seen: dict[int, str]) -> list[Finding]:
    expected = {block: world.layout.expected(job, block, world.chain.content) for block in blocks}
    if seen == expected:
        return []
    wrong = sorted(b for b in expected.keys() | seen.keys() if expected.get(b) != seen.get(b))
    return [
        Finding(
            CANONICAL,
            f"{job}: " + ", ".join(f"{b}: {expected.get(b)}" for b in wrong),
            ", ".join(f"{b}: {seen.get(b)}" for b in wrong),
        )
    ]


async def _audit_log(world: World, version: UUID) -> list[Finding]:
    """An appended log keeps what was true once; it must have all that is true now."""
    cursor = await _cursor(world, version)
    if cursor < world.chain.tip:
        return [Finding(NOTHING_LOST, f"log is committed up to {world.chain.tip}", f"up to {cursor}")]
    ever = world.data.table(version).ever
    missing = [
        block
        for block in range(world.chain.tip + 1)
        if (block, world.layout.expected("log", block, world.chain.content)) not in ever
    ]
    return [Finding(CANONICAL, "log has every block", f"{missing} are missing")] if missing else []


async def _audit_gathered(world: World, version: UUID, chunks: UUID) -> list[Finding]:
    """Chunks come in any order: what is there before the first gap must have been read, and no row is wrong."""
    needed: set[int] = set()
    for chunk in await world.observer.read(SQL.committed_partitions, chunks, 0, EVERYTHING):
        if needed and chunk["range_start"] != max(needed) + 1:
            break
        needed |= set(range(chunk["range_start"], chunk["range_end"] + 1))
    rows = world.data.table(version).rows
    return _compare(world, "gather", sorted(needed | rows.keys()), rows)


async def _audit_asked(world: World, job: str, version: UUID) -> list[Finding]:
    size = None if job == "ask" else CHUNK
    triggers = world.history.of("trigger")
    told = _scopes([call.request for call in triggers if call.accepted], size)
    ever = _scopes([call.request for call in triggers], size)
    return await _audit_partitions(world, job, version, told, ever)


def _scopes(requests: Iterable[TriggerRequest], size: int | None) -> list[BlockRange]:
    found: set[BlockRange] = set()
    for request in requests:
        assert request.start is not None
        assert request.end is not None
        asked = BlockRange(request.start, request.end)
        found |= set(asked.split_on_grid(size)) if size else {asked}
    return sorted(found)


async def _audit_partitions(
    world: World, job: str, version: UUID, needed: list[BlockRange], allowed: list[BlockRange]
) -> list[Finding]:
    rows = await world.observer.read(SQL.committed_partitions, version, 0, EVERYTHING)
    seen = [BlockRange(row["range_start"], row["range_end"]) for row in rows]
    keys = ", ".join(span.partition_key for span in seen)
    findings = []
    if missing := [span for span in needed if span not in seen]:
        wanted = ", ".join(span.partition_key for span in missing)
        findings.append(Finding(NOTHING_LOST, f"{job} has {wanted}", keys or "nothing"))
    if extra := [span for span in seen if span not in allowed]:
        unwanted = ", ".join(span.partition_key for span in extra)
        findings.append(Finding(CANONICAL, f"{job} has no {unwanted}", keys))
    stored = JOBS[job].storage == "parquet"
    overlapping = any(one.end >= two.start for one, two in pairwise(seen))
    if (stored and overlapping) or len(set(seen)) != len(seen):
        findings.append(Finding(NOTHING_TWICE, f"{job}'s partitions don't overlap", keys))
    if stored:
        for span, row in zip(seen, rows, strict=True):
            content: dict[int, str] = {}
            for stat in await world.objects.list(ObjectPrefix.parse(row["location"])):
                read = json.loads(await world.objects.read(stat.location, MAX_OBJECT))
                content |= {int(block): text for block, text in read.items()}
            findings += _compare(world, job, range(span.start, span.end + 1), content)
    return findings
