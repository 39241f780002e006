"""Coverage of a range of blocks: committed parts, gaps, and the progress of a backfill."""

from __future__ import annotations

from collections.abc import Sequence
from uuid import UUID

from tracelake.contracts.coverage import (
    BackfillFailure,
    BackfillHold,
    BackfillQuery,
    BackfillState,
    Gap,
    GapPage,
    GapQuery,
    JobName,
)
from tracelake.domain.backfill import BackfillRoute, JobNode, find_route, slices
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, SourceKind
from tracelake.domain.errors import Invalid
from tracelake.postgres import sqlfiles
from tracelake.store import jobs
from tracelake.store.db import Row, Transaction
from tracelake.store.reads import current_version

SQL = sqlfiles.load("tracelake.store.sql", "coverage.sql")

MAX_FAILURES = 100


async def gaps(tx: Transaction, org_id: UUID, name: str, query: GapQuery) -> GapPage:
    """A page of a dataset's gaps, in ascending order."""
    dataset_uuid, version = await current_version(tx, org_id, name)
    extent = await tx.fetchrow(SQL.extent, version)
    assert extent is not None
    first, last = _extent(extent)
    start = query.start if isinstance(query.start, int) else first
    end = query.end if isinstance(query.end, int) else last
    if isinstance(query.start, int) and isinstance(query.end, int) and query.start > query.end:
        raise Invalid("InvalidRange", f"from {query.start} to {query.end} is no range")
    if start is None or end is None or start > end:
        return GapPage(dataset_uuid, version, None, None, [], None)
    after = query.after + 1 if isinstance(query.after, int) else start
    if extent["cursor"] is not None:
        # Where there is a cursor, _extent found a first block.
        assert first is not None
        found = _around(first, extent["cursor"], max(start, after), end)
    else:
        found = await _between_partitions(tx, version, extent, max(start, after), end, query.limit + 1)
    page = [Gap(each.start, each.end, each.end - each.start + 1) for each in found[: query.limit]]
    following = str(page[-1].end) if len(found) > query.limit else None
    return GapPage(dataset_uuid, version, start, end, page, following)


def _extent(row: Row) -> tuple[int | None, int | None]:
    """First and last block. A cursor means that everything before it is committed, from its job's first block
    on."""
    if row["cursor"] is None:
        return row["first"], row["last"]
    begins = row["start_block"]
    return (begins if isinstance(begins, int) else 0), row["cursor"]


def _around(first: int, last: int, start: int, end: int) -> list[BlockRange]:
    pieces = ((start, min(first - 1, end)), (max(last + 1, start), end))
    return [BlockRange(low, high) for low, high in pieces if low <= high]


async def _between_partitions(
    tx: Transaction, version: UUID, extent: Row, start: int, end: int, limit: int
) -> list[BlockRange]:
    if start > end:
        return []
    stored = extent["storage"] != "none"
    # Stored partitions don't overlap, so the walk may begin at the first that reaches
    # the range. Announcements may overlap, and are walked from the beginning.
    first = await tx.fetchrow(SQL.first_reaching, version, start) if stored else None
    rows = await tx.fetch(
        SQL.gaps_before_partitions, version, start, end, first["range_start"] if first else 0, limit
    )
    found = [BlockRange(row["gap_start"], row["gap_end"]) for row in rows]
    if len(found) < limit:
        row = await tx.fetchrow(SQL.last_stored if stored else SQL.last_announced, version, end)
        behind = start if row is None or row["last"] is None else max(start, row["last"] + 1)
        found += [BlockRange(behind, end)] if behind <= end else []
    return found


async def backfill(tx: Transaction, dag: str, job: str, query: BackfillQuery) -> BackfillState:
    """A job's progress with a range, and the events that would request the rest."""
    if query.start > query.end:
        raise Invalid("InvalidRange", f"from {query.start} to {query.end} is no range")
    route = await _route(tx, dag, job)
    chunk = route.chunk(query.chunk if isinstance(query.chunk, int) else None)
    path = [each.job_id for each in route.between]
    newest = query.order == "newest"
    row = await tx.fetchrow(
        SQL.backfill_state,
        route.target.job_id,
        query.start,
        query.end,
        path,
        chunk,
        newest,
        query.limit,
        route.source.job_id,
    )
    assert row is not None
    missing = [BlockRange(*ends) for ends in zip(row["starts"], row["ends"], strict=True)]
    # Lazy, since a range of 2^62 blocks in small chunks would never end.
    asking = (
        piece
        for each in missing
        for piece in slices(each, route, chunk, newest_first=newest, chunks=row["unasked_chunks"])
    )
    events = [piece for piece, _ in zip(asking, range(query.limit), strict=False)]
    working = [route.target.job_id, *path]
    live = await tx.fetchrow(SQL.live_tasks_in_range, working, query.start, query.end)
    assert live is not None
    failed = await tx.fetch(
        SQL.failed_tasks_in_range, working, query.start, query.end, row["missing"], MAX_FAILURES
    )
    chunks = query.end // chunk - query.start // chunk + 1
    blocks = query.end - query.start + 1
    held = await tx.fetch(SQL.holds_of_jobs, [route.source.job_id, *working])
    return BackfillState(
        job=_name(route.target),
        source=_name(route.source),
        splitter=_name(route.splitter) if route.splitter is not None else None,
        runs_also=[_name(each) for each in route.also],
        paused=[_name(each) for each in (*route.between, route.target) if each.paused],
        max_concurrency=route.target.max_concurrency,
        start=query.start,
        end=query.end,
        chunk=chunk,
        blocks=blocks,
        committed_blocks=blocks - row["missing_blocks"],
        chunks=chunks,
        committed_chunks=chunks - row["missing_chunks"],
        asked_chunks=row["missing_chunks"] - row["unasked_chunks"],
        unasked_chunks=row["unasked_chunks"],
        queued=live["queued"],
        running=live["running"],
        failures=failed[0]["total"] if failed else 0,
        events=[Gap(piece.start, piece.end, piece.end - piece.start + 1) for piece in events],
        more_events=len(events) == query.limit,
        failed=_failures(failed, (route.target, *route.between)),
        held=[BackfillHold(**row) for row in held],
    )


async def _route(tx: Transaction, dag: str, job: str) -> BackfillRoute:
    named = await jobs.active(tx, dag, job)
    nodes = {
        row["job_id"]: JobNode(
            row["job_id"],
            row["dag_name"],
            row["name"],
            row["operator"],
            SourceKind(row["source_kind"]) if row["source_kind"] else None,
            ExecutionStrategy(row["execution_strategy"]) if row["execution_strategy"] else None,
            row["config"],
            row["stores"],
            row["paused"],
            row["max_concurrency"],
        )
        for row in await tx.fetch(SQL.active_jobs)
    }
    edges = [(row["producer"], row["consumer"]) for row in await tx.fetch(SQL.triggering_edges)]
    return find_route(nodes, edges, named.job_id)


def _name(job: JobNode) -> JobName:
    return JobName(job.dag, job.name)


def _failures(rows: Sequence[Row], among: Sequence[JobNode]) -> list[BackfillFailure]:
    names = {job.job_id: job for job in among}
    return [
        BackfillFailure(
            row["task_id"],
            names[row["job_id"]].dag,
            names[row["job_id"]].name,
            row["status"],
            row["range_start"],
            row["range_end"],
            row["error_message"],
        )
        for row in rows
    ]
