"""Blocks of a long range, fetched, proven and staged by Spark's executors: for a follower that is far behind.

Nothing but names, counts and hashes comes back; the follower checks that the parts are one chain, and commits
them at once. A range during which the chain changed is dropped whole.
"""

from __future__ import annotations

import sys
from functools import cached_property, partial

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Unavailable
from tracelake.evm.schemas import TABLES
from tracelake.operators.block_follower.config import FollowerConfig
from tracelake.operators.block_follower.decide import Link, linked
from tracelake.operators.block_follower.stage_part import REPORTS_DDL, PartReport, StageWork, stage_parts
from tracelake.operators.block_follower.tables import ChainTables, hot_layout
from tracelake.operators.context import Context
from tracelake.operators.spark_slots import spark_slots

_PARTS_PER_SLOT = 2
"""So that a slow part doesn't leave the others idle for long."""
_LEAST_BLOCKS = 10


class OnSpark:
    def __init__(self, ctx: Context, tables: ChainTables, config: FollowerConfig) -> None:
        self._ctx = ctx
        self._tables = tables
        self._config = config
        self.endpoints: set[str] = set()

    def load(self, first: int, last: int, parent: bytes | None) -> list[Link]:
        reports = self._run(self._work(BlockRange(first, last)))
        for dataset, output in self._tables.outputs.items():
            # Also when nothing comes of it: whoever drops what is staged knows all of it then.
            output.add_parts([report.tables[dataset] for report in reports if dataset in report.tables])
        for report in reports:
            if report.problem is not None:
                sys.stderr.write(report.problem.detail)
                raise report.problem.error()
        links = [link for report in reports for link in report.links()]
        good = linked(parent, links)
        if good == 0:
            return []
        self.endpoints.update(name for report in reports for name in report.endpoints)
        if good < last - first + 1:
            raise Unavailable(
                "ChainChanged", f"the chain changed at block {first + good} while {first} to {last} were read"
            )
        return links

    def _run(self, work: StageWork) -> list[PartReport]:
        """One Spark job; the reports in the order of blocks."""
        parts = self._ctx.spark.range(0, work.parts, 1, work.parts)
        staged = parts.mapInArrow(partial(stage_parts, work), REPORTS_DDL)
        reports = [PartReport.decode(row[0]) for row in staged.toLocalIterator()]
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
            share=1 / self._slots,
            chain_id=self._config.chain_id,
            verify=self._config.verify,
            span=span,
            size=size,
        )

    @cached_property
    def _slots(self) -> int:
        return spark_slots(self._ctx.spark)
