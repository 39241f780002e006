"""Files of cells: a file that was reported stays, whatever happens to its writer afterwards."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.objects.directory import DirectoryStore
from tracelake.tables.parquet import CELL, ParquetPlan, write_cells, write_table


def test_a_reported_file_stays_when_its_writer_is_ended_right_there(tmp_path: Path) -> None:
    staging = DirectoryStore(tmp_path / "objects").root.child("staging").uri
    plan = ParquetPlan.of(
        staging, "numbers", BlockRange(0, 19), blocks_per_file=10, block_column="block_number"
    )
    rows = pa.record_batch({"block_number": range(20), CELL: [number // 10 for number in range(20)]})
    for error in (GeneratorExit, KeyboardInterrupt):
        writing = write_cells([rows], plan)
        reported = next(writing)
        with pytest.raises(error):
            writing.throw(error)
        assert Path(reported.location.removeprefix("file://")).is_file()


@pytest.mark.parametrize("name", [CELL, CELL.upper(), "__filename", "__fragment_index", "__Batch_Index"])
def test_a_column_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    staging = DirectoryStore(tmp_path / "objects").root.child("staging").uri
    plan = ParquetPlan.of(
        staging, "numbers", BlockRange(0, 9), blocks_per_file=None, block_column="block_number"
    )
    with pytest.raises(Invalid, match=f"a column can't be called {name}: rename it"):
        write_table(pa.table({"block_number": [1], name: [2]}), plan, sort_by=(), verified=None)
