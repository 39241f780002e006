"""Parquet outputs: rows cut on a grid of blocks, one file per cell, by Arrow here or by Spark's executors there.

Which rows share a file follows from the scope and the grid alone, never from how many executors there were.
Executors write where they are and send back one small row per file; nothing is renamed, and no data passes
through the operator process. Rows that don't belong into the scope are a problem that is reported as such, in
place of files.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tracelake.contracts.manifest import Manifest, ManifestFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.objects.prefix import ObjectLocation, ObjectPrefix
from tracelake.operators.arrow_schema import as_table, in_stored_form, schema_hash
from tracelake.operators.parquet_file import ParquetFile
from tracelake.operators.parquet_layout import PLAIN, ParquetLayout

BLOCKS_PER_FILE = 10_000
MAX_CELLS = 1000
CELL = "__tracelake_cell"


@dataclass(frozen=True, slots=True)
class ParquetPlan:
    """What executors need to know; travels to them by pickle."""

    staging: str
    name: str
    start: int
    end: int
    blocks_per_file: int
    block_column: str
    layout: ParquetLayout = PLAIN

    @classmethod
    def of(
        cls,
        staging: str,
        name: str,
        span: BlockRange,
        *,
        blocks_per_file: int | None,
        block_column: str,
        layout: ParquetLayout = PLAIN,
    ) -> ParquetPlan:
        size = BLOCKS_PER_FILE if blocks_per_file is None else blocks_per_file
        if size < 1:
            raise Invalid("InvalidConfig", f"blocks_per_file must be 1 or more, not {size}")
        plan = cls(staging, name, span.start, span.end, size, block_column, layout)
        if blocks_per_file is None:
            # Coarser for a very long scope, by the scope alone, so that it is the same for every attempt.
            while plan.cells > MAX_CELLS:
                plan = replace(plan, blocks_per_file=plan.blocks_per_file * 10)
        elif plan.cells > MAX_CELLS:
            raise Invalid("InvalidConfig", f"{plan.cells} files; at most {MAX_CELLS}: raise blocks_per_file")
        return plan

    @property
    def first_cell(self) -> int:
        return self.start // self.blocks_per_file

    @property
    def cells(self) -> int:
        return self.end // self.blocks_per_file - self.first_cell + 1

    @property
    def numbers(self) -> range:
        """Of all its cells."""
        return range(self.first_cell, self.first_cell + self.cells)

    def span(self, cell: int) -> BlockRange:
        """The blocks of a cell."""
        start = max(self.start, cell * self.blocks_per_file)
        return BlockRange(start, min(self.end, (cell + 1) * self.blocks_per_file - 1))

    def place(self, cell: int | None) -> ObjectLocation:
        """A new file for a cell, or for the whole scope, in a folder that nobody else uses."""
        span = BlockRange(self.start, self.end) if cell is None else self.span(cell)
        folder = ObjectPrefix.parse(self.staging).child(f"w-{secrets.token_hex(8)}")
        return folder.location(f"{self.name}_{span.start}_{span.end}.parquet")


def write_parquet(data: Any, plan: ParquetPlan, *, sort_by: Sequence[str], verified: str | None) -> Manifest:
    if type(data).__module__.startswith("pyspark."):
        from tracelake.operators.spark_output import write_dataframe

        files, schema = write_dataframe(data, plan, sort_by)
    else:
        table = as_table(data)
        schema = table.schema
        files = list(write_cells(_in_cells(table, plan, sort_by).to_batches(), plan))
    return manifest_of(files, plan, schema, verified=verified)


def manifest_of(
    files: Sequence[ManifestFile],
    plan: ParquetPlan,
    schema: pa.Schema,
    *,
    verified: str | None,
    endpoints: tuple[str, ...] | None = None,
) -> Manifest:
    """Of files that were written by ``plan``. No rows at all are one empty file: it says what the columns are."""
    if not files:
        files = [ParquetFile(plan.place(None), schema, None, plan.layout).close()]
    ordered = sorted(files, key=lambda file: (file.min_block is not None, file.min_block or 0))
    return Manifest(
        files=tuple(ordered), schema_hash=schema_hash(schema), verified=verified, endpoints=endpoints
    )


def write_cells(batches: Iterable[pa.RecordBatch], plan: ParquetPlan) -> Iterator[ManifestFile]:
    """One file per run of equal ``CELL`` values. Both writers sort by it first, so a cell is one run."""
    file: ParquetFile | None = None
    current: int | None = None
    try:
        for batch in batches:
            table = pa.Table.from_batches([batch])
            rows = in_stored_form(table.drop_columns([CELL]))
            block_column = plan.block_column if plan.block_column in rows.column_names else None
            for cell, offset, length in _runs(table.column(CELL)):
                part = rows.slice(offset, length)
                if block_column is not None:
                    _check_blocks(part.column(block_column), plan)
                if file is None or cell != current:
                    if file is not None:
                        yield file.close()
                    file = None
                    place = plan.place(cell if block_column is not None else None)
                    file, current = ParquetFile(place, rows.schema, block_column, plan.layout), cell
                file.add(part)
        if file is not None:
            done, file = file.close(), None
            yield done
    except BaseException:
        if file is not None:
            file.discard()
        raise


def check_columns(names: Sequence[str], sort_by: Sequence[str]) -> None:
    missing = [name for name in sort_by if name not in names]
    if missing:
        raise Invalid(
            "InvalidRows", f"can't sort by {', '.join(missing)}: the columns are {', '.join(names)}"
        )


def _in_cells(table: pa.Table, plan: ParquetPlan, sort_by: Sequence[str]) -> pa.Table:
    check_columns(table.column_names, sort_by)
    if plan.block_column not in table.column_names:
        cells = pa.repeat(pa.scalar(0, pa.int64()), table.num_rows)
        order = list(sort_by)
    else:
        blocks = table.column(plan.block_column)
        if not pa.types.is_integer(blocks.type):
            raise Invalid("InvalidRows", f"{plan.block_column} must be an integer, not {blocks.type}")
        cells = pc.divide(blocks.cast(pa.int64()), plan.blocks_per_file)
        order = [CELL, *(sort_by or [plan.block_column])]
    with_cells = table.append_column(CELL, cells)
    return with_cells.sort_by([(name, "ascending") for name in order]) if order else with_cells


def _runs(cells: pa.ChunkedArray) -> Iterator[tuple[int, int, int]]:
    """Cell, offset and length of each run; a null cell is a row without a block, which is refused elsewhere."""
    offset = 0
    for chunk in cells.chunks:
        encoded = pc.run_end_encode(chunk)
        begin = 0
        for value, end in zip(encoded.values.to_pylist(), encoded.run_ends.to_pylist(), strict=True):
            yield value, offset + begin, end - begin
            begin = end
        offset += len(chunk)


def _check_blocks(blocks: pa.ChunkedArray, plan: ParquetPlan) -> None:
    if blocks.null_count:
        raise Invalid("InvalidRows", f"{blocks.null_count} rows have no {plan.block_column}")
    bounds = pc.min_max(blocks).as_py()
    if bounds["min"] < plan.start or bounds["max"] > plan.end:
        raise Invalid(
            "RowsOutsideScope",
            f"rows of blocks {bounds['min']} to {bounds['max']} in output {plan.name!r}, "
            f"which is to hold {plan.start} to {plan.end}",
        )
