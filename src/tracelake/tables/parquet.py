"""Parquet outputs: rows cut on a grid of blocks, one file per cell, laid out so that readers can skip.

Which rows share a file follows from the scope and the grid alone, never from the number of executors. Rows outside
the scope are refused. A file is written once, in sequence, and hashed on the way, below the attempt's staging
prefix. Every writer draws a new folder name, so a Spark task that runs twice, or a zombie, never meets a file that
was reported. An unfinished file is removed; a reported one is on the disk.

Rows are sorted, and every row group and page has its smallest and largest values: a range of blocks is found
without reading the others. Columns that are looked up by scattered values (an address, a hash) get a Bloom filter
per row group. Row groups are bounded in rows and in bytes, since a reader skips by row group and a writer holds
one in memory. They are cut on a grid of ``STEP`` rows by the size of the values, so the same rows make the same
groups whatever batches brought them, and nothing in a file depends on when, where or by whom it was written.
"""

from __future__ import annotations

import hashlib
import io
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tracelake.contracts.manifest import MAX_BOUND_CHARS, MAX_BOUNDS, ChainEdges, Manifest, ManifestFile
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.domain.where_bounds import ColumnBounds
from tracelake.durable_files import sync_folder
from tracelake.evm.digit_columns import DIGIT_PARTS, digit_column_names, with_digit_columns
from tracelake.objects.base import ObjectLocation, ObjectPrefix
from tracelake.tables.stored_types import as_table, in_stored_form, schema_hash
from tracelake.tables.wide_integers import integers_with_digits

BLOCKS_PER_FILE = 10_000
MAX_CELLS = 1000
CELL = "__tracelake_cell"
# Arrow adds columns of these names to every file that it reads, so one of a file's own couldn't be read.
_OF_ARROW = frozenset({"__filename", "__fragment_index", "__batch_index", "__last_in_fragment"})
_FALSE_HITS = 0.01
MAX_ROWS = 64 * 1024
MAX_WEIGHT = 64 * 1024 * 1024
STEP = 1024
_PLAIN_VALUE = 8


@dataclass(frozen=True, slots=True)
class ParquetLayout:
    """``lookups`` are columns that people look up by value; ``unique`` those whose values hardly ever repeat, for
    which a dictionary would be built in vain. ``facts`` are kept in the file's own metadata."""

    sort_by: tuple[str, ...] = ()
    lookups: tuple[str, ...] = ()
    unique: tuple[str, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)

    def writer_options(self, schema: pa.Schema, first: pa.Table) -> dict[str, Any]:
        """``first`` is the file's first row group: the filters are made for as many values as it has."""
        options: dict[str, Any] = {
            "compression": "zstd",
            "version": "2.6",
            # Spark doesn't read nanoseconds, and ignores Arrow's own schema.
            "coerce_timestamps": "us",
            "store_schema": False,
            "write_page_index": True,
        }
        order = [name for name in self.sort_by if name in schema.names]
        if order:
            columns = [(name, "ascending") for name in order]
            options["sorting_columns"] = pq.SortingColumn.from_ordering(schema, columns)
        digits = [name for name in digit_column_names(schema.names) if schema.field(name).type == pa.int64()]
        if self.unique or digits:
            without = {*self.unique, *digits}
            options["use_dictionary"] = [name for name in schema.names if name not in without]
        if digits:
            # Smaller and three times as fast to read as a dictionary, which sums are for.
            options["column_encoding"] = dict.fromkeys(digits, "BYTE_STREAM_SPLIT")
        if filters := {name: _filter(first.column(name)) for name in self.lookups if name in schema.names}:
            options["bloom_filter_options"] = filters
        return options


PLAIN = ParquetLayout()


def _filter(values: pa.ChunkedArray) -> dict[str, Any]:
    distinct = pc.count_distinct(values).as_py() if len(values) else 0
    return {"ndv": max(distinct, 1), "fpp": _FALSE_HITS}


@dataclass(frozen=True, slots=True)
class ParquetPlan:
    """Where files go and how they are cut; sent to executors by pickle."""

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
        """The numbers of its cells."""
        return range(self.first_cell, self.first_cell + self.cells)

    def span(self, cell: int) -> BlockRange:
        """The blocks of a cell."""
        start = max(self.start, cell * self.blocks_per_file)
        return BlockRange(start, min(self.end, (cell + 1) * self.blocks_per_file - 1))

    def place(self, cell: int | None) -> ObjectLocation:
        """A new file for a cell, or for the whole scope, in a folder of its own."""
        span = BlockRange(self.start, self.end) if cell is None else self.span(cell)
        folder = ObjectPrefix.parse(self.staging).child(f"w-{secrets.token_hex(8)}")
        return folder.location(f"{self.name}_{span.start}_{span.end}.parquet")


