"""The task payload, with inputs frozen at the claim and own staging places, and the attempt's capability token."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, assert_never
from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import (
    InvalidateRange,
    JobRef,
    PayloadDelivery,
    PayloadHot,
    PayloadInput,
    PayloadInvalidation,
    PayloadOutput,
    PayloadRequest,
    PayloadSource,
    PayloadWritten,
    TaskPayload,
)
from tracelake.contracts.staging import staging_reference
from tracelake.contracts.token_claims import TokenDataset, TokenPrefixes
from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.buffers import CURSOR_COLUMN
from tracelake.domain.dag.model import SourceKind, Storage
from tracelake.domain.task import TaskKind
from tracelake.store.db import Row
from tracelake.store.invalidations import SourcePosition
from tracelake.store.jobs import JobDefinition, JobOutputRow
from tracelake.store.sources import DeliveryRow, TaskRequest
from tracelake.store.tasks import TaskRow
from tracelake.tokens import capability

OutputState = dict[Any, tuple[int, str | None]]


def freeze_inputs(task: TaskRow, rows: Sequence[Row]) -> list[PayloadInput]:
    """The attempt's inputs; later changes of the datasets don't affect them."""
    return [_input(task, row) for row in rows]


def to_json(inputs: Sequence[PayloadInput]) -> list[dict[str, Any]]:
    frozen: list[dict[str, Any]] = msgspec.to_builtins(inputs)
    return frozen


def from_json(frozen: list[dict[str, Any]]) -> list[PayloadInput]:
    return msgspec.convert(frozen, list[PayloadInput])


def render(
    ctx: StepContext,
    task: TaskRow,
    definition: JobDefinition,
    inputs: list[PayloadInput],
    outputs: OutputState,
    *,
    attempt: int,
    epoch: int | None,
    state: Any = None,
    written: Mapping[UUID, SourcePosition] | None = None,
    config: Mapping[str, Any] | None = None,
    request: TaskRequest | None = None,
) -> TaskPayload:
    """``config`` replaces the job's own, for the platform's jobs, whose configuration may change. ``request`` is
    the one that a source's task is for."""
    return TaskPayload(
        task_id=task.task_id,
        attempt=attempt,
        epoch=epoch,
        job=JobRef(definition.dag_name, definition.name),
        operator=definition.operator,
        config=definition.config if config is None else dict(config),
        inputs=inputs,
        outputs=[
            _output(ctx, task, output, outputs, attempt, epoch, (written or {}).get(output.dataset_version))
            for output in definition.outputs
        ],
        runtime=task.runtime,
        timeout_seconds=task.timeout_seconds,
        heartbeat_timeout_seconds=task.heartbeat_timeout_seconds,
        update_strategy=definition.update_strategy.value,
        unique_key=list(definition.unique_key),
        secrets=list(definition.secrets),
        udf=definition.udf,
        state=state,
        idle_timeout_seconds=task.idle_timeout_seconds,
        source=None if request is None else _source(request),
    )


def _source(request: TaskRequest) -> PayloadSource:
    match request.kind:
        case SourceKind.CRON:
            return PayloadSource("cron", tick=request.number)
        case SourceKind.WEBHOOK:
            assert request.delivery is not None
            return PayloadSource("webhook", delivery=_delivery(request, request.delivery))
        case SourceKind.MANUAL:
            asked = PayloadRequest(request.number, request.accepted_at, **request.scope)
            return PayloadSource("manual", request=asked)
        case SourceKind.ALWAYS_ON:
            raise AssertionError("an always-on source has no requests")
        case never:
            assert_never(never)


def _delivery(request: TaskRequest, sent: DeliveryRow) -> PayloadDelivery:
    body, encoded = None, None
    if sent.body is not None:
        try:
            body = sent.body.decode()
        except UnicodeDecodeError:
            encoded = base64.b64encode(sent.body).decode()
    return PayloadDelivery(
        request.number,
        sent.delivery_id,
        request.accepted_at,
        sent.body_bytes,
        sent.content_type,
        body,
        encoded,
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
    output: JobOutputRow,
    states: OutputState,
    attempt: int,
    epoch: int | None,
    written: SourcePosition | None,
) -> PayloadOutput:
    revision, name = states[output.dataset_version]
    staging = None
    if output.storage is Storage.PARQUET and epoch is not None:
        staging = ctx.objects.staging_prefix(
            output.dataset_uuid, output.dataset_version, task.task_id, attempt, epoch
        ).uri
    elif output.storage is Storage.POSTGRES and epoch is not None:
        staging = staging_reference(task.task_id, attempt, epoch, output.output_index)
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


def _written(written: SourcePosition) -> PayloadWritten:
    to_rewrite = [InvalidateRange(span.start, span.end) for span in written.taken_back]
    return PayloadWritten(written.cursor, written.finalized, to_rewrite)


async def issue_token(ctx: StepContext, org_id: UUID, payload: TaskPayload, now: datetime) -> str:
    """A token to read the inputs by version, and to write the attempt's own staging places.

    Read prefixes stay empty until credentials are made from them: data is read by query or by the trusted
    operator's engine.
    """
    issued = await capability.issue(
        ctx.signer,
        issuer=ctx.issuer,
        audience=ctx.audience,
        org_id=org_id,
        task_id=payload.task_id,
        attempt=payload.attempt,
        timeout_seconds=payload.timeout_seconds,
        now=now,
        datasets=[
            TokenDataset(dataset_uuid=i.dataset_uuid, dataset_version=i.dataset_version, name=i.dataset)
            for i in payload.inputs
        ],
        s3=TokenPrefixes(
            write=tuple(
                output.staging
                for output in payload.outputs
                if output.staging is not None and output.storage == Storage.PARQUET.value
            )
        ),
        jti=ctx.entropy.uuid(),
    )
    return issued.token
