"""Read-only views for people: each list is a page that an index serves, however much there is.

Why a queued task doesn't run is decided in ``domain.waiting``. The schema of
a buffered dataset has the columns that jobs publish, then those that the platform adds. Versions of a DAG come with
their files as they were deployed, for rollbacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from tracelake.contracts.user_api import (
    AttemptDetail,
    CommittedPartition,
    DagPage,
    DagQuery,
    DagSummary,
    DagVersionDetail,
    DagVersionPage,
    DagVersionQuery,
    DagVersionSummary,
    DatasetColumn,
    DatasetDetail,
    DatasetLag,
    DatasetPage,
    DatasetQuery,
    DatasetSchema,
    DatasetSummary,
    DatasetVersion,
    EventDetail,
    FailedDeliveries,
    FailedDelivery,
    InputDetail,
    JobSummary,
    OutputDetail,
    PartitionPage,
    PartitionQuery,
    PartitionSummary,
    TaskDetail,
    TaskPage,
    TaskQuery,
    TaskSummary,
)
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.buffers import PLATFORM_COLUMNS, BufferSchema
from tracelake.domain.errors import Invalid, NotFound
from tracelake.postgres import sqlfiles
from tracelake.store import outbox, waiting
from tracelake.store import tasks as store_tasks
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "reads.sql")
T = TypeVar("T")
MAX_HISTORY = 100
_NEWEST = 2**63 - 1
_FIRST_UUID = UUID(int=0)
# A statement per status, so that each reads from an index of its own.
_BY_STATUS = {
    None: SQL.recent_tasks_of_jobs,
    "Queued": SQL.queued_tasks,
    "Running": SQL.running_tasks,
    "Failed": SQL.failed_tasks,
    "Canceled": SQL.canceled_tasks,
    "Completed": SQL.completed_tasks,
}
_NEWEST_VERSION = 2**31 - 1


async def dags(tx: Transaction, query: DagQuery) -> DagPage:
    rows = await tx.fetch(SQL.list_dags, query.after or "", query.limit + 1)
    page, following = _cut(rows, query.limit)
    jobs: dict[str, list[JobSummary]] = {row["name"]: [] for row in page}
    for row in await tx.fetch(SQL.jobs_of_dags, list(jobs)):
        jobs[row["dag_name"]].append(_as(JobSummary, row))
    found = [
        DagSummary(row["name"], row["active_version"], row["deployed_at"], jobs[row["name"]]) for row in page
    ]
    return DagPage(found, page[-1]["name"] if following else None)


async def tasks(tx: Transaction, query: TaskQuery) -> TaskPage:
    after = query.after or _NEWEST
    if not (query.dag or query.job or query.status):
        found = await tx.fetch(SQL.recent_tasks, after, query.limit + 1)
    else:
        found = await tx.fetch(
            _BY_STATUS[query.status or None], query.dag or None, query.job or None, after, query.limit + 1
        )
    page, following = _cut(found, query.limit)
    # Numbers are searched first, and whole rows read for one page alone.
    rows = await tx.fetch(SQL.tasks_by_seq, [row["seq"] for row in page])
    reasons = await waiting.waiting_for(tx, [row["task_id"] for row in rows if row["status"] == "Queued"])
    shown = [
        msgspec.convert({**row, "waiting_for": reasons.get(row["task_id"])}, TaskSummary) for row in rows
    ]
    return TaskPage(shown, str(page[-1]["seq"]) if following else None)


async def task(tx: Transaction, task_id: UUID) -> TaskDetail:
    row = await tx.fetchrow(SQL.task_detail, task_id)
    if row is None:
        raise NotFound("UnknownTask", f"there is no task {task_id}")
    attempts = await tx.fetch(SQL.task_attempts, task_id, MAX_HISTORY)
    if row["kind"] == "source":
        events = await tx.fetch(SQL.source_events, row["job_id"], MAX_HISTORY)
    else:
        events = await tx.fetch(SQL.task_events, task_id, MAX_HISTORY)
    reads = await _reads(tx, row)
    return msgspec.convert(
        {
            **row,
            "waiting_for": (await waiting.waiting_for(tx, [task_id])).get(task_id),
            "attempts": [_as(AttemptDetail, each) for each in attempts],
            "inputs": _inputs(row, reads),
            "outputs": await _outputs(tx, row),
            "events": [_as(EventDetail, each) for each in events],
        },
        TaskDetail,
    )


async def _reads(tx: Transaction, task: Row) -> list[Row]:
    """The inputs of a waiting task, as a claim would find them now."""
    if task["status"] != "Queued":
        return []
    queued = await store_tasks.read(tx, task["task_id"])
    return (await store_tasks.claim_inputs(tx, [queued]))[task["task_id"]] if queued else []


def _inputs(task: Row, reads: Sequence[Row]) -> list[InputDetail]:
    """The inputs that the last attempt read; for a waiting task, those that the next one would read."""
    if task["status"] != "Queued":
        return msgspec.convert(task["inputs"] or [], list[InputDetail])
    scope = {"start": task["start"], "end": task["end"]}
    found = []
    for read in reads:
        names = {"dataset": read["published_name"], "where": read["where_text"]}
        if task["kind"] == "cursor" and read["consumed"] is not None:
            position = -1 if read["position"] is None else read["position"]
            names |= {"after": read["consumed"], "upto": max(read["consumed"], position)}
        found.append(msgspec.convert({**read, **scope, **names}, InputDetail))
    return found


async def _outputs(tx: Transaction, task: Row) -> list[OutputDetail]:
    committed: dict[UUID, list[CommittedPartition]] = {}
    for row in await tx.fetch(SQL.task_partitions, task["task_id"], MAX_HISTORY):
        committed.setdefault(row["dataset_version"], []).append(_partition(CommittedPartition, row))
    return [
        msgspec.convert({**row, "partitions": committed.get(row["dataset_version"], [])}, OutputDetail)
        for row in await tx.fetch(SQL.task_outputs, task["job_id"])
    ]


async def datasets(tx: Transaction, query: DatasetQuery) -> DatasetPage:
    rows = await tx.fetch(
        SQL.list_datasets, query.after or _FIRST_UUID, query.limit + 1, query.dag or None, query.job or None
    )
    page, following = _cut(rows, query.limit)
    found = [_as(DatasetSummary, row) for row in page]
    return DatasetPage(found, str(page[-1]["dataset_uuid"]) if following else None)


async def dataset(tx: Transaction, org_id: UUID, name: str) -> DatasetDetail:
    row = await tx.fetchrow(SQL.dataset_detail, org_id, *_named(name))
    if row is None:
        raise _unknown(name)
    versions = await tx.fetch(SQL.dataset_versions, row["dataset_uuid"], MAX_HISTORY)
    lag = await tx.fetchrow(SQL.dataset_lag, row["dataset_version"])
    return msgspec.convert(
        {
            **row,
            "schema": declared_schema(row["schema"]),
            "versions": [_as(DatasetVersion, each) for each in versions],
            "lag": None if lag is None else _as(DatasetLag, lag),
        },
        DatasetDetail,
    )


async def partitions(tx: Transaction, org_id: UUID, name: str, query: PartitionQuery) -> PartitionPage:
    dataset_uuid, version = await current_version(tx, org_id, name)
    start, end = _after(query.after or None)
    first = query.start if isinstance(query.start, int) else 0
    last = query.end if isinstance(query.end, int) else MAX_BLOCK
    rows = await tx.fetch(
        SQL.list_partitions, version, start, end, query.limit + 1, query.details, first, last
    )
    page, following = _cut(rows, query.limit)
    found = [_partition(PartitionSummary, row) for row in page]
    return PartitionPage(dataset_uuid, version, found, found[-1].partition_key if following else None)


async def current_version(tx: Transaction, org_id: UUID, name: str) -> tuple[UUID, UUID]:
    """A dataset and its current version, by published name or uuid."""
    row = await tx.fetchrow(SQL.current_version, org_id, *_named(name))
    if row is None:
        raise _unknown(name)
    return row["dataset_uuid"], row["dataset_version"]


async def failed_deliveries(tx: Transaction, limit: int) -> FailedDeliveries:
    return FailedDeliveries([_as(FailedDelivery, row) for row in await outbox.list_failed(tx, limit)])


def _named(name: str) -> tuple[str, UUID | None]:
    """Published names never look like a uuid: they have no dashes and begin with a letter."""
    try:
        return name, UUID(name) if len(name) == 36 else None
    except ValueError:
        return name, None


def _after(text: str | None) -> tuple[int, int]:
    if text is None:
        return -1, -1
    try:
        span = BlockRange.parse(text)
    except ValueError:
        raise Invalid("InvalidCursor", "'after' must be the 'next' value of a page") from None
    return span.start, span.end


def _unknown(name: str) -> NotFound:
    return NotFound("UnknownDataset", f"there is no dataset {name}")


def _cut(rows: Sequence[Row], limit: int) -> tuple[Sequence[Row], bool]:
    """The page, and whether there is more: queries ask for one row above the limit."""
    return rows[:limit], len(rows) > limit


def _as(kind: type[T], row: Row) -> T:
    return msgspec.convert(dict(row), kind)


def _partition(kind: type[T], row: Row) -> T:
    fields: dict[str, Any] = {**row, "partition_key": BlockRange(row["start"], row["end"]).partition_key}
    return msgspec.convert(fields, kind)


def declared_schema(stored: Any) -> DatasetSchema | None:
    if stored is None:
        return None
    schema = msgspec.convert(stored, BufferSchema)
    declared = [DatasetColumn(column.name, column.type.value) for column in schema.columns]
    added = [
        DatasetColumn(name, kind, "platform")
        for name, kind in PLATFORM_COLUMNS.items()
        if schema.column(name) is None
    ]
    return DatasetSchema(declared + added, list(schema.unique))


async def dag_versions(tx: Transaction, org_id: UUID, dag: str, query: DagVersionQuery) -> DagVersionPage:
    active = await tx.fetchrow(SQL.active_version, org_id, dag)
    if active is None:
        raise _unknown_dag(dag)
    rows = await tx.fetch(SQL.list_versions, org_id, dag, query.after or _NEWEST_VERSION, query.limit + 1)
    page = [msgspec.convert(dict(row), DagVersionSummary) for row in rows[: query.limit]]
    following = str(page[-1].version) if len(rows) > query.limit else None
    return DagVersionPage(dag, active["active_version"], page, following)


async def dag_version(tx: Transaction, org_id: UUID, dag: str, number: int) -> DagVersionDetail:
    row = await tx.fetchrow(SQL.version, org_id, dag, number)
    if row is None:
        if await tx.fetchrow(SQL.active_version, org_id, dag) is None:
            raise _unknown_dag(dag)
        raise NotFound("UnknownVersion", f"DAG {dag} has no version {number}")
    return msgspec.convert(dict(row), DagVersionDetail)


def _unknown_dag(dag: str) -> NotFound:
    return NotFound("UnknownDag", f"there is no DAG {dag}")
