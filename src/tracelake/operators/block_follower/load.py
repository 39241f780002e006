"""Loaders: fetch a range of blocks, prove them, and stage their rows in all outputs.

``InProcessLoader`` works in the operator's process, a few blocks at a time. It is used at the tip, where a block
is staged as soon as its endpoint has answered, whatever Spark is doing. It stages only blocks that continue the
chain, so the next commit is one chain, however the endpoints have changed their minds meanwhile.

``SparkLoader`` lets Spark's executors work, for a follower that is far behind. Each part of the range goes to
staging tables of its own; their names come back in a report, with the hashes that show how the parts fit together.
Problems come back in it as well: an exception would be retried by Spark, and reach the follower as Java text. A
range during which the chain changed is dropped whole.

``FollowedTables`` are the follower's outputs as tables of a chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import msgspec
import pyarrow as pa

from tracelake.contracts.operator_protocol import StagedTable
from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.domain.table_layout import TableLayout
from tracelake.evm.decode import decode
from tracelake.evm.fetch import fetch_blocks, fetch_span
from tracelake.evm.raw_block import ChainTable, RawBlock, Senders, Verify, need_receipts, portions
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES, TableSchema
from tracelake.operators.block_follower.chain import COLUMNS, link_of_block, links_of_rows
from tracelake.operators.block_follower.decide import BlockLink, FollowerConfig, count_linked
from tracelake.operators.cells import CellProblem, reports_of, spark_slots
from tracelake.operators.context import Context
from tracelake.operators.outputs import Output
from tracelake.tables.postgres_staging import StagingPart, StagingPlace

_PARTS_PER_SLOT = 2
"""More than one, so that a slow part doesn't leave the other slots idle for long."""
_LEAST_BLOCKS = 10
PARTITION_BLOCKS = 100_000


class BlockLoader(Protocol):
    endpoints: set[str]
    """Endpoints that have delivered blocks so far, shown in the progress."""

    def load(self, first: int, last: int, parent: bytes | None) -> list[BlockLink]:
        """Stage the rows of these blocks as far as they continue ``parent``, each the parent of the next; returns
        the staged ones. ``parent`` None: nothing is stored before them."""
        ...


class InProcessLoader:
    def __init__(self, tables: FollowedTables, pool: Pool, config: FollowerConfig) -> None:
        self._tables = tables
        self._pool = pool
        self._config = config
        self.endpoints: set[str] = set()

    def load(self, first: int, last: int, parent: bytes | None) -> list[BlockLink]:
        fetched = fetch_blocks(
            self._pool,
            range(first, last + 1),
            receipts=self._tables.needs_receipts,
            traces=self._tables.needs_traces,
            verify=self._config.verify,
            senders=self._config.senders,
        )
        loaded: list[BlockLink] = []
        for raw in portions(fetched):
            links = [link_of_block(each) for each in raw]
            good = count_linked(parent, links)
            if good:
                self.endpoints.update(each.endpoint for each in raw[:good])
                self._tables.stage(raw[:good], self._config.chain_id)
                loaded += links[:good]
                # The next portion must continue this one: the chain may change while it is read.
                parent = loaded[-1].hash
            if good < len(links):
                break
        return loaded


