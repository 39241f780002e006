"""The route of a backfill: from a manual source, through jobs that only cut ranges, to the job that stores them.

Pure: from the active jobs and the edges between them it decides where a backfill of a job begins, and on which grid
it is cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from tracelake.domain.block_range import BlockRange
from tracelake.domain.dag.model import ExecutionStrategy, SourceKind
from tracelake.domain.errors import Invalid
from tracelake.domain.operators.in_process import RANGE_SPLITTER

DEFAULT_CHUNK = 1000
#: About the number of events of a backfill in an order that the splitter doesn't give.
MAX_SLICES = 200


@dataclass(frozen=True)
class JobNode:
    """``stores``: it has an output with stored rows."""

    job_id: UUID
    dag: str
    name: str
    operator: str
    source_kind: SourceKind | None
    strategy: ExecutionStrategy | None
    config: Mapping[str, Any]
    stores: bool
    paused: bool
    max_concurrency: int | None

    @property
    def label(self) -> str:
        return f"{self.dag}/{self.name}"


@dataclass(frozen=True)
class BackfillRoute:
    """``between``: jobs between source and target; ``also``: other jobs that the source's events trigger."""

    source: JobNode
    between: tuple[JobNode, ...]
    target: JobNode
    also: tuple[JobNode, ...]

    @property
    def splitter(self) -> JobNode | None:
        """The splitter with the smallest chunks."""
        found = [job for job in self.between if job.operator == RANGE_SPLITTER.name]
        return min(found, key=_chunk_size, default=None)

    @property
    def grid(self) -> int | None:
        return _chunk_size(self.splitter) if self.splitter is not None else None

    def chunk(self, wanted: int | None) -> int:
        """Blocks per task. The splitter always cuts on its own grid, so only smaller chunks are possible."""
        if self.splitter is None or self.grid is None:
            return wanted or DEFAULT_CHUNK
        if wanted is None:
            return self.grid
        if self.grid % wanted:
            raise Invalid(
                "ChunkOffGrid",
                f"chunks of {wanted:,} blocks don't fit the grid of {self.splitter.label}, which cuts at every "
                f"{self.grid:,}: use a number that divides {self.grid:,}, or change chunk_size in the DAG",
            )
        return wanted


def find_route(
    jobs: Mapping[UUID, JobNode], edges: Iterable[tuple[UUID, UUID]], named: UUID
) -> BackfillRoute:
    """``edges`` are pairs of producer and the consumer that it triggers."""
    before: dict[UUID, list[UUID]] = {}
    behind: dict[UUID, list[UUID]] = {}
    for producer, consumer in edges:
        before.setdefault(consumer, []).append(producer)
        behind.setdefault(producer, []).append(consumer)
    target = _target(jobs, behind, jobs[named])
    if target.strategy is not ExecutionStrategy.PER_PARTITION:
        raise Invalid(
            "NoBackfill", f"{target.label} doesn't run PerPartition, so it can't be run for a block range"
        )
    sources, between, stored = _upstream(jobs, before, target)
    if len(sources) > 1:
        names = ", ".join(job.label for job in sources)
        raise Invalid("SeveralSources", f"{target.label} is fed by several manual sources: {names}")
    if not sources:
        raise Invalid("NoManualSource", _no_source(target, stored))
    # The target stands apart in the route; ``also`` is only what comes along.
    fed = {job.job_id for job in _fed(jobs, behind, sources[0])} - {target.job_id}
    also = tuple(jobs[job_id] for job_id in sorted(fed, key=lambda each: jobs[each].label))
    return BackfillRoute(sources[0], tuple(between), target, also)


def slices(
    missing: BlockRange, route: BackfillRoute, chunk: int, *, newest_first: bool, chunks: int
) -> Iterator[BlockRange]:
    """The events to send for a missing range, in the order in which they should run.

    The splitter cuts an event into chunks in ascending order. So one event is enough for that order, and many are
    needed for the other one, for chunks smaller than its grid, and where there is no splitter.
    """
    if route.grid is None or chunk != route.grid:
        yield from missing.split_on_grid(chunk, last_first=newest_first)
    elif newest_first:
        # Whole chunks per event, so that newest-first doesn't send one event for each chunk.
        yield from missing.split_on_grid(chunk * -(-max(chunks, 1) // MAX_SLICES), last_first=True)
    else:
        yield missing


def _target(jobs: Mapping[UUID, JobNode], behind: Mapping[UUID, list[UUID]], named: JobNode) -> JobNode:
    """The job that stores rows: the named one, or the one that the named source or splitter feeds."""
    if named.stores and named.source_kind is None:
        return named
    if named.source_kind is not None and named.source_kind is not SourceKind.MANUAL:
        raise Invalid(
            "NoBackfill",
            f"{named.label} is a source ({named.source_kind}): it chooses its own range",
        )
    fed = [job for job in _fed(jobs, behind, named) if job.stores]
    if len(fed) != 1:
        names = ", ".join(job.label for job in fed)
        why = f"feeds several jobs, name one of them: {names}" if fed else "feeds no job that stores rows"
        raise Invalid("NoBackfill", f"{named.label} {why}")
    return fed[0]


def _fed(jobs: Mapping[UUID, JobNode], behind: Mapping[UUID, list[UUID]], first: JobNode) -> list[JobNode]:
    """The jobs downstream of ``first``, up to the first that store rows."""
    found: dict[UUID, JobNode] = {}
    seen: set[UUID] = set()
    to_see = [first.job_id]
    while to_see:
        for consumer in behind.get(to_see.pop(), []):
            # A diamond leads to one job twice, and an edge may lead to a job that isn't active.
            if consumer in jobs and consumer not in seen:
                seen.add(consumer)
                if jobs[consumer].stores:
                    found[consumer] = jobs[consumer]
                else:
                    to_see.append(consumer)
    return sorted(found.values(), key=lambda job: job.label)


def _upstream(
    jobs: Mapping[UUID, JobNode], before: Mapping[UUID, list[UUID]], target: JobNode
) -> tuple[list[JobNode], list[JobNode], list[JobNode]]:
    """Manual sources, the jobs between them and the target, and stored inputs, which pass no range on."""
    sources: dict[UUID, JobNode] = {}
    between: dict[UUID, JobNode] = {}
    stored: dict[UUID, JobNode] = {}
    to_see = [target.job_id]
    while to_see:
        for producer in before.get(to_see.pop(), []):
            job = jobs.get(producer)
            if job is None or producer in sources or producer in between:
                continue
            if job.source_kind is SourceKind.MANUAL:
                sources[producer] = job
            elif job.stores and job.source_kind is None:
                stored[producer] = job
            elif job.source_kind is None:
                between[producer] = job
                to_see.append(producer)
    return sorted(sources.values(), key=lambda job: job.label), list(between.values()), list(stored.values())


def _no_source(target: JobNode, stored: list[JobNode]) -> str:
    if stored:
        names = ", ".join(sorted(job.label for job in stored))
        return f"{target.label} follows {names}: backfill those, and it follows"
    return (
        f"{target.label} isn't fed by a manual source: put one before it (activation: source, "
        f"source: {{kind: manual}}) with a {RANGE_SPLITTER.name} in between"
    )


def _chunk_size(splitter: JobNode) -> int:
    size = splitter.config.get("chunk_size", DEFAULT_CHUNK)
    return size if isinstance(size, int) and size > 0 else DEFAULT_CHUNK
