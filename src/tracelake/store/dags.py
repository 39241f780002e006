"""Deployed DAGs: versions, generations of jobs, datasets and edges; and the audit trail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from tracelake.domain.dag.model import DagSpec, InputSpec, JobSettings, JobSpec, PublishedOutput, Storage
from tracelake.postgres import sqlfiles
from tracelake.store.db import Transaction

SQL = sqlfiles.load("tracelake.store.sql", "dags.sql")


@dataclass(frozen=True, slots=True)
class ActiveDag:
    spec: DagSpec
    version: int
    yaml_sha256: bytes


@dataclass(frozen=True, slots=True)
class DeployedOutputRow:
    job: str
    output_index: int
    dataset_uuid: UUID
    dataset_version: UUID
    dataset: str | None


@dataclass(frozen=True, slots=True)
class VersionRef:
    dataset_uuid: UUID
    dataset_version: UUID


async def active(tx: Transaction) -> dict[str, ActiveDag]:
    rows = await tx.fetch(SQL.active_specs)
    return {
        row["name"]: ActiveDag(
            msgspec.convert(row["spec"], DagSpec), row["active_version"], row["yaml_sha256"]
        )
        for row in rows
    }


async def version_of_yaml(tx: Transaction, dag: str, sha256: bytes) -> int | None:
    row = await tx.fetchrow(SQL.version_of_yaml, dag, sha256)
    return row["version"] if row else None


async def add_version(tx: Transaction, org_id: UUID, spec: DagSpec, yaml: str, sha256: bytes, by: str) -> int:
    row = await tx.fetchrow(SQL.add_version, spec.name, org_id, yaml, sha256, msgspec.to_builtins(spec), by)
    assert row is not None
    version: int = row["version"]
    return version


async def activate_version(tx: Transaction, org_id: UUID, dag: str, version: int) -> None:
    await tx.execute(SQL.activate_version, dag, org_id, version)


async def retire_job(tx: Transaction, dag: str, name: str) -> UUID | None:
    row = await tx.fetchrow(SQL.retire_job, dag, name)
    return row["job_id"] if row else None


async def retire_versions(tx: Transaction, job_ids: Sequence[UUID]) -> None:
    await tx.execute(SQL.retire_versions, list(job_ids))


async def find_generation(tx: Transaction, dag: str, name: str, fingerprint: str) -> UUID | None:
    row = await tx.fetchrow(SQL.find_generation, dag, name, fingerprint)
    return row["job_id"] if row else None


async def add_job(
    tx: Transaction, job_id: UUID, org_id: UUID, dag: str, job: JobSpec, fingerprint: str
) -> None:
    settings = job.settings
    await tx.execute(
        SQL.add_job,
        job_id,
        org_id,
        dag,
        job.name,
        fingerprint,
        job.activation.value,
        job.source_kind.value if job.source_kind else None,
        job.operator,
        job.config,
        job.execution_strategy.value if job.execution_strategy else None,
        job.update_strategy.value,
        list(job.unique_key),
        list(job.secrets),
        msgspec.to_builtins(job.udf) if job.udf else None,
        sum(edge.trigger for edge in job.inputs),
        job.runtime,
        *_settings(settings),
        _source(job),
        job.runs_code,
    )


async def tune_job(tx: Transaction, job_id: UUID, job: JobSpec) -> None:
    await tx.execute(SQL.tune_job, job_id, job.runtime, *_settings(job.settings), _source(job))


def _source(job: JobSpec) -> Any:
    return None if job.source is None else msgspec.to_builtins(job.source)


def _settings(settings: JobSettings) -> tuple[Any, ...]:
    return (
        settings.max_attempts,
        settings.timeout_seconds,
        settings.heartbeat_timeout_seconds,
        settings.priority.value,
        settings.max_concurrency,
        settings.max_queue_depth,
        settings.max_queue_age_seconds,
        settings.idle_timeout_seconds,
        settings.retry_base_seconds,
        settings.retry_max_seconds,
    )


async def add_output(
    tx: Transaction,
    new_uuid: UUID,
    version: UUID,
    org_id: UUID,
    dag: str,
    job: JobSpec,
    job_id: UUID,
    index: int,
) -> None:
    """A new version of the dataset that this output has always had; ``new_uuid`` if it never had one."""
    output = job.outputs[index]
    row = await tx.fetchrow(SQL.ensure_dataset, new_uuid, org_id, dag, job.name, index)
    assert row is not None
    await tx.execute(
        SQL.add_dataset_version,
        version,
        row["dataset_uuid"],
        job_id,
        index,
        output.name,
        output.storage.value,
    )


async def outrank(tx: Transaction, job_id: UUID) -> None:
    await tx.execute(SQL.outrank, job_id)


async def add_version_of(tx: Transaction, dataset_uuid: UUID, version: UUID, job_id: UUID, name: str) -> None:
    """The one version that a buffered dataset ever has."""
    await tx.execute(SQL.add_dataset_version, version, dataset_uuid, job_id, 0, name, Storage.POSTGRES.value)


async def revive_versions(tx: Transaction, job_id: UUID) -> None:
    await tx.execute(SQL.revive_versions, job_id)


async def version_of_output(tx: Transaction, dag: str, job: str, output: int) -> VersionRef:
    row = await tx.fetchrow(SQL.current_version_of_output, dag, job, output)
    assert row is not None
    return VersionRef(row["dataset_uuid"], row["dataset_version"])


async def version_of_name(tx: Transaction, org_id: UUID, name: str) -> VersionRef:
    row = await tx.fetchrow(SQL.current_version_of_name, org_id, name)
    assert row is not None
    return VersionRef(row["dataset_uuid"], row["dataset_version"])


async def add_input(
    tx: Transaction, job_id: UUID, index: int, ref: VersionRef, edge: InputSpec, *, per_update: bool
) -> None:
    await tx.execute(
        SQL.add_input,
        job_id,
        index,
        ref.dataset_uuid,
        ref.dataset_version,
        edge.trigger,
        edge.where.text if edge.where else None,
        msgspec.to_builtins(edge.where.tree) if edge.where else None,
    )
    if per_update and edge.trigger:
        await tx.execute(SQL.add_consumer_cursor, job_id, index)


async def unpublish(tx: Transaction, dag: str) -> None:
    await tx.execute(SQL.unpublish, dag)


async def publish_output(tx: Transaction, dag: str, entry: PublishedOutput) -> None:
    await tx.execute(SQL.publish_output, dag, entry.job, entry.output, entry.name)


async def outputs_of_dag(tx: Transaction, dag: str) -> list[DeployedOutputRow]:
    return [
        DeployedOutputRow(
            row["job"],
            row["output_index"],
            row["dataset_uuid"],
            row["dataset_version"],
            row["published_name"],
        )
        for row in await tx.fetch(SQL.outputs_of_dag, dag)
    ]


async def audit(tx: Transaction, org_id: UUID, actor: str, action: str, subject: dict[str, Any]) -> None:
    await tx.execute(SQL.audit, org_id, actor, action, subject)
