"""Buffered datasets in the state database: schemas, messages for the queues, dead letters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from tracelake.contracts.buffers import BufferBatch, BufferMessage, BufferRetract, buffer_queue
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import BufferedDataset
from tracelake.postgres import sqlfiles
from tracelake.store.db import OutboxEntry, OutboxKind, Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "buffers.sql")

_encode = msgspec.json.Encoder(uuid_format="canonical").encode


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffered dataset as it is deployed; ``name`` is null while no DAG publishes it."""

    dataset_uuid: UUID
    dataset_version: UUID
    dag_name: str
    name: str | None
    schema_hash: str


@dataclass(frozen=True, slots=True)
class KnownBuffer(Buffer):
    schema: BufferSchema


@dataclass(frozen=True, slots=True)
class WrittenBuffer:
    """A dataset that a job has published to."""

    dag_name: str
    job_name: str
    dataset_uuid: UUID
    dataset_version: UUID


def sink_job(dataset: str) -> str:
    """The name of the platform's job that drains a dataset; its dot keeps it apart from the jobs of a DAG."""
    return f"{dataset}.sink"


async def schemas_of_dag(tx: Transaction, dag: str) -> dict[str, BufferSchema]:
    rows = await tx.fetch(SQL.schemas_of_dag, dag)
    return {row["name"]: msgspec.convert(row["buffer_schema"], BufferSchema) for row in rows}


async def ensure(tx: Transaction, org_id: UUID, dag: str, entry: BufferedDataset, new_uuid: UUID) -> UUID:
    """Create or update a dataset with its name and declared schema; a new one gets ``new_uuid``."""
    schema = BufferSchema.of(entry)
    row = await tx.fetchrow(
        SQL.ensure_buffered,
        new_uuid,
        org_id,
        dag,
        sink_job(entry.name),
        entry.name,
        msgspec.to_builtins(schema),
        schema.hash,
    )
    assert row is not None
    dataset_uuid: UUID = row["dataset_uuid"]
    return dataset_uuid


async def retire(tx: Transaction, dag: str, kept: Sequence[str]) -> list[str]:
    """Unpublish datasets that the DAG no longer names; returns the names of their sinks' jobs."""
    return [row["job_name"] for row in await tx.fetch(SQL.retire_buffered, dag, list(kept))]


async def of_dag(tx: Transaction, dag: str) -> list[Row]:
    return await tx.fetch(SQL.buffers_of_dag, dag)


async def find_published(
    tx: Transaction, org_id: UUID, dataset_uuid: UUID | None, name: str | None, job_id: UUID
) -> tuple[Buffer, int] | None:
    """The dataset, and where the revisions of rows published by ``job_id`` begin."""
    row = await tx.fetchrow(SQL.find_published, org_id, dataset_uuid, name, job_id)
    return (Buffer(*_identity(row)), row["revision_base"]) if row is not None else None


async def find(
    tx: Transaction, org_id: UUID, dataset_uuid: UUID | None, name: str | None = None
) -> KnownBuffer | None:
    row = await tx.fetchrow(SQL.find, org_id, dataset_uuid, name)
    return _known(row) if row is not None else None


async def of_sink(tx: Transaction, job_id: UUID) -> KnownBuffer | None:
    row = await tx.fetchrow(SQL.of_sink, job_id)
    return _known(row) if row is not None else None


def _identity(row: Row) -> tuple[UUID, UUID, str, str | None, str]:
    return (
        row["dataset_uuid"],
        row["dataset_version"],
        row["dag_name"],
        row["published_name"],
        row["schema_hash"],
    )


def _known(row: Row) -> KnownBuffer:
    return KnownBuffer(*_identity(row), msgspec.convert(row["buffer_schema"], BufferSchema))


async def add_batch(tx: Transaction, batch: BufferBatch, dag: str, job: str) -> None:
    """Put a publish into the outbox; it commits with the transaction."""
    rows = await tx.fetch(
        SQL.add_batch,
        buffer_queue(batch.dataset_uuid),
        _encode(batch).decode(),
        dag,
        job,
        batch.dataset_uuid,
    )
    tx.outbox.extend(_entries(rows, [msgspec.to_builtins(batch)]))