def write_table(data: Any, plan: ParquetPlan, *, sort_by: Sequence[str], verified: str | None) -> Manifest:
    table = as_table(data)
    files = list(write_cells(_in_cells(table, plan, sort_by).to_batches(), plan))
    return manifest_of(files, plan, table.schema, verified=verified)


def manifest_of(
    files: Sequence[ManifestFile],
    plan: ParquetPlan,
    schema: pa.Schema,
    *,
    verified: str | None,
    endpoints: tuple[str, ...] | None = None,
    edges: ChainEdges | None = None,
) -> Manifest:
    """The manifest of files that were written by ``plan``. Without rows it has one empty file, for the columns."""
    if not files:
        files = [ParquetFile(plan.place(None), schema, None, plan.layout).close()]
    # Executors report in any order; the manifest must be the same for each attempt.
    ordered = sorted(files, key=lambda file: (file.min_block is not None, file.min_block or 0))
    return Manifest(
        files=tuple(ordered),
        schema_hash=schema_hash(schema),
        verified=verified,
        endpoints=endpoints,
        edges=edges,
    )


def write_cells(batches: Iterable[pa.RecordBatch], plan: ParquetPlan) -> Iterator[ManifestFile]:
    """One file per run of equal ``CELL`` values. Both writers sort by it first, so a cell is one run."""
    file: ParquetFile | None = None
    current: int | None = None
    try:
        for batch in batches:
            table = pa.Table.from_batches([batch])
            rows = _with_digits(in_stored_form(table.drop_columns([CELL])))
            block_column = plan.block_column if plan.block_column in rows.column_names else None
            for cell, offset, length in _runs(table.column(CELL)):
                part = rows.slice(offset, length)
                if block_column is not None:
                    # Before a file is made: its name has the blocks of a cell that may be none of the plan's.
                    _check_blocks(part.column(block_column), plan)
                if file is None or cell != current:
                    if file is not None:
                        # Forgotten before it is reported: a reported file must not be discarded.
                        done, file = file.close(), None
                        yield done
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


def _with_digits(rows: pa.Table) -> pa.Table:
    """The rows with the digits of their wide integers made anew: sums of queries rely on them, and rows may come
    from files of an earlier version, which have none, or from SQL, which may put any beside a number."""
    for base in integers_with_digits(rows.schema):
        with suppress(pa.ArrowInvalid):  # a text that is no number, so that no query sums it either
            rows = with_digit_columns(rows, [base + part for part in DIGIT_PARTS])
    return rows


def check_columns(names: Sequence[str], sort_by: Sequence[str]) -> None:
    missing = [name for name in sort_by if name not in names]
    if missing:
        raise Invalid(
            "InvalidRows", f"can't sort by {', '.join(missing)}: the columns are {', '.join(names)}"
        )
    # Spark compares names without regard to case.
    if reserved := [name for name in names if name.lower() in (CELL, *_OF_ARROW)]:
        raise Invalid("InvalidRows", f"a column can't be called {reserved[0]}: rename it")


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


def column_bounds(schema: pa.Schema, footer: pq.FileMetaData) -> dict[str, ColumnBounds]:
    """The bounds of columns whose kinds every reader orders alike: whole numbers, booleans and short texts."""
    digits = set(digit_column_names(schema.names))
    bounds: dict[str, ColumnBounds] = {}
    for place, column in enumerate(schema):
        # Of nested columns the footer has several, so places no longer agree.
        if footer.num_columns != len(schema) or len(bounds) == MAX_BOUNDS:
            break
        kind = column.type
        if column.name in digits or not (
            pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_string(kind)
        ):
            continue
        if (known := _bounds_of(footer, place)) is not None:
            bounds[column.name] = known
    return bounds


def _bounds_of(footer: pq.FileMetaData, place: int) -> ColumnBounds | None:
    groups = [footer.row_group(group).column(place).statistics for group in range(footer.num_row_groups)]
    if any(group is None or not group.has_null_count for group in groups):
        return None
    nulls = any(group.null_count for group in groups)
    filled = [group for group in groups if group.num_values]
    if any(not group.has_min_max for group in filled):
        return None
    if not filled:
        return ColumnBounds(None, None, nulls)
    low, high = min(group.min for group in filled), max(group.max for group in filled)
    if isinstance(low, str) and max(len(low), len(high)) > MAX_BOUND_CHARS:
        return None
    return ColumnBounds(low, high, nulls)


