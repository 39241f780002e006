"""Deliveries in the state database: what is to be sent, what has been, and how each try ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any
from uuid import UUID

import msgspec

from tracelake.contracts.deliveries import (
    DeliveryConfig,
    DeliveryMessage,
    FinalityWait,
    GoneRow,
    PlannedRow,
    TryOutcome,
)
from tracelake.domain.buffers import BufferSchema
from tracelake.domain.dag.model import DeliverySpec
from tracelake.domain.operators import block_follower
from tracelake.postgres import sqlfiles
from tracelake.store.db import Row, Transaction

SQL = sqlfiles.load("tracelake.store.sql", "deliveries.sql")


@dataclass(frozen=True, slots=True)
class LockedDelivery:
    """A delivery whose row is locked until the transaction ends."""

    delivery_id: UUID
    job_id: UUID
    position: int
    definition: str
    is_failing: bool
    resumed_at: datetime | None


def delivery_job(name: str) -> str:
    """The name of the platform's job that sends; its dot keeps it apart from the jobs of a DAG."""
    return f"{name}.delivery"


def definition_of(spec: dict[str, Any], schema_hash: str) -> str:
    """Differs whenever the process has to begin again with another definition."""
    text = msgspec.json.encode([spec, schema_hash], order="deterministic")
    return sha256(text).hexdigest()[:32]


async def dataset(tx: Transaction, org_id: UUID, name: str) -> tuple[UUID, int] | None:
    """The published buffered dataset of this name, and its position."""
    row = await tx.fetchrow(SQL.dataset_of_delivery, org_id, name)
    return (row["dataset_uuid"], row["position"]) if row is not None else None


async def active_of_dag(tx: Transaction, dag: str) -> list[Row]:
    return await tx.fetch(SQL.active_deliveries, dag)


async def find(tx: Transaction, dag: str, name: str, dataset_uuid: UUID) -> Row | None:
    return await tx.fetchrow(SQL.find_delivery, dag, name, dataset_uuid)


async def add(
    tx: Transaction,
    delivery_id: UUID,
    org_id: UUID,
    dag: str,
    spec: DeliverySpec,
    dataset_uuid: UUID,
    job_id: UUID,
    position: int,
) -> None:
    await tx.execute(
        SQL.add_delivery,
        delivery_id,
        org_id,
        dag,
        spec.name,
        dataset_uuid,
        job_id,
        msgspec.to_builtins(spec),
        position,
    )


async def change(tx: Transaction, delivery_id: UUID, spec: DeliverySpec, position: int) -> None:
    await tx.execute(SQL.change_delivery, delivery_id, msgspec.to_builtins(spec), position)


async def retire(tx: Transaction, delivery_id: UUID) -> None:
    await tx.execute(SQL.retire_delivery, delivery_id)


async def config_of_job(tx: Transaction, job_id: UUID) -> DeliveryConfig | None:
    row = await tx.fetchrow(SQL.of_job, job_id)
    if row is None:
        return None
    return DeliveryConfig(
        row["delivery_id"],
        row["dag_name"],
        row["dataset_version"],
        definition_of(row["spec"], row["schema_hash"]),
        msgspec.convert(row["spec"], DeliverySpec),
        msgspec.convert(row["buffer_schema"], BufferSchema),
    )


async def lock_of_job(tx: Transaction, job_id: UUID) -> LockedDelivery | None:
    row = await tx.fetchrow(SQL.lock_of_job, job_id)
    if row is None:
        return None
    return LockedDelivery(
        row["delivery_id"],
        row["job_id"],
        row["position"],
        definition_of(row["spec"], row["schema_hash"]),
        row["failing_since"] is not None,
        row["resumed_at"],
    )


async def begin_attempt(tx: Transaction, delivery_id: UUID) -> None:
    await tx.execute(SQL.begin_attempt, delivery_id)


async def take_new(
    tx: Transaction, delivery_id: UUID, limit: int, holds: Sequence[int] | None
) -> list[DeliveryMessage]:
    """Without ``holds``, those that no earlier answer of the attempt had."""
    held = None if holds is None else list(holds)
    return _messages(await tx.fetch(SQL.take_new, delivery_id, limit, held))


async def finality(tx: Transaction, delivery_id: UUID) -> tuple[dict[str, int], dict[str, int]]:
    """The last final block and, where it is known, the head of the chains behind each producer."""
    rows = await tx.fetch(SQL.finality, delivery_id, block_follower.SPEC.name)
    heads = {row["producer"]: row["head"] for row in rows if row["head"] is not None}
    return {row["producer"]: row["finalized"] for row in rows}, heads


async def waits(tx: Transaction, delivery_id: UUID) -> list[FinalityWait]:
    return [FinalityWait(*row) for row in await tx.fetch(SQL.waits, delivery_id)]


async def set_waits(tx: Transaction, delivery_id: UUID, found: Sequence[FinalityWait]) -> None:
    await tx.execute(
        SQL.set_waits,
        delivery_id,
        [each.producer for each in found],
        [each.position for each in found],
        [each.block for each in found],
    )


async def move_position(tx: Transaction, delivery_id: UUID, position: int) -> None:
    await tx.execute(SQL.move_position, delivery_id, position)


async def add_rows(tx: Transaction, delivery_id: UUID, rows: Sequence[PlannedRow]) -> list[DeliveryMessage]:
    """The messages to send of these rows. Dead letters of their records are never sent any more."""
    added = await tx.fetch(
        SQL.add_rows,
        delivery_id,
        [row.record_id for row in rows],
        [row.revision for row in rows],
        [row.made_at for row in rows],
        [row.order_key for row in rows],
        [row.data for row in rows],
        [row.text for row in rows],
        [row.row_at for row in rows],
        [row.refused for row in rows],
    )
    if added:
        await tx.execute(
            SQL.supersede_by_rows,
            delivery_id,
            [row["message_id"] for row in added],
            [row["record_id"] for row in added],
        )
    return _messages([row for row in added if row["state"] == "waiting"])


