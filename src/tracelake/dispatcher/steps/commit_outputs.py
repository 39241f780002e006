"""Step 7, commit: checks the outputs of a completion and turns them into events that count.

Files are verified before the transaction, against the attempt's own staging place. Inside it the outputs must be
the job's own, lie in the task's scope, and cover what they replace; and nothing that the task read or writes may
have been invalidated since its claim.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any
from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import CompleteRequest, OutputIn
from tracelake.dispatcher.steps import render_payload
from tracelake.dispatcher.steps.context import StepContext
from tracelake.dispatcher.steps.produced_events import (
    Materialized,
    ProducedEvent,
    Producer,
    resolve_events,
    resolve_output,
)
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, Storage
from tracelake.domain.errors import Conflict, Invalid
from tracelake.domain.events import CursorScope, PartitionScope
from tracelake.domain.operators.catalog import NOOP
from tracelake.domain.task import TaskKind, check_may_act
from tracelake.objects.verify import verify_output
from tracelake.store import datasets, invalidations, tasks
from tracelake.store.datasets import StoredPartition, UpdateRead, Version
from tracelake.store.db import DeployLock, Transaction
from tracelake.store.invalidations import UsedScope
from tracelake.store.jobs import JobDefinition
from tracelake.store.tasks import TaskRow

Files = dict[int, list[dict[str, Any]]]
"""The files that were found for each output of a completion, by its place in the list."""


async def verify_files(ctx: StepContext, request: CompleteRequest) -> Files:
    """Verify the files that a completion reports; its fence is checked later, in the transaction.

    Exactly the files found now are committed, so that a file added later is never part of the partition. For an
    attempt that is over no files are verified: the transaction refuses it for the right reason.
    """
    if request.status != "Completed" or request.attempt is None or not any(map(_has_files, request.outputs)):
        return {}

    async def work(tx: Transaction) -> tuple[TaskRow, JobDefinition] | None:
        task = await tasks.read(tx, request.task_id)
        if task is None or task.state.attempt != request.attempt:
            return None
        return task, (await ctx.definitions.get(tx, [task.job_id]))[task.job_id]

    # No lock is held while files are opened: a slow disk must not hold up other completions.
    known = await ctx.db.run(work, lock=DeployLock.NONE)
    if known is None:
        return {}
    task, definition = known
    try:
        check_may_act(task.state, request.attempt, request.lease_token)
    # The transaction refuses it again, and finds out there whether it repeats an accepted completion.
    except Conflict:
        return {}
    files: Files = {}
    for index, output in enumerate(request.outputs):
        target, scope = resolve_output(definition, output)
        if target.storage is not Storage.PARQUET or task.epoch is None or not _has_files(output):
            continue
        staging = ctx.objects.staging_prefix(
            target.dataset_uuid, target.dataset_version, task.task_id, request.attempt, task.epoch
        )
        found = await verify_output(
            ctx.objects,
            staging,
            output.location or staging.uri,
            output.manifest,
            output.row_count,
            *scope.bounds,
            name=target.name,
        )
        files[index] = [{"location": file.location.uri, "bytes": file.bytes} for file in found]
    return files


def _has_files(output: OutputIn) -> bool:
    return output.location is not None or output.manifest is not None


async def produced_by_completion(
    tx: Transaction, task: TaskRow, definition: JobDefinition, request: CompleteRequest, files: Files
) -> list[ProducedEvent]:
    """The events that this completion commits: those that it names, and one for each other output."""
    producer = Producer(
        definition.org_id,
        task.job_id,
        task.state.job_active,
        task.task_id,
        request.attempt,
        task.epoch,
        task.bulk,
    )
    outputs = [
        _output_event(task, definition, producer, output, files.get(index))
        for index, output in enumerate(request.outputs)
    ]
    _check_complete(task, definition, request.outputs)
    sent = await resolve_events(tx, producer, definition, request.events)
    outputs += _implied(task, definition, producer, [*outputs, *sent])
    committed = {(event.dataset_version, event.scope.bounds, event.scope.kind): event for event in outputs}
    # Of two entries only the last would be kept, and the other's files would be lost silently.
    if len(committed) != len(outputs):
        raise Invalid(
            "OutputTwice", "an output is listed twice for one scope: report all its files in one entry"
        )
    merged = [
        committed.pop((event.dataset_version, event.scope.bounds, event.scope.kind), event) for event in sent
    ]
    return [*committed.values(), *merged]


def _implied(
    task: TaskRow, definition: JobDefinition, producer: Producer, named_events: Sequence[ProducedEvent]
) -> list[ProducedEvent]:
    """A no-op's completion stands for its whole scope: outputs that it doesn't name are announced for it."""
    if definition.operator != NOOP:
        return []
    scope: CursorScope | PartitionScope | None = None
    if task.scope is not None:
        scope = PartitionScope(task.scope)
    elif (upto := max((move[2] for move in consumed(task)), default=-1)) >= 0:
        scope = CursorScope(upto)
    named = {event.dataset_version for event in named_events}
    return [
        ProducedEvent(producer, output.dataset_version, output.storage, scope)
        for output in definition.outputs
        if scope is not None and output.storage is Storage.NONE and output.dataset_version not in named
    ]


def _output_event(
    task: TaskRow,
    definition: JobDefinition,
    producer: Producer,
    output: OutputIn,
    files: list[dict[str, Any]] | None,
) -> ProducedEvent:
    target, scope = resolve_output(definition, output)
    if target.storage is Storage.PARQUET and files is None and output.row_count != 0:
        raise Invalid("OutputMissing", f"output {output.output_index} names no files and isn't empty")
    stored = target.storage is not Storage.NONE and isinstance(scope, PartitionScope)
    if stored and task.scope is not None and not task.scope.covers(BlockRange(*scope.bounds)):
        raise Invalid(
            "OutputOutsideScope",
            f"output {output.output_index} is {scope.bounds}, the task's scope is {task.scope.partition_key}",
        )
    return ProducedEvent(
        producer,
        target.dataset_version,
        target.storage,
        scope,
        materialized=Materialized(
            output.location,
            _manifest(output, files),
            output.row_count,
        ),
    )


def _manifest(output: OutputIn, files: list[dict[str, Any]] | None) -> dict[str, Any] | None:
    if output.manifest is not None:
        manifest: dict[str, Any] = msgspec.to_builtins(output.manifest)
        if files is not None:
            # The verified spelling of each location: readers accept no other.
            named = zip(manifest["files"], files, strict=True)
            manifest["files"] = [{**file, "location": found["location"]} for file, found in named]
        return manifest
    return {"files": files} if files is not None else None


def _check_complete(task: TaskRow, definition: JobDefinition, outputs: Sequence[OutputIn]) -> None:
    """A completed scope lists all its stored outputs; an empty one is listed with a row count of 0."""
    if definition.execution_strategy is not ExecutionStrategy.PER_PARTITION or task.scope is None:
        return
    given = {output.output_index for output in outputs}
    missing = [
        o.name for o in definition.outputs if o.storage is not Storage.NONE and o.output_index not in given
    ]
    if missing:
        raise Invalid("OutputMissing", f"the completion doesn't list its outputs {', '.join(missing)}")


async def uncovered(
    tx: Transaction, produced: Sequence[ProducedEvent], versions: dict[UUID, Version]
) -> dict[UUID, str]:
    """Tasks whose partitions would cut through current ones instead of covering them, and why each is refused."""
    stored = [
        StoredPartition(
            versions[event.dataset_version], event.scope.range, event.producer.task_id, 0, 0, None, None, None
        )
        for event in produced
        if isinstance(event.scope, PartitionScope)
        and event.storage is not Storage.NONE
        and event.materialized is not None
        and event.producer.task_id is not None
    ]
    if not stored:
        return {}
    refused = dict.fromkeys(_colliding(stored), "partitions of one completion touch the same blocks")
    cut = await datasets.not_covered(tx, stored)
    for partition in stored:
        for version, there in cut:
            span = partition.range
            if (
                version == partition.version.dataset_version
                and there.overlaps(span)
                and not span.covers(there)
            ):
                refused[partition.task_id] = _overlap(span, there)
    return refused


def _overlap(span: BlockRange, there: BlockRange) -> str:
    """Partitions never overlap, so one that touches another must replace all of it."""
    if there.covers(span):
        return (
            f"blocks {span.partition_key} lie within the partition {there.partition_key}, which is committed: none "
            f"of them is missing. To make them again, ask for all of {there.partition_key}"
        )
    whole = BlockRange(min(span.start, there.start), max(span.end, there.end))
    return (
        f"blocks {span.partition_key} would cut through the partition {there.partition_key}, which is committed, "
        f"and a partition must cover the ones that it touches: ask for {whole.partition_key}, or for what is "
        "missing"
    )


def _colliding(stored: Sequence[StoredPartition]) -> set[UUID]:
    """Tasks that would commit one block twice. Two tasks of one call that overlap are completed one by one."""
    colliding = set()
    # In this order, if any two of a version overlap, some two neighbours do.
    ordered = sorted(stored, key=lambda partition: (partition.version.version_no, partition.range))
    for one, other in pairwise(ordered):
        if one.version.version_no == other.version.version_no and one.range.overlaps(other.range):
            if one.task_id != other.task_id:
                raise Invalid("PartitionOverlap", "two completions of one call touch the same blocks")
            colliding.add(one.task_id)
    return colliding


async def with_changed_inputs(
    tx: Transaction, completed: Sequence[TaskRow], versions: dict[UUID, Version]
) -> set[UUID]:
    """Tasks whose inputs or own outputs were invalidated since their claim, or whose cursor was rewound; and
    updates that may have missed a partition committed within the range that they read."""
    used = [
        scope
        for task in completed
        for scope in _used(task)
        # Most versions haven't moved at all, which is known without a query.
        if versions[scope.dataset_version].revision > scope.revision
    ]
    changed = await invalidations.changed_meanwhile(tx, used)
    updates = [task for task in completed if task.state.kind is TaskKind.CURSOR]
    if updates:
        positions = await datasets.positions(tx, {task.job_id for task in updates})
        for task in updates:
            for read in render_payload.from_json(task.inputs or []):
                if not read.trigger:
                    continue
                position = positions[task.job_id, read.input_index]
                undone = read.invalidation.revision if read.invalidation else None
                # The cursor was moved since the claim, by a rewind
                # or another task: to advance it could skip blocks.
                if (position.cursor, position.inv_revision) != (read.after, undone):
                    changed.add(task.task_id)
        changed |= await datasets.filled_in_since(
            tx, [read for task in updates for read in _partitioned(task)]
        )
    return changed


def _partitioned(task: TaskRow) -> list[UpdateRead]:
    """The ranges that an update read from partitions. Attempts claimed by older versions have no ``as_of``."""
    return [
        UpdateRead(task.task_id, read.dataset_version, read.after, read.upto, read.as_of)
        for read in render_payload.from_json(task.inputs or [])
        if isinstance(read.after, int) and isinstance(read.upto, int) and isinstance(read.as_of, int)
        if read.after < read.upto
    ]


def consumed(task: TaskRow) -> list[tuple[UUID, int, int]]:
    """How far a completed PerUpdate task has read each of its triggering inputs."""
    if task.state.kind is not TaskKind.CURSOR:
        return []
    return [
        (task.job_id, read.input_index, read.upto)
        for read in render_payload.from_json(task.inputs or [])
        if read.trigger and isinstance(read.upto, int)
    ]


def used_versions(task: TaskRow) -> set[UUID]:
    return {scope.dataset_version for scope in _used(task)}


def _used(task: TaskRow) -> list[UsedScope]:
    """The scopes that the attempt worked on. A PerUpdate task depends on everything up to where it read."""
    used = []
    reads = render_payload.from_json(task.inputs or [])
    upto = max((read.upto for read in reads if isinstance(read.upto, int)), default=MAX_BLOCK)
    for read in reads:
        start, end = (task.scope.start, task.scope.end) if task.scope else (0, upto)
        used.append(UsedScope(task.task_id, read.dataset_version, read.revision, start, end))
        if read.hot is not None:
            used.append(UsedScope(task.task_id, read.hot.dataset_version, read.hot.revision, start, end))
    if task.scope is not None:
        for version, revision in (task.output_revisions or {}).items():
            used.append(UsedScope(task.task_id, UUID(version), revision, task.scope.start, task.scope.end))
    return used
