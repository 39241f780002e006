"""Files of cells: a file that was reported stays, whatever happens to its writer afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.evm_blocks import CHAIN_ID, made_block
from tests.support.wide_integers import stored_integer
from tracelake.domain.block_range import BlockRange
from tracelake.domain.errors import Invalid
from tracelake.evm.columns import UINT256_ARROW, UINT256_PARTS
from tracelake.evm.decode import decode
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.schemas import TABLES
from tracelake.objects.directory import DirectoryStore
from tracelake.operators.stored_chain import StoredFile, StoredTable
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


def test_the_digits_of_a_file_are_those_of_its_text_whatever_the_rows_say(tmp_path: Path) -> None:
    staging = DirectoryStore(tmp_path / "objects").root.child("staging").uri
    plan = ParquetPlan.of(
        staging, "numbers", BlockRange(0, 9), blocks_per_file=None, block_column="block_number"
    )
    numbers = [5, 10**30, 2**256 - 1, -(10**40), None]
    rows = [{"block_number": place, **stored_integer("value", each)} for place, each in enumerate(numbers)]
    lies = [{**row, "value_e0": None, "value_e18": 77, "value_e36": "8"} for row in rows]
    kinds = {f"value{part}": kind for part, kind in zip(UINT256_PARTS, UINT256_ARROW, strict=True)}
    table = pa.Table.from_pylist(lies, pa.schema({"block_number": pa.int64(), **kinds}))
    [file] = write_table(table, plan, sort_by=(), verified=None).files
    path = file.location.removeprefix("file://")
    assert pq.read_table(path).to_pylist() == rows
    columns = [pq.read_metadata(path).row_group(0).column(place) for place in range(len(table.schema))]
    encodings = {column.path_in_schema: column.encodings for column in columns}
    assert "BYTE_STREAM_SPLIT" in encodings["value_e0"]
    no_numbers = table.set_column(2, "value_string", pa.array(["x", "+5", "1e3", "", None]))
    [file] = write_table(no_numbers, plan, sort_by=(), verified=None).files
    assert pq.read_table(file.location.removeprefix("file://")).equals(no_numbers)


def test_rows_of_files_from_before_are_read_with_their_digits(tmp_path: Path) -> None:
    raws = [made_block(random.Random(number), number, transactions=5) for number in range(4)]
    for dataset in (ChainTable.BLOCKS, ChainTable.TRANSACTIONS):
        whole = pa.Table.from_batches([decode(raws, dataset, CHAIN_ID)])
        before = whole.drop_columns(list(TABLES[dataset].digits))
        assert TABLES[dataset].has_columns(before.column_names)
        path = str(tmp_path / f"{dataset}.parquet")
        pq.write_table(before, path)
        assert StoredTable(dataset, files=(StoredFile(path, 0, 3),)).rows(0, 3).equals(whole)
