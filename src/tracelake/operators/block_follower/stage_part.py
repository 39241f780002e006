"""What executors do while a follower catches up: fetch a part of a range, prove it, and load the rows of all
outputs.

Each part goes to staging tables of its own, whose names come back in its report, with the hashes that show
how the parts fit together. What went wrong comes back as well: an exception would be retried by Spark, and
reach the follower as a page of Java.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
import pyarrow as pa

from tracelake.contracts.operator_protocol import StagedTable
from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import BlockRange
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.portions import need_receipts, portions
from tracelake.evm.raw_block import Dataset, RawBlock, Verify
from tracelake.evm.rpc.kept_pool import kept_pool
from tracelake.evm.schemas import TABLES
from tracelake.operators.block_follower.decide import Link
from tracelake.operators.block_follower.links import link_of_block
from tracelake.operators.block_follower.tables import hot_rows
from tracelake.operators.cell_report import CellProblem
from tracelake.operators.postgres_output import PartPlace
from tracelake.operators.spark_postgres_output import Part

REPORTS_DDL = "report string"


@dataclass(frozen=True, slots=True)
class StageWork:
    """What executors need to know; travels to them by pickle. Part n is the n-th ``size`` blocks of ``span``;
    ``share`` is a part's share of the endpoints' limits."""

    places: dict[Dataset, PartPlace]
    pool: PoolConfig = field(repr=False)
    share: float
    chain_id: int
    verify: Verify
    span: BlockRange
    size: int

    @property
    def parts(self) -> int:
        return -(-(self.span.end - self.span.start + 1) // self.size)

    def part(self, number: int) -> BlockRange:
        start = self.span.start + number * self.size
        return BlockRange(start, min(self.span.end, start + self.size - 1))


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """``parent`` is that of the first block; ``hashes`` are the blocks' own, ``endpoints`` who delivered them."""

    start: int
    parent: bytes = b""
    hashes: list[bytes] = []
    tables: dict[str, StagedTable] = {}
    endpoints: list[str] = []
    problem: CellProblem | None = None

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, text: str) -> PartReport:
        return msgspec.json.decode(text, type=cls)

    def links(self) -> Iterator[Link]:
        parent = self.parent
        for number, each in enumerate(self.hashes, self.start):
            yield Link(number, each, parent)
            parent = each


def stage_parts(work: StageWork, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """For ``mapInArrow`` on the numbers of parts, counted from 0."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            span = work.part(number)
            try:
                report = _stage(work, span)
            except Exception as error:
                report = PartReport(start=span.start, problem=CellProblem.of(error, span, "FollowFailed"))
            yield pa.RecordBatch.from_pydict({"report": [report.encode()]})


def _stage(work: StageWork, span: BlockRange) -> PartReport:
    links: list[Link] = []
    endpoints: set[str] = set()
    with ExitStack() as undo:
        parts: dict[Dataset, Part] = {}
        for raw in portions(_fetch(work, span)):
            links += map(link_of_block, raw)
            endpoints.update(each.endpoint for each in raw)
            for dataset, place in work.places.items():
                rows = hot_rows(TABLES[dataset], raw, work.chain_id)
                if rows.num_rows and dataset not in parts:
                    parts[dataset] = Part(place.dsn, place.like)
                    undo.callback(parts[dataset].discard)
                if rows.num_rows:
                    parts[dataset].load(rows)
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


def _fetch(work: StageWork, span: BlockRange) -> Iterator[RawBlock]:
    with kept_pool(work.pool, share=work.share) as pool:
        yield from fetch_blocks(
            pool,
            range(span.start, span.end + 1),
            receipts=need_receipts(work.places),
            traces=Dataset.TRACES in work.places,
            verify=work.verify,
        )
