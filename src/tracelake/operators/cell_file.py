"""The file of one cell of one chain table: there once it has rows, and gone if the cell comes to nothing."""

from __future__ import annotations

import pyarrow as pa

from tracelake.contracts.manifest import ManifestFile
from tracelake.evm.raw_block import Dataset
from tracelake.evm.schemas import TABLES
from tracelake.operators.parquet_file import ParquetFile
from tracelake.operators.parquet_output import ParquetPlan


class CellFile:
    def __init__(self, dataset: Dataset, plan: ParquetPlan, cell: int) -> None:
        self.dataset = dataset
        self._plan = plan
        self._cell = cell
        self._file: ParquetFile | None = None

    def add(self, rows: pa.Table) -> None:
        if not rows.num_rows:
            return
        if self._file is None:
            place = self._plan.place(self._cell)
            schema = TABLES[self.dataset].arrow
            self._file = ParquetFile(place, schema, self._plan.block_column, self._plan.layout)
        self._file.add(rows)

    def close(self) -> ManifestFile | None:
        return self._file.close() if self._file is not None else None

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()
