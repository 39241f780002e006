"""Events of a producer: parsed, checked to be about its own outputs, and resolved to a dataset version.

A task may send events about its own job's outputs only; about any version of them, though an event of one that
isn't current is only recorded. A published name means the version that the task itself writes. One exception: an
operator that checks data (``invalidates_inputs``) may invalidate what it reads, in exactly the version that it
reads, and send no other event about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import msgspec

from tracelake.contracts.dispatcher_api import EventIn, OutputIn
from tracelake.contracts.manifest import ChainEdges
from tracelake.domain.dag.model import Storage
from tracelake.domain.errors import Forbidden, Invalid
from tracelake.domain.events import (
    CursorScope,
    DatasetRef,
    Event,
    InvalidationScope,
    PartitionScope,
    Scope,
    partition_range,
)
from tracelake.domain.operators.catalog import CATALOG
from tracelake.store import datasets
from tracelake.store.db import Transaction
from tracelake.store.jobs import JobDefinition, JobInputRow, JobOutputRow


@dataclass(frozen=True, slots=True)
class Producer:
    """The sender of events: an attempt of a task, or a trigger of a source, which has none. ``bulk`` is work of a
    backfill, and so is what follows from it. Events of a ``held`` source are kept until it is released."""

    org_id: UUID
    job_id: UUID
    active: bool
    task_id: UUID | None = None
    attempt: int | None = None
    epoch: int | None = None
    bulk: bool = False
    held: bool = False


@dataclass(frozen=True, slots=True)
class Materialized:
    """The data behind a committed scope."""

    location: str | None = None
    manifest: Any = None
    row_count: int | None = None


@dataclass(frozen=True, slots=True)
class ProducedEvent:
    """``own`` is false for an older generation of the producer's dataset, whose events are only recorded.
    ``materialized`` is set when a completion commits the scope, ``event_id`` for a kept event that is recorded
    already."""

    producer: Producer
    dataset_version: UUID
    storage: Storage
    scope: Scope
    revision: int | None = None
    own: bool = True
    materialized: Materialized | None = None
    event_id: int | None = None

    @property
    def edges(self) -> ChainEdges | None:
        """The recorded edges of a committed partition of a chain."""
        manifest = self.materialized.manifest if self.materialized is not None else None
        edges = manifest.get("edges") if manifest is not None else None
        return None if edges is None else msgspec.convert(edges, ChainEdges)


def parse_event(event: EventIn) -> Event:
    """One event with its scope; raises ``Invalid`` that names the mistake."""
    dataset = DatasetRef.of(event.dataset_uuid, event.dataset_version, event.dataset)
    span = partition_range(event.partition_key, event.start, event.end)
    if event.invalidate is not None:
        if event.cursor is not None or span is not None:
            raise Invalid("InvalidEvent", "an invalidation has no other scope than 'invalidate'")
        if event.id is None:
            raise Invalid("InvalidEvent", "an invalidation needs the producer's 'id'")
        span = partition_range(None, event.invalidate.start, event.invalidate.end)
        assert span is not None
        return Event(dataset, InvalidationScope(span, event.id, event.reason))
    if event.id is not None or event.reason is not None:
        raise Invalid("InvalidEvent", "'id' and 'reason' belong to an invalidation")
    if (event.cursor is None) == (span is None):
        raise Invalid("InvalidEvent", "an event has either a 'cursor' or a 'start' and 'end'")
    if span is not None:
        if event.finalized is not None:
            raise Invalid("InvalidEvent", "'finalized' goes with a 'cursor'")
        return Event(dataset, PartitionScope(span), event.revision)
    assert event.cursor is not None
    return Event(dataset, CursorScope(event.cursor, event.finalized), event.revision)


def _parse_nth(index: int, event: EventIn) -> Event:
    try:
        return parse_event(event)
    except Invalid as error:
        raise Invalid(error.reason, f"events[{index}]: {error.message}") from None


async def resolve_events(
    tx: Transaction, producer: Producer, definition: JobDefinition, events: Sequence[EventIn]
) -> list[ProducedEvent]:
    parsed = [_parse_nth(index, event) for index, event in enumerate(events)]
    names = {event.dataset.name for event in parsed if event.dataset.name is not None}
    by_name = await datasets.by_name(tx, producer.org_id, names) if names else {}
    own = {output.dataset_uuid: output for output in definition.outputs}
    foreign = {
        event.dataset.dataset_version
        for event in parsed
        if event.dataset.dataset_version is not None
        and event.dataset.dataset_version not in {output.dataset_version for output in definition.outputs}
    }
    others = await datasets.versions_by_id(tx, foreign) if foreign else {}
    return [_resolve(producer, definition, event, by_name, own, others) for event in parsed]


def _resolve(
    producer: Producer,
    definition: JobDefinition,
    event: Event,
    by_name: dict[str, UUID],
    own: dict[UUID, JobOutputRow],
    others: dict[UUID, datasets.NamedVersion],
) -> ProducedEvent:
    ref = event.dataset
    uuid = ref.dataset_uuid if ref.name is None else by_name.get(ref.name)
    output = own.get(uuid) if uuid is not None else None
    if output is None:
        if (read := _invalidated_input(definition, uuid, event)) is not None:
            return ProducedEvent(producer, read.dataset_version, read.storage, event.scope)
        raise Forbidden(
            "NotYourDataset",
            f"{ref.name or ref.dataset_uuid} is not an output of {definition.dag_name}/{definition.name}",
        )
    if ref.dataset_version in (None, output.dataset_version):
        _check_scope(output.storage, event.scope)
        return ProducedEvent(producer, output.dataset_version, output.storage, event.scope, event.revision)
    assert ref.dataset_version is not None
    other = others.get(ref.dataset_version)
    if other is None or other.version.dataset_uuid != uuid:
        raise Invalid("UnknownVersion", f"dataset {uuid} never had a version {ref.dataset_version}")
    return ProducedEvent(
        producer, ref.dataset_version, other.version.storage, event.scope, event.revision, own=False
    )


def _invalidated_input(definition: JobDefinition, uuid: UUID | None, event: Event) -> JobInputRow | None:
    """The input that this event invalidates, if its producer may do that."""
    traits = CATALOG.get(definition.operator)
    if traits is None or not traits.invalidates_inputs or not isinstance(event.scope, InvalidationScope):
        return None
    for read in definition.inputs:
        if read.dataset_uuid == uuid and event.dataset.dataset_version in (None, read.dataset_version):
            return read
    return None


def _check_scope(storage: Storage, scope: Scope) -> None:
    if storage is Storage.PARQUET and isinstance(scope, CursorScope):
        raise Invalid("InvalidScope", "a Parquet output is committed by block range, not by cursor")


def resolve_output(
    definition: JobDefinition, output: OutputIn
) -> tuple[JobOutputRow, CursorScope | PartitionScope]:
    """The job's output, and the scope that the completion commits."""
    known = {entry.output_index: entry for entry in definition.outputs}
    target = known.get(output.output_index)
    if target is None:
        raise Invalid(
            "UnknownOutput", f"{definition.dag_name}/{definition.name} has no output {output.output_index}"
        )
    if output.dataset_uuid not in (None, target.dataset_uuid):
        raise Forbidden(
            "NotYourDataset", f"output {output.output_index} is not dataset {output.dataset_uuid}"
        )
    if output.dataset_version not in (None, target.dataset_version):
        raise Invalid(
            "UnknownVersion", f"output {output.output_index} is not version {output.dataset_version}"
        )
    span = partition_range(output.partition_key, output.start, output.end)
    if (output.cursor is None) == (span is None):
        raise Invalid(
            "InvalidScope", f"output {output.output_index} needs either a 'cursor' or a 'start' and 'end'"
        )
    scope: CursorScope | PartitionScope
    scope = PartitionScope(span) if span is not None else CursorScope(output.cursor or 0)
    _check_scope(target.storage, scope)
    return target, scope
