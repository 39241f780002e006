"""A compacted dataset as one table: committed files, and the hot rows of the blocks that none of them holds.

Without doubles and without gaps, whatever the compaction is doing: the snapshot of the hot rows is taken first, the
list of committed files after it. A block that is in a listed file is read from there, and its hot rows are hidden;
any other was hot when the snapshot was taken, since rows are never removed before the files that hold them are
committed. What is taken back in between is refused by the list, or by the completion.
"""

from __future__ import annotations

from collections.abc import Iterable
from uuid import UUID

import pyarrow as pa

from tracelake.contracts.dispatcher_api import InputFile
from tracelake.domain.block_range import MAX_BLOCK, BlockRange
from tracelake.operators.arrow_input import read_files
from tracelake.operators.inputs import Input
from tracelake.operators.postgres_input import scan_of_input
from tracelake.operators.scope import Scope


def read_both_arrow(source: Input, hot: UUID) -> pa.Table:
    files = look(source)
    cold = read_files(source, files)
    spans = not_cold(source.scope, files)
    scan = scan_of_input(source, spans, version=hot) if spans else None
    if scan is None:
        return cold
    rows = pa.Table.from_batches(scan.batches(), scan.schema)
    return pa.concat_tables([cold.select(rows.column_names).cast(rows.schema), rows]) if files else rows


def look(source: Input) -> list[InputFile]:
    """The committed files, listed after the snapshot was taken. Files that hold the whole scope need no hot rows,
    and so no snapshot: then the data database isn't asked at all."""
    if source.scope is not None and not not_cold(source.scope, files := source.files()):
        return files
    source.data.snapshot()
    return source.files()


def not_cold(scope: Scope | None, cold: Iterable[InputFile | BlockRange]) -> list[BlockRange]:
    """The blocks of the scope that no committed file or range holds, as few ranges as possible."""
    start, end = (0, MAX_BLOCK) if scope is None else (scope.start, scope.end)
    left = []
    for held in sorted({(one.start, one.end) for one in cold}):
        if held[0] > start:
            left.append((start, min(held[0] - 1, end)))
        start = max(start, held[1] + 1)
    left.append((start, end))
    return [BlockRange(first, last) for first, last in left if first <= last]