async def add_retractions(tx: Transaction, messages: Sequence[BufferRetract]) -> None:
    await _add(tx, [(message.dataset_uuid, msgspec.to_builtins(message)) for message in messages])


async def _add(tx: Transaction, messages: Sequence[tuple[UUID, dict[str, Any]]]) -> None:
    rows = await tx.fetch(
        SQL.add_messages,
        [buffer_queue(dataset_uuid) for dataset_uuid, _ in messages],
        [_encode(body).decode() for _, body in messages],
    )
    tx.outbox.extend(_entries(rows, [body for _, body in messages]))


async def take_due(
    tx: Transaction, limit: int, hold_seconds: float, grace_seconds: float
) -> list[OutboxEntry]:
    rows = await tx.fetch(SQL.take_due_messages, limit, hold_seconds, grace_seconds)
    return _entries(rows, [msgspec.json.decode(row["body"]) for row in rows])


def _entries(rows: Sequence[Row], bodies: Sequence[dict[str, Any]]) -> list[OutboxEntry]:
    return [
        OutboxEntry(
            row["outbox_id"], OutboxKind.BUFFER, row["runtime"], None, body, row["available_at"], True
        )
        for row, body in zip(rows, bodies, strict=True)
    ]


async def written_by(tx: Transaction, jobs: Sequence[tuple[str, str]]) -> list[WrittenBuffer]:
    """The datasets that jobs, each by DAG and name, have ever published to."""
    rows = await tx.fetch(SQL.datasets_of_writers, [job[0] for job in jobs], [job[1] for job in jobs])
    return [WrittenBuffer(**row) for row in rows]


async def revision_bases(tx: Transaction, job_ids: Sequence[UUID]) -> dict[UUID, int]:
    rows = await tx.fetch(SQL.revision_bases, list(job_ids))
    return {row["job_id"]: row["revision_base"] for row in rows}


async def writers(tx: Transaction, dataset_uuid: UUID) -> list[str]:
    return [row["producer"] for row in await tx.fetch(SQL.writers, dataset_uuid)]


async def add_dead_letter(
    tx: Transaction, org_id: UUID, message: BufferMessage, raw: str, reason: str, tries: int, task_id: UUID
) -> int:
    row = await tx.fetchrow(
        SQL.add_dead_letter,
        org_id,
        message.dataset_uuid,
        message.batch_id,
        raw,
        "batch" if isinstance(message, BufferBatch) else "retract",
        message.producer,
        message.row_count if isinstance(message, BufferBatch) else None,
        reason,
        tries,
        task_id,
    )
    assert row is not None
    dead_letter_id: int = row["dead_letter_id"]
    return dead_letter_id


async def list_dead_letters(tx: Transaction, dataset_uuid: UUID, after: int, limit: int) -> list[Row]:
    return await tx.fetch(SQL.list_dead_letters, dataset_uuid, after, limit)


async def dead_letter(tx: Transaction, org_id: UUID, dead_letter_id: int) -> Row | None:
    return await tx.fetchrow(SQL.dead_letter, org_id, dead_letter_id)


async def take_dead_letters(
    tx: Transaction, dataset_uuid: UUID, ids: Sequence[int] | None, limit: int, last: int
) -> list[dict[str, Any]]:
    """Remove dead letters, some or all up to the ``last``; returns their messages."""
    rows = await tx.fetch(SQL.exhume, dataset_uuid, list(ids) if ids is not None else None, limit, last)
    return [msgspec.json.decode(row["message"]) for row in rows]


async def last_dead_letter(tx: Transaction, dataset_uuid: UUID) -> int:
    row = await tx.fetchrow(SQL.last_dead_letter, dataset_uuid)
    assert row is not None
    last: int = row["last"]
    return last


async def resend(tx: Transaction, dataset_uuid: UUID, messages: Sequence[dict[str, Any]]) -> None:
    if messages:
        await _add(tx, [(dataset_uuid, message) for message in messages])


async def overview(tx: Transaction, org_id: UUID, dataset_uuid: UUID | None = None) -> list[Row]:
    return await tx.fetch(SQL.overview, org_id, dataset_uuid)