async def retract(
    tx: Transaction, delivery_id: UUID, gone: Sequence[GoneRow]
) -> tuple[list[int], list[DeliveryMessage]]:
    """The messages that are no longer sent, and the retractions that are."""
    records = [row.record_id for row in gone]
    dropped = await tx.fetch(SQL.drop_unsent, delivery_id, records)
    added = await tx.fetch(
        SQL.add_retractions,
        delivery_id,
        records,
        [row.revision for row in gone],
        [row.made_at for row in gone],
    )
    return [row["message_id"] for row in dropped], _messages(added)


async def record_outcomes(tx: Transaction, delivery_id: UUID, outcomes: Sequence[TryOutcome]) -> list[Row]:
    return await tx.fetch(
        SQL.record_outcomes,
        delivery_id,
        [each.message_id for each in outcomes],
        [each.result for each in outcomes],
        [each.in_doubt for each in outcomes],
        [each.status for each in outcomes],
        [each.error for each in outcomes],
        [each.delay_seconds for each in outcomes],
    )


async def drop_overtaken(tx: Transaction, delivery_id: UUID, failed: Sequence[int]) -> list[int]:
    """Of rows whose try failed, those that were retracted since; and their retractions, if nothing was sent."""
    rows = await tx.fetch(SQL.drop_overtaken, delivery_id, list(failed))
    if not rows:
        return []
    pointless = await tx.fetch(SQL.drop_pointless, delivery_id, [row["record_id"] for row in rows])
    return [row["message_id"] for row in (*rows, *pointless)]


async def supersede_dead(tx: Transaction, delivery_id: UUID, letters: Sequence[int] | None) -> list[Row]:
    """Drop those dead letters, of these or of all, of whose records there is a newer message."""
    return await tx.fetch(SQL.supersede_dead, delivery_id, list(letters) if letters is not None else None)


async def start_tries(tx: Transaction, delivery_id: UUID, messages: Sequence[int]) -> list[int]:
    """Those that may begin: none of whose record a newer message has been tried."""
    await tx.execute(SQL.supersede_starting, delivery_id, list(messages))
    return [row["message_id"] for row in await tx.fetch(SQL.start_tries, delivery_id, list(messages))]


async def note_resume(tx: Transaction, delivery_id: UUID) -> None:
    await tx.execute(SQL.note_resume, delivery_id)


async def count_outcomes(
    tx: Transaction, delivery_id: UUID, sent: int, retracted: int, error: str | None
) -> None:
    await tx.execute(SQL.count_outcomes, delivery_id, sent, retracted, error)


async def note_error(tx: Transaction, delivery_id: UUID, error: str) -> None:
    await tx.execute(SQL.note_error, delivery_id, error)


async def note_failures(tx: Transaction, failures: Sequence[tuple[UUID, str]]) -> None:
    """Of attempts of deliveries, by their jobs."""
    await tx.execute(SQL.note_failures, [job for job, _ in failures], [error for _, error in failures])


async def note_ready(tx: Transaction, delivery_id: UUID) -> None:
    await tx.execute(SQL.note_ready, delivery_id)


async def overview(
    tx: Transaction, org_id: UUID, dag: str | None = None, name: str | None = None
) -> list[Row]:
    return await tx.fetch(SQL.overview, org_id, dag, name)


async def messages(tx: Transaction, delivery_id: UUID, state: str | None, limit: int) -> list[Row]:
    return await tx.fetch(SQL.messages, delivery_id, state, limit)


async def lock(tx: Transaction, delivery_id: UUID) -> None:
    await tx.execute(SQL.lock, delivery_id)


async def replay(
    tx: Transaction, delivery_id: UUID, ids: Sequence[int] | None, limit: int
) -> tuple[int, list[Row]]:
    """How many messages wait again, and up to ``limit`` of those that don't. Under the delivery's lock: a newer
    message of a record can't come in between."""
    asked = list(ids) if ids is not None else None
    await lock(tx, delivery_id)
    superseded = await supersede_dead(tx, delivery_id, asked)
    replayed = {row["message_id"] for row in await tx.fetch(SQL.replay, delivery_id, asked)}
    kept = {row["message_id"]: row for row in superseded}
    for row in await tx.fetch(SQL.not_replayed, delivery_id, asked, limit):
        if row["message_id"] not in replayed:
            kept[row["message_id"]] = row
    return len(replayed), [kept[each] for each in sorted(kept)[:limit]]


async def find_messages(tx: Transaction, delivery_id: UUID, ids: Sequence[int]) -> list[Row]:
    return await tx.fetch(SQL.find_messages, delivery_id, list(ids))


async def drop_dead(tx: Transaction, delivery_id: UUID, ids: Sequence[int] | None) -> int:
    return len(await tx.fetch(SQL.drop_dead, delivery_id, list(ids) if ids is not None else None))


async def collect(tx: Transaction, days: int, limit: int) -> int:
    return len(await tx.fetch(SQL.collect, days, limit))


def _messages(rows: Sequence[Row]) -> list[DeliveryMessage]:
    found = [
        DeliveryMessage(
            row["message_id"],
            row["record_id"],
            row["revision"],
            row["made_at"],
            row["kind"],
            row["order_key"],
            row["data"],
            row["text"],
            row["row_at"],
            row["tries"],
            row["wait_seconds"],
        )
        for row in rows
    ]
    # RETURNING has no order, and messages of one key are sent in that of their ids.
    return sorted(found, key=lambda message: message.message_id)