class SparkLoader:
    def __init__(self, ctx: Context, tables: FollowedTables, config: FollowerConfig) -> None:
        self._ctx = ctx
        self._tables = tables
        self._config = config
        self.endpoints: set[str] = set()

    def load(self, first: int, last: int, parent: bytes | None) -> list[BlockLink]:
        reports = self._run(self._work(BlockRange(first, last)))
        for dataset, output in self._tables.outputs.items():
            # Before any check, so that dropping the staged rows includes these tables.
            output.add_parts([report.tables[dataset] for report in reports if dataset in report.tables])
        for report in reports:
            if report.problem is not None:
                report.problem.fail()
        links = [link for report in reports for link in report.links()]
        good = count_linked(parent, links)
        if good == 0:
            return []
        self.endpoints.update(name for report in reports for name in report.endpoints)
        # The rows of all parts are staged already, so a part of the range can't be committed.
        if good < last - first + 1:
            raise Unavailable(
                "ChainChanged", f"the chain changed at block {first + good} while {first} to {last} were read"
            )
        return links

    def _run(self, work: StageWork) -> list[PartReport]:
        """Run one Spark job; returns the reports in the order of blocks."""
        reports = reports_of(self._ctx.spark, range(work.parts), partial(stage_part, work), PartReport)
        # Spark may run parts in any order, and links are checked from block to block.
        return sorted(reports, key=lambda report: report.start)

    def _work(self, span: BlockRange) -> StageWork:
        blocks = span.end - span.start + 1
        size = max(_LEAST_BLOCKS, -(-blocks // (self._slots * _PARTS_PER_SLOT)))
        return StageWork(
            places={
                dataset: output.open_parts(
                    TABLES[dataset].hot_arrow,
                    types=TABLES[dataset].postgres_types,
                    layout=hot_layout(TABLES[dataset]),
                )
                for dataset, output in self._tables.outputs.items()
            },
            pool=self._ctx.rpc_pool(),
            # Each slot has a pool of its own, and together they must keep the endpoints' limits.
            share=1 / self._slots,
            chain_id=self._config.chain_id,
            verify=self._config.verify,
            senders=self._config.senders,
            span=span,
            size=size,
        )

    @cached_property
    def _slots(self) -> int:
        return spark_slots(self._ctx.spark)


@dataclass(frozen=True, slots=True)
class StageWork:
    """The work of executors, sent by pickle. Part n is the n-th ``size`` blocks of ``span``;
    ``share`` is a part's share of the endpoints' limits."""

    places: dict[ChainTable, StagingPlace]
    pool: PoolConfig = field(repr=False)
    share: float
    chain_id: int
    verify: Verify
    senders: Senders
    span: BlockRange
    size: int

    @property
    def parts(self) -> int:
        return -(-(self.span.end - self.span.start + 1) // self.size)

    def part(self, number: int) -> BlockRange:
        start = self.span.start + number * self.size
        return BlockRange(start, min(self.span.end, start + self.size - 1))


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """``parent`` is that of the first block; ``hashes`` are the blocks' own, ``endpoints`` delivered them."""

    start: int
    parent: bytes = b""
    hashes: list[bytes] = []
    tables: dict[str, StagedTable] = {}
    endpoints: list[str] = []
    problem: CellProblem | None = None

    def links(self) -> Iterator[BlockLink]:
        parent = self.parent
        for number, each in enumerate(self.hashes, self.start):
            yield BlockLink(number, each, parent)
            parent = each


def stage_part(work: StageWork, number: int) -> PartReport:
    """Runs in the executors. Parts are counted from 0."""
    span = work.part(number)
    try:
        return _stage(work, span)
    except Exception as error:
        return PartReport(start=span.start, problem=CellProblem.of(error, span, "FollowFailed"))


def _stage(work: StageWork, span: BlockRange) -> PartReport:
    links: list[BlockLink] = []
    endpoints: set[str] = set()
    with ExitStack() as undo:
        parts: dict[ChainTable, StagingPart] = {}
        fetched = fetch_span(work.pool, span, work.places.keys(), work.verify, work.senders, share=work.share)
        for raw in portions(fetched):
            links += map(link_of_block, raw)
            endpoints.update(each.endpoint for each in raw)
            for dataset, place in work.places.items():
                rows = to_hot_rows(TABLES[dataset], raw, work.chain_id)
                if rows.num_rows and dataset not in parts:
                    parts[dataset] = StagingPart(place.dsn, place.like)
                    undo.callback(parts[dataset].discard)
                if rows.num_rows:
                    parts[dataset].load(rows)
        # From here on the tables are reported, and the follower drops them if it must.
        undo.pop_all()
    for part in parts.values():
        part.close()
    return PartReport(
        start=span.start,
        parent=links[0].parent,
        hashes=[link.hash for link in links],
        tables={str(dataset): StagedTable(part.name, part.rows) for dataset, part in parts.items()},
        endpoints=sorted(endpoints),
    )


class FollowedTables:
    """By dataset, in the order of the outputs; ``blocks`` is always among them, since a chain is followed by the
    hashes that are stored there."""

    def __init__(self, ctx: Context) -> None:
        self.outputs: dict[ChainTable, Output] = {}
        for output in ctx.outputs:
            try:
                self.outputs[ChainTable(output.name)] = output
            except ValueError:
                known = ", ".join(ChainTable)
                raise Invalid(
                    "InvalidOutput", f"block_follower has no output {output.name!r}; it has {known}"
                ) from None
        if ChainTable.BLOCKS not in self.outputs:
            raise Invalid(
                "InvalidOutput", "block_follower needs an output 'blocks': it goes by the hashes stored there"
            )

    @property
    def blocks(self) -> Output:
        return self.outputs[ChainTable.BLOCKS]

    @property
    def needs_receipts(self) -> bool:
        return need_receipts(self.outputs)

    @property
    def needs_traces(self) -> bool:
        return ChainTable.TRACES in self.outputs

    def span(self) -> BlockRange | None:
        return self.blocks.stored_span()

    def links(self, start: int, end: int) -> list[BlockLink]:
        return links_of_rows(self.blocks.stored(COLUMNS, start, end))

    def chain_id(self, number: int) -> int | None:
        """The chain that a stored block is of."""
        found = self.blocks.stored(("chain_id",), number, number)
        return found.column(0)[0].as_py() if found.num_rows else None

    def timestamp(self, number: int) -> float | None:
        """The time of a stored block, in seconds."""
        found = self.blocks.stored(("timestamp",), number, number)
        return found.column(0)[0].as_py().timestamp() if found.num_rows else None

    def stage(self, raw: Sequence[RawBlock], chain_id: int) -> None:
        for dataset, output in self.outputs.items():
            schema = TABLES[dataset]
            rows = to_hot_rows(schema, raw, chain_id)
            output.stage(rows, types=schema.postgres_types, layout=hot_layout(schema))

    def drop_staged(self) -> None:
        """Drop staged rows that won't be committed."""
        for output in self.outputs.values():
            if output.has_staged:
                output.discard()

    def reset_staging(self) -> None:
        """The staging tables may be gone, or hold anything."""
        for output in self.outputs.values():
            output.discard()


def to_hot_rows(schema: TableSchema, raw: Sequence[RawBlock], chain_id: int) -> pa.Table:
    return schema.to_hot(pa.Table.from_batches([decode(raw, schema.dataset, chain_id)]))


def hot_layout(schema: TableSchema) -> TableLayout:
    return TableLayout(indexes=schema.lookups, partition_blocks=PARTITION_BLOCKS)