class ParquetFile:
    def __init__(
        self,
        location: ObjectLocation,
        schema: pa.Schema,
        block_column: str | None,
        layout: ParquetLayout = PLAIN,
    ) -> None:
        self._location = location
        self._schema = schema
        self._layout = layout
        self._block_column = block_column
        self._groups = RowGroups(schema)
        self._rows = 0
        self._min: int | None = None
        self._max: int | None = None
        self._path = local_path(location)
        _make_folder(self._path.parent)
        self._file = _HashedFile(self._path)
        self._writer: pq.ParquetWriter | None = None
        self._footer: list[pq.FileMetaData] = []

    def add(self, rows: pa.Table) -> None:
        if rows.num_rows and self._block_column is not None:
            self._see_blocks(rows.column(self._block_column))
        self._rows += rows.num_rows
        for group in self._groups.add(rows):
            self._write(group)

    def close(self) -> ManifestFile:
        rest = self._groups.rest()
        # A file without rows still has its columns.
        if rest.num_rows or self._writer is None:
            self._write(rest)
        assert self._writer is not None
        if self._layout.facts:
            self._writer.add_key_value_metadata(dict(self._layout.facts))
        self._writer.close()
        size, digest = self._file.finish()
        # The file's name must survive a crash as well as its content.
        sync_folder(self._path.parent)
        return ManifestFile(
            location=self._location.uri,
            rows=self._rows,
            bytes=size,
            content_hash=digest,
            min_block=self._min,
            max_block=self._max,
            columns=column_bounds(self._schema, self._footer[0]),
        )

    def discard(self) -> None:
        """Remove the file. If that fails, the collection of unreferenced objects removes it later."""
        self._file.ignore_what_follows()
        with suppress(Exception):
            if self._writer is not None:
                self._writer.close()
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._path.parent.rmdir()

    def _write(self, group: pa.Table) -> None:
        """Write one row group; none for a table without rows."""
        if self._writer is None:
            options = self._layout.writer_options(self._schema, group)
            self._writer = pq.ParquetWriter(
                self._file, self._schema, metadata_collector=self._footer, **options
            )
        if group.num_rows:
            self._writer.write_table(group, row_group_size=group.num_rows)

    def _see_blocks(self, blocks: pa.ChunkedArray) -> None:
        bounds = pc.min_max(blocks).as_py()
        if bounds["min"] is not None:
            self._min = bounds["min"] if self._min is None else min(self._min, bounds["min"])
            self._max = bounds["max"] if self._max is None else max(self._max, bounds["max"])


def local_path(location: ObjectLocation) -> Path:
    """Where an object lies on a mounted store."""
    if location.scheme != "file":
        raise Invalid("StoreUnsupported", f"this worker can't reach objects at {location.scheme}://")
    return Path("/" + location.path)


class _HashedFile(io.RawIOBase):
    def __init__(self, path: Path) -> None:
        self._digest = hashlib.sha256()
        self._size = 0
        self._ignoring = False
        # "x": a file that exists was made by another writer, and must not be touched.
        self._raw = io.BufferedWriter(io.FileIO(path, "xb"))

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if not self._ignoring:
            self._digest.update(data)
            self._size += size
            self._raw.write(data)
        return size

    def ignore_what_follows(self) -> None:
        """A writer that is closed after a failure writes its footer, which may fail for the same reason."""
        self._ignoring = True

    def flush(self) -> None:
        if not self._raw.closed:
            self._raw.flush()

    def finish(self) -> tuple[int, str]:
        self._raw.flush()
        os.fsync(self._raw.fileno())
        self.close()
        return self._size, "sha256:" + self._digest.hexdigest()

    def close(self) -> None:
        self._raw.close()
        super().close()


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, each synced to the disk before a file in it can be reported."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        # Another task may make it in the same moment.
        new.mkdir(exist_ok=True)
        sync_folder(new.parent)


class RowGroups:
    def __init__(self, schema: pa.Schema, *, max_rows: int = MAX_ROWS, max_weight: int = MAX_WEIGHT) -> None:
        self._max_rows = max_rows
        self._max_weight = max_weight
        self._texts = [field.name for field in schema if _is_text(field.type)]
        self._plain = _PLAIN_VALUE * (len(schema) - len(self._texts))
        self._rows = schema.empty_table()
        self._weighed = 0
        self._weight = 0

    def add(self, rows: pa.Table) -> Iterator[pa.Table]:
        """The groups that are full now."""
        self._rows = pa.concat_tables([self._rows, rows]) if self._rows.num_rows else rows
        while self._weighed + STEP <= self._rows.num_rows:
            self._weight += self._weigh(self._rows.slice(self._weighed, STEP))
            self._weighed += STEP
            if self._weighed >= self._max_rows or self._weight >= self._max_weight:
                yield self._rows.slice(0, self._weighed)
                self._rows = self._rows.slice(self._weighed)
                self._weighed = self._weight = 0

    def rest(self) -> pa.Table:
        """The rows of the last group, after the last ``add``."""
        return self._rows

    def _weigh(self, step: pa.Table) -> int:
        weight: int = self._plain * step.num_rows
        for name in self._texts:
            weight += pc.sum(pc.binary_length(step.column(name))).as_py() or 0
        return weight


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_string(kind))
