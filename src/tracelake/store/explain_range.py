"""Who made a range of blocks: the tasks and attempts that wrote it, what was checked, what was taken back.

Partitions say it themselves, with their manifests. Of a dataset with a cursor the events do: each is a commit of
the attempt that sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID

import msgspec
from msgspec import UNSET

from tracelake import sqlfiles
from tracelake.contracts.coverage import GapQuery
from tracelake.contracts.explain import (
    EarlierAttempt,
    ExplainRangeQuery,
    RangeExplanation,
    RangeInput,
    RangePiece,
    TakenBack,
)
from tracelake.domain.block_range import BlockRange
from tracelake.store import coverage, reads
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "explain.sql")

MAX_TAKEN_BACK = 100
MAX_GAPS = 100
MAX_ATTEMPTS = 1000
MAX_COMMITS = 10_000
_EARLIER = 5


async def range_of(tx: Transaction, org_id: UUID, name: str, query: ExplainRangeQuery) -> RangeExplanation:
    _, version = await reads.current_version(tx, org_id, name)
    dataset = await tx.fetchrow(SQL.explained_dataset, version)
    assert dataset is not None
    missing = await coverage.gaps(
        tx, org_id, name, GapQuery(start=query.start, end=query.end, limit=MAX_GAPS, after=UNSET)
    )
    inputs = await tx.fetch(SQL.inputs_of_job, dataset["job_id"])
    pieces: list[RangePiece] = []
    taken_back: list[Row] = []
    searched, following = True, None
    if missing.start is not None and missing.end is not None:
        span = BlockRange(missing.start, missing.end)
        rows = await _partitions(tx, dataset, span, query.limit + 1)
        pieces = [_piece("partition", row, dataset, row["start"]) for row in rows]
        if not pieces:
            commits, searched = await _commits(tx, dataset, span, query.limit + 1)
            pieces = await _commit_pieces(tx, dataset, span, commits)
        if len(pieces) > query.limit:
            following = pieces[query.limit].start
            pieces = pieces[: query.limit]
        taken_back = await tx.fetch(SQL.taken_back_in, version, span.start, span.end, None, MAX_TAKEN_BACK)
    return RangeExplanation(
        dataset=dataset["dataset"],
        dataset_uuid=dataset["dataset_uuid"],
        dataset_version=version,
        storage=dataset["storage"],
        dag_name=dataset["dag_name"],
        job=dataset["job"],
        operator=dataset["operator"],
        inputs=[msgspec.convert(dict(row), RangeInput) for row in inputs],
        start=missing.start,
        end=missing.end,
        pieces=await _with_earlier_attempts(tx, pieces),
        next=following,
        taken_back=[msgspec.convert(dict(row), TakenBack) for row in taken_back],
        gaps=missing.gaps,
        more_gaps=missing.next is not None,
        searched=searched,
    )


async def _partitions(tx: Transaction, dataset: Row, span: BlockRange, limit: int) -> list[Row]:
    """Stored partitions don't overlap, so the first that reaches the range says where to look; announcements may,
    and of these all that begin before it are looked at."""
    version, begins = dataset["dataset_version"], 0
    if dataset["storage"] != "none":
        first = await tx.fetchrow(coverage.SQL.first_reaching, version, span.start)
        begins = first["range_start"] if first else span.start
    return await tx.fetch(SQL.partitions_in, version, span.start, span.end, begins, limit)


async def _commits(tx: Transaction, dataset: Row, span: BlockRange, limit: int) -> tuple[list[Row], bool]:
    """The commits of a cursor, by attempt, and whether all events were looked through that may matter."""
    version = dataset["dataset_version"]
    if dataset["source_task"] is not None:
        rows = await tx.fetch(
            SQL.source_commits_in,
            dataset["source_task"],
            version,
            span.start,
            span.end,
            MAX_ATTEMPTS,
            MAX_COMMITS,
        )
        return rows[:limit], all(row["commits"] < MAX_COMMITS for row in rows)
    rows = await tx.fetch(SQL.update_commits_in, version, span.start, span.end, MAX_COMMITS, limit)
    more = await tx.fetchrow(SQL.has_more_events, version, MAX_COMMITS)
    return rows, not (more and more["more"])


async def _commit_pieces(
    tx: Transaction, dataset: Row, span: BlockRange, rows: Sequence[Row]
) -> list[RangePiece]:
    firsts = [row["first_event"] for row in rows]
    before = {
        row["event_id"]: row for row in await tx.fetch(SQL.before_events, dataset["dataset_version"], firsts)
    }
    pieces = []
    for row in rows:
        begins = _begins(before.get(row["first_event"]), row["first"], span.start)
        pieces.append(_piece("commits", row, dataset, begins))
    return pieces


def _begins(before: Row | None, first: int, lowest: int) -> int:
    """The first block that the commit of cursor ``first`` brought, as far as it was asked for."""
    if before is None:
        return min(lowest, first)
    behind: int = before["range_end"] + 1 if before["kind"] == "cursor" else before["range_start"]
    return max(min(behind, first), min(lowest, first))


def _piece(kind: str, row: Row, dataset: Row, start: int) -> RangePiece:
    fields: dict[str, Any] = {**row, "kind": kind, "start": start, "earlier_attempts": []}
    fields["verified"] = fields.get("verified") or dataset["verified"]
    return msgspec.convert(fields, RangePiece)


async def _with_earlier_attempts(tx: Transaction, pieces: Sequence[RangePiece]) -> list[RangePiece]:
    wanted = {(p.task_id, p.attempt) for p in pieces if p.task_id is not None and (p.attempt or 0) > 1}
    if not wanted:
        return list(pieces)
    pairs = list(wanted)
    earlier: dict[tuple[UUID, int], list[EarlierAttempt]] = {}
    for row in await tx.fetch(SQL.attempts_before, [p[0] for p in pairs], [p[1] for p in pairs], _EARLIER):
        told = EarlierAttempt(row["attempt"], row["worker_id"], row["outcome"], row["error_message"])
        earlier.setdefault((row["task_id"], row["of"]), []).append(told)
    return [
        msgspec.structs.replace(
            piece,
            earlier_attempts=earlier.get((piece.task_id, piece.attempt), [])
            if piece.task_id is not None and piece.attempt is not None
            else [],
        )
        for piece in pieces
    ]
