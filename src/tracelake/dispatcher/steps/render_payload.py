"""The task payload: inputs frozen at the claim, outputs with the attempt's own staging places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import (
    InvalidateRange,
    JobRef,
    PayloadHot,
    PayloadInput,
    PayloadInvalidation,
    PayloadOutput,
    PayloadWritten,
    TaskPayload,
)
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.buffer_schema import CURSOR_COLUMN
from tracelake.domain.dag.model import Storage
from tracelake.domain.task import TaskKind
from tracelake.store.db import Row
from tracelake.store.invalidations import Written
from tracelake.store.jobs import JobCard, JobOutput
from tracelake.store.tasks import TaskRow

OutputState = dict[Any, tuple[int, str | None]]


def freeze_inputs(task: TaskRow, rows: Sequence[Row]) -> list[PayloadInput]:
    """What the attempt reads, whatever happens to the datasets while it runs."""
    return [_input(task, row) for row in rows]


def to_json(inputs: Sequence[PayloadInput]) -> list[dict[str, Any]]:
    frozen: list[dict[str, Any]] = msgspec.to_builtins(inputs)
    return frozen


def from_json(frozen: list[dict[str, Any]]) -> list[PayloadInput]:
    return msgspec.convert(frozen, list[PayloadInput])


def render(
    ctx: StepContext,
    task: TaskRow,
    card: JobCard,
    inputs: list[PayloadInput],
    outputs: OutputState,
    *,
    attempt: int,
    epoch: int | None,
    state: Any = None,
    written: Mapping[UUID, Written] | None = None,
    config: Mapping[str, Any] | None = None,
) -> TaskPayload:
    """``config`` takes the place of the job's own, for the platform's jobs, whose configuration may change."""
    return TaskPayload(
        task_id=task.task_id,
        attempt=attempt,
        epoch=epoch,
        job=JobRef(card.dag_name, card.name),
        operator=card.operator,
        config=card.config if config is None else dict(config),
        inputs=inputs,
        outputs=[
            _output(ctx, task, output, outputs, attempt, epoch, (written or {}).get(output.dataset_version))
            for output in card.outputs
        ],
        runtime=task.runtime,
        timeout_seconds=task.timeout_seconds,
        heartbeat_timeout_seconds=task.heartbeat_timeout_seconds,
        update_strategy=card.update_strategy.value,
        unique_key=list(card.unique_key),
        secrets=list(card.secrets),
        udf=card.udf,
        state=state,
        idle_timeout_seconds=task.idle_timeout_seconds,
    )


def _input(task: TaskRow, row: Row) -> PayloadInput:
    common = {
        "input_index": row["input_index"],
        "dataset_uuid": row["dataset_uuid"],
        "dataset_version": row["dataset_version"],
        "revision": row["revision"],
        "dataset": row["published_name"],
        "storage": row["storage"],
        "trigger": row["trigger"],
        "where": row["where_text"],
        "where_tree": row["where_tree"],
        "invalidation": _invalidation(row),
        "hot": PayloadHot(row["hot_version"], row["hot_revision"]) if row["hot_version"] else None,
        "cursor_column": CURSOR_COLUMN if row["write_mode"] == "buffered" else None,
    }
    if row["finalized"] is not None:
        common["finalized"] = row["finalized"]
    if task.scope is not None:
        span = task.scope
        return PayloadInput(**common, partition_key=span.partition_key, start=span.start, end=span.end)
    if task.state.kind is TaskKind.CURSOR:
        position = -1 if row["position"] is None else row["position"]
        after = position if row["consumed"] is None else row["consumed"]
        if row["as_of"] is not None:
            common["as_of"] = row["as_of"]
        return PayloadInput(**common, after=after, upto=max(after, position))
    return PayloadInput(**common)


def _invalidation(row: Row) -> PayloadInvalidation | None:
    if row["inv_revision"] is None:
        return None
    return PayloadInvalidation(row["inv_start"], row["inv_end"], row["inv_revision"], row["inv_reason"])


def _output(
    ctx: StepContext,
    task: TaskRow,
    output: JobOutput,
    states: OutputState,
    attempt: int,
    epoch: int | None,
    written: Written | None,
) -> PayloadOutput:
    revision, name = states[output.dataset_version]
    staging = None
    if output.storage is Storage.PARQUET and epoch is not None:
        staging = ctx.objects.staging_prefix(
            output.dataset_uuid, output.dataset_version, task.task_id, attempt, epoch
        ).uri
    elif output.storage is Storage.POSTGRES and epoch is not None:
        staging = f"postgres_table:staging_{task.task_id.hex}_{attempt}_{epoch}_{output.output_index}"
    return PayloadOutput(
        output_index=output.output_index,
        name=output.name,
        dataset_uuid=output.dataset_uuid,
        dataset_version=output.dataset_version,
        storage=output.storage.value,
        revision=revision,
        dataset=name,
        staging=staging,
        written=None if written is None else _written(written),
    )


def _written(written: Written) -> PayloadWritten:
    taken_back = [InvalidateRange(span.start, span.end) for span in written.taken_back]
    return PayloadWritten(written.cursor, written.finalized, taken_back)
