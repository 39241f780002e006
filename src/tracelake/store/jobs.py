"""Jobs: what a generation computes (immutable, cached) and how it is found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tracelake import sqlfiles
from tracelake.domain.dag.model import ExecutionStrategy, SourceKind, Storage, UpdateStrategy
from tracelake.domain.errors import NotFound
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "jobs.sql")


@dataclass(frozen=True, slots=True)
class JobOutput:
    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: UUID
    version_no: int
    storage: Storage


@dataclass(frozen=True, slots=True)
class JobInput:
    dataset_uuid: UUID
    dataset_version: UUID
    storage: Storage


@dataclass(frozen=True, slots=True)
class JobCard:
    """A generation of a job. Nothing on it ever changes, so it may be kept for ever."""

    job_id: UUID
    org_id: UUID
    dag_name: str
    name: str
    operator: str
    config: dict[str, Any]
    execution_strategy: ExecutionStrategy | None
    update_strategy: UpdateStrategy
    unique_key: tuple[str, ...]
    secrets: tuple[str, ...]
    udf: Any
    source_kind: SourceKind | None
    outputs: tuple[JobOutput, ...]
    inputs: tuple[JobInput, ...] = ()


@dataclass(frozen=True, slots=True)
class ActiveJob:
    job_id: UUID
    org_id: UUID
    source_kind: SourceKind | None
    runtime: str
    paused: bool


class JobCards:
    """Cards by id, fetched once per process."""

    def __init__(self) -> None:
        self._cards: dict[UUID, JobCard] = {}

    async def get(self, tx: Transaction, job_ids: Iterable[UUID]) -> dict[UUID, JobCard]:
        wanted = set(job_ids)
        missing = [job_id for job_id in wanted if job_id not in self._cards]
        if missing:
            self._cards.update(await _load(tx, missing))
        return {job_id: self._cards[job_id] for job_id in wanted}


async def _load(tx: Transaction, job_ids: list[UUID]) -> dict[UUID, JobCard]:
    outputs: dict[UUID, list[JobOutput]] = {job_id: [] for job_id in job_ids}
    for row in await tx.fetch(SQL.outputs, job_ids):
        outputs[row["job_id"]].append(
            JobOutput(
                row["output_index"],
                row["output_name"],
                row["dataset_uuid"],
                row["dataset_version"],
                row["version_no"],
                Storage(row["storage"]),
            )
        )
    inputs: dict[UUID, list[JobInput]] = {job_id: [] for job_id in job_ids}
    for row in await tx.fetch(SQL.inputs, job_ids):
        inputs[row["job_id"]].append(
            JobInput(row["dataset_uuid"], row["dataset_version"], Storage(row["storage"]))
        )
    return {
        row["job_id"]: JobCard(
            job_id=row["job_id"],
            org_id=row["org_id"],
            dag_name=row["dag_name"],
            name=row["name"],
            operator=row["operator"],
            config=row["config"],
            execution_strategy=ExecutionStrategy(row["execution_strategy"])
            if row["execution_strategy"]
            else None,
            update_strategy=UpdateStrategy(row["update_strategy"]),
            unique_key=tuple(row["unique_key"]),
            secrets=tuple(row["secrets"]),
            udf=row["udf"],
            source_kind=SourceKind(row["source_kind"]) if row["source_kind"] else None,
            outputs=tuple(outputs[row["job_id"]]),
            inputs=tuple(inputs[row["job_id"]]),
        )
        for row in await tx.fetch(SQL.cards, job_ids)
    }


async def output_state(tx: Transaction, job_ids: Iterable[UUID]) -> dict[UUID, tuple[int, str | None]]:
    """Revision and published name of every version that these jobs write."""
    rows = await tx.fetch(SQL.output_state, list(set(job_ids)))
    return {row["dataset_version"]: (row["revision"], row["published_name"]) for row in rows}


async def active(tx: Transaction, dag_name: str, name: str) -> ActiveJob:
    row = await tx.fetchrow(SQL.active_job, dag_name, name)
    if row is None:
        raise NotFound("UnknownJob", f"there is no active job {dag_name}/{name}")
    kind = SourceKind(row["source_kind"]) if row["source_kind"] else None
    return ActiveJob(row["job_id"], row["org_id"], kind, row["runtime"], row["paused"])


async def set_paused(tx: Transaction, job_id: UUID, paused: bool) -> bool:
    return bool(await tx.fetch(SQL.set_paused, job_id, paused))
