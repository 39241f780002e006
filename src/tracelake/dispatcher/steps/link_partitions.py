"""Links of a chain's partitions, checked in the transaction that commits them (``domain.chain_links``).

A completion that commits partitions with recorded edges holds their dataset versions, so of two neighbours that
commit at once the second one sees the first. A partition that doesn't link up is committed and invalidated in one
transaction: no reader ever sees it, its reason is recorded, and the task that makes it again is created. Partitions
of older versions have no edges and aren't compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from uuid import UUID

from tracelake.contracts.manifest import ChainEdges
from tracelake.dispatcher.steps.produced_events import ProducedEvent
from tracelake.domain.block_range import BlockRange
from tracelake.domain.chain_links import (
    UNLINKED,
    ChainSpan,
    Seam,
    broken_seams,
    decide_unlinked,
)
from tracelake.domain.errors import Conflict, Invalid
from tracelake.domain.events import InvalidationScope, PartitionScope
from tracelake.store import datasets, invalidations
from tracelake.store.db import Transaction


@dataclass(frozen=True, slots=True)
class _Committing:
    event: ProducedEvent
    span: ChainSpan


async def unlinked(tx: Transaction, produced: Sequence[ProducedEvent]) -> list[ProducedEvent]:
    """The invalidations that must follow if these events are counted now. Without the gates that is a guess; under
    them it holds until the transaction ends."""
    committing = [each for event in produced if (each := _committing(event)) is not None]
    if not committing:
        return []
    _check_each_other(committing)
    beside = await datasets.neighbours(
        tx, [(each.event.dataset_version, each.span.range) for each in committing]
    )
    result: dict[tuple[UUID, str], ProducedEvent] = {}
    for each, found in zip(committing, beside, strict=True):
        around = [_span(span, edges) for span, edges in found]
        broken = broken_seams(each.span, around)
        if not broken:
            continue
        version = each.event.dataset_version
        ids = [key for seam in broken for key in _ids(seam)]
        known = await invalidations.known_ids(tx, version, ids)
        for scope in decide_unlinked(each.span, broken, known):
            result[version, scope.id] = _invalidation(each.event, scope)
    return list(result.values())


def _check_each_other(committing: Sequence[_Committing]) -> None:
    """Neighbours within one call: those of two tasks are completed one by one, so that one of them is newer."""
    # In this order neighbours of a version are next to each other, since its partitions don't overlap.
    ordered = sorted(committing, key=lambda each: (each.event.dataset_version, each.span.range))
    for one, other in pairwise(ordered):
        if one.event.dataset_version != other.event.dataset_version:
            continue
        for seam in broken_seams(one.span, [other.span]):
            if one.event.producer.task_id == other.event.producer.task_id:
                raise Invalid(UNLINKED, f"two partitions of one completion don't link up: {seam}")
            raise Conflict(UNLINKED, f"two completions of one call don't link up: {seam}")


def _ids(seam: Seam) -> list[str]:
    return [seam.invalidation(side).id for side in (seam.lower, seam.upper)]


def _invalidation(event: ProducedEvent, scope: InvalidationScope) -> ProducedEvent:
    return replace(event, scope=scope, revision=None, materialized=None)


def _committing(event: ProducedEvent) -> _Committing | None:
    edges = event.edges
    if edges is None or not isinstance(event.scope, PartitionScope):
        return None
    return _Committing(event, _span(event.scope.range, edges))


def _span(span: BlockRange, edges: ChainEdges) -> ChainSpan:
    return ChainSpan(span, edges.parent_hash, edges.last_hash)
