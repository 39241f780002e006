"""How a table lies in a Parquet file, so that readers skip what they don't look for.

Rows are sorted, and every row group and page says its smallest and largest values: a range of blocks is found
without reading the others. What is looked up by a value that is spread all over the file (an address, a hash) has
a Bloom filter per row group. Nothing here depends on when, where or by whom the file is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

_FALSE_HITS = 0.01


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
            "coerce_timestamps": "us",
            "store_schema": False,
            "write_page_index": True,
        }
        order = [name for name in self.sort_by if name in schema.names]
        if order:
            columns = [(name, "ascending") for name in order]
            options["sorting_columns"] = pq.SortingColumn.from_ordering(schema, columns)
        if self.unique:
            options["use_dictionary"] = [name for name in schema.names if name not in self.unique]
        if filters := {name: _filter(first.column(name)) for name in self.lookups if name in schema.names}:
            options["bloom_filter_options"] = filters
        return options


PLAIN = ParquetLayout()


def _filter(values: pa.ChunkedArray) -> dict[str, Any]:
    distinct = pc.count_distinct(values).as_py() if len(values) else 0
    return {"ndv": max(distinct, 1), "fpp": _FALSE_HITS}
