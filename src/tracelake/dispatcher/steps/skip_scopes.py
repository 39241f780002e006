"""Scopes that need no task: no row of any triggering input can match its ``where``.

It is proven by what the commit of the partition recorded (its number of rows, its blocks, the bounds of its files'
columns), never guessed: whatever isn't known may match, and the job runs and filters. Only jobs that store nothing
and by whose outputs nobody is triggered skip scopes: rows that a job makes of no rows, such as a count, and readers
that wait for the scope would be missing. Invalidated scopes always run, since what was published of them has to be
retracted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any
from uuid import UUID

import msgspec

from tracelake.dispatcher.steps.context import StepContext
from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, Storage
from tracelake.domain.where import Predicate
from tracelake.domain.where_bounds import ColumnBounds, can_match
from tracelake.store import jobs
from tracelake.store.db import Transaction
from tracelake.store.jobs import JobDefinition, TriggerRows

BLOCK_COLUMN = "block_number"
_Bounds = dict[str, ColumnBounds]


async def skip_scopes(
    ctx: StepContext, tx: Transaction, scopes: Sequence[tuple[UUID, BlockRange]]
) -> set[tuple[UUID, BlockRange]]:
    """Record those of these scopes that need no task, and return them."""
    definitions = await ctx.definitions.get(tx, {job_id for job_id, _ in scopes})
    filtered = [scope for scope in dict.fromkeys(scopes) if _may_skip(definitions[scope[0]])]
    if not filtered:
        return set()
    skipped = set()
    known = await jobs.skippable_scopes(tx, filtered)
    for (job_id, span), inputs in groupby(known, key=lambda rows: (rows.job_id, rows.scope)):
        where = _triggers(definitions[job_id])
        proven = {rows.input_index for rows in inputs if not _some_match(where[rows.input_index], rows)}
        if proven == where.keys():
            skipped.add((job_id, span))
    if skipped:
        ctx.metrics.skipped.inc(await jobs.skip_scopes(tx, sorted(skipped)))
    return skipped


def _may_skip(definition: JobDefinition) -> bool:
    return (
        definition.execution_strategy is ExecutionStrategy.PER_PARTITION
        and all(output.storage is Storage.NONE for output in definition.outputs)
        and None not in _triggers(definition).values()
    )


def _triggers(definition: JobDefinition) -> dict[int, Predicate | None]:
    return {index: read.where for index, read in enumerate(definition.inputs) if read.trigger}


def _some_match(where: Predicate | None, rows: TriggerRows) -> bool:
    if where is None:
        return True
    # A job reads a scope's rows by their block.
    scope = {BLOCK_COLUMN: ColumnBounds(rows.scope.start, rows.scope.end, False)}
    if rows.files is not None:
        return any(can_match(where, bounds) for bounds in _files(rows.files, scope))
    return rows.row_count != 0 and can_match(where, scope)


def _files(files: Iterable[Mapping[str, Any]], scope: _Bounds) -> Iterable[_Bounds]:
    for file in files:
        if file.get("rows") == 0:
            continue
        blocks = scope
        if file.get("min_block") is not None:
            blocks = {BLOCK_COLUMN: ColumnBounds(file["min_block"], file["max_block"], False)}
        yield {**blocks, **msgspec.convert(file.get("columns") or {}, _Bounds)}
