"""Parquet outputs, by Arrow and by Spark's executors: exact files, cut on the grid, that the Dispatcher accepts."""

import hashlib
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from tests.support.operator_process import (
    EXTREME_PREDICATES,
    QUOTED_PREDICATES,
    a_task,
    an_output,
    operator_process,
)
from tests.support.wide_integers import stored_integer
from tracelake.contracts.dispatcher_api import InputFile, PayloadInput
from tracelake.contracts.manifest import Manifest
from tracelake.contracts.operator_protocol import Action, ListFiles, SparkTarget
from tracelake.domain.errors import Invalid
from tracelake.domain.where import Where
from tracelake.domain.where_parse import parse_where
from tracelake.evm.columns import UINT256_ARROW, UINT256_PARTS
from tracelake.objects.base import ObjectLocation
from tracelake.objects.directory import DirectoryStore
from tracelake.objects.verify import verify_output
from tracelake.operators import Context
from tracelake.tables.spark_input import where_column
from tracelake.tables.stored_types import schema_hash, stored_schema
from tracelake.worker.spark import session as spark_session

EXAMPLE = Path(__file__).parents[3] / "examples/operators/block_squares.py"


class Files:
    """A link to nobody but a list of committed files."""

    canceled = paused = False

    def __init__(self, spark: SparkSession | None = None) -> None:
        self.files: list[InputFile] = []
        self._spark = spark

    def call(self, action: Action) -> Any:
        assert action == ListFiles(0)
        return msgspec.to_builtins(self.files)

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> Any:
        assert self._spark is not None
        return self._spark

    def commit(self, manifest: Manifest, start: int, end: int) -> None:
        self.files += [
            InputFile(file.location, file.rows, file.bytes, start, end, file.min_block, file.max_block)
            for file in manifest.files
        ]


class Site:
    def __init__(self, folder: Path, link: Files, start: int, end: int, where: Where | None = None) -> None:
        self.store = DirectoryStore(folder / "objects")
        self.staging = self.store.staging_prefix(uuid4(), uuid4(), uuid4(), 1, 1)
        tree = msgspec.to_builtins(where.tree) if where else None
        source = PayloadInput(
            0, uuid4(), uuid4(), 0, "source", "parquet", start=start, end=end, where_tree=tree
        )
        output = an_output(storage="parquet", staging=self.staging.uri)
        self.ctx = Context(a_task("mine", inputs=[source], outputs=[output]), link)

    async def verified(self) -> list[str]:
        """The names of the files, once the Dispatcher would have taken them."""
        [reported], _ = self.ctx.finish()
        found = await verify_output(
            self.store,
            self.staging,
            reported.location or "",
            reported.manifest,
            reported.row_count,
            reported.start,
            reported.end,
            name="result",
        )
        assert reported.manifest is not None
        for file in reported.manifest.files:
            content = path_of(file.location).read_bytes()
            assert file.content_hash == "sha256:" + hashlib.sha256(content).hexdigest()
        return sorted(file.location.name for file in found)


def path_of(location: str) -> Path:
    return Path("/" + ObjectLocation.parse(location).path)


def rows_of(manifest: Manifest) -> list[dict[str, Any]]:
    return [row for file in manifest.files for row in pq.read_table(path_of(file.location)).to_pylist()]


@pytest.fixture(scope="module")
def spark(spark_target: SparkTarget) -> Iterator[SparkSession]:
    work = spark_session.begin(spark_session.open_session(spark_target), str(uuid4()), 1, 1)
    yield work.session
    work.end()


BLOCKS = pa.table({"block_number": [7, 25, 3, 12, 19], "value": ["d", "e", "a", "b", "c"]})


async def test_rows_are_cut_on_the_grid_and_sorted_by_block(tmp_path: Path) -> None:
    site = Site(tmp_path, Files(), 2, 27)
    manifest = site.ctx.outputs[0].write(BLOCKS, blocks_per_file=10)
    assert await site.verified() == [
        "result_10_19.parquet",
        "result_20_27.parquet",
        "result_2_9.parquet",
    ]
    assert [row["block_number"] for row in rows_of(manifest)] == [3, 7, 12, 19, 25]
    assert [(file.rows, file.min_block, file.max_block) for file in manifest.files] == [
        (2, 3, 7),
        (2, 12, 19),
        (1, 25, 25),
    ]


async def test_every_write_has_a_folder_of_its_own(tmp_path: Path) -> None:
    site = Site(tmp_path, Files(), 0, 99)
    one = site.ctx.outputs[0].write(BLOCKS)
    again = Site(tmp_path, Files(), 0, 99)
    again.staging = site.staging
    other = again.ctx.outputs[0].write(BLOCKS)
    assert one.files[0].location != other.files[0].location
    assert one.files[0].content_hash == other.files[0].content_hash


async def test_no_rows_are_an_empty_file_that_says_what_the_columns_are(tmp_path: Path) -> None:
    link = Files()
    site = Site(tmp_path, link, 0, 99)
    manifest = site.ctx.outputs[0].write(BLOCKS.slice(0, 0))
    assert await site.verified() == ["result_0_99.parquet"]
    link.commit(manifest, 0, 99)
    read = site.ctx.inputs[0].arrow()
    assert (read.num_rows, read.column_names) == (0, ["block_number", "value"])


async def test_rows_without_a_block_number_share_one_file(tmp_path: Path) -> None:
    site = Site(tmp_path, Files(), 0, 99_999)
    site.ctx.outputs[0].write(pa.table({"name": ["b", "a"]}), sort_by=["name"])
    assert await site.verified() == ["result_0_99999.parquet"]


def test_what_is_stored_has_one_form_whoever_made_it(tmp_path: Path) -> None:
    table = pa.table(
        {
            "at": pa.array([0], pa.timestamp("ns", "Europe/Berlin")),
            "small": pa.array([1], pa.uint32()),
            "word": pa.array(["x"]).dictionary_encode(),
            "long": pa.array(["x"], pa.large_string()),
            "list": pa.array([[1]], pa.large_list(pa.uint8())),
        }
    )
    manifest = Site(tmp_path, Files(), 0, 9).ctx.outputs[0].write(table)
    file = pq.ParquetFile(path_of(manifest.files[0].location))
    assert {field.name: str(field.type) for field in file.schema_arrow} == {
        "at": "timestamp[us, tz=UTC]",
        "small": "int64",
        "word": "string",
        "long": "string",
        "list": "list<element: int16>",
    }
    assert manifest.schema_hash == schema_hash(file.schema_arrow)
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert "INT96" not in str(file.schema)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        (
            pa.table({"block_number": [5, 11]}),
            "rows of blocks 5 to 11 in output 'result', which is to hold 0 to 9",
        ),
        (pa.table({"block_number": [5, None]}), "1 rows have no block_number"),
        (pa.table({"block_number": ["5"]}), "block_number must be an integer, not string"),
        (pa.table({}), "there are no columns"),
        (pa.table({"nothing": pa.nulls(1)}), "column 'nothing' has no type"),
        (pa.table([[1], [2]], names=["a", "a"]), "two columns of one name: a"),
        (pa.table({"big": pa.array([2**64 - 1], pa.uint64())}), "can't be stored"),
        ([{"a": 1}], "not as list"),
    ],
)
def test_rows_that_do_not_belong_there_are_refused_and_leave_no_file(
    tmp_path: Path, table: Any, why: str
) -> None:
    with pytest.raises(Invalid, match=why):
        Site(tmp_path, Files(), 0, 9).ctx.outputs[0].write(table)
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_disk_that_is_full_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    site = Site(tmp_path, Files(), 0, 9)
    with pytest.raises(OSError, match="No space left"):
        site.ctx.outputs[0].write(pa.table({"block_number": [1]}))
    assert list(tmp_path.rglob("*.parquet")) == []


def test_a_very_long_scope_has_a_coarser_grid_and_one_that_was_asked_for_is_bounded(tmp_path: Path) -> None:
    site = Site(tmp_path, Files(), 0, 10**9)
    [file] = site.ctx.outputs[0].write(BLOCKS).files
    assert file.location.endswith("/result_0_9999999.parquet")
    with pytest.raises(Invalid, match="raise blocks_per_file"):
        Site(tmp_path, Files(), 0, 10**9).ctx.outputs[0].write(BLOCKS, blocks_per_file=1)


TYPED = pa.table(
    {
        "block_number": pa.array([1, 2, 3, 4, None], pa.int64()),
        "n": pa.array([1, 2, None, -(2**63), 2**63 - 1], pa.int64()),
        "f": [1.5, float("nan"), None, -0.0, 2.0],
        "d": pa.array(
            [Decimal("1.50"), None, Decimal("-3"), Decimal("0"), Decimal("2")], pa.decimal128(20, 2)
        ),
        "s": ["a", "b", None, "é", ""],
        "b": [True, False, None, True, False],
        "x": [b"\x01", b"\xff", None, b"", b"\x01\x02"],
        "at": pa.array(
            [datetime(2024, 1, day, tzinfo=UTC) for day in (1, 2, 3, 4)] + [None], pa.timestamp("us", "UTC")
        ),
        "day": [date(2024, 1, 1), None, date(2024, 1, 2), date(2024, 1, 3), date(2024, 1, 4)],
        "m": pa.array([1, 2, 3, 4, 5], pa.int32()),
    }
)
PREDICATES = [
    "n = 1",
    "n <> 1",
    "n < 1.5",
    "n >= 1.5",
    "n = 1.5",
    "n <> 1.5",
    "n < 100000000000000000000000000",
    "n > 100000000000000000000000000",
    "n not in (1, 2)",
    "n in (1, 9223372036854775807)",
    "n is null",
    "n is not null",
    "n = m",
    "n > m",
    "n = 'one'",
    "f > 1",
    "f = 1.5",
    "f <> 2",
    "f < 2",
    "d = 1.5",
    "d >= 0",
    "d < 100000000000000000000000000000000000000000",
    "s = 'a'",
    "s > 'b'",
    "s = 1",
    "s in ('a', '')",
    "b = true",
    "b <> true",
    "b = 1",
    "x = '\\x01'",
    "x > '\\x01'",
    "x = 'nothex'",
    "at >= '2024-01-02'",
    "at < '2024-01-02T00:00:00+00:00'",
    "at = 'yesterday'",
    "day > '2024-01-01'",
    *EXTREME_PREDICATES,
    *QUOTED_PREDICATES,
    "gone = 1",
    "gone is null",
    "not (n = 1 or s = 'b')",
    "(n = 1 and f > 1) or day = '2024-01-03'",
]


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("typed") / "typed.parquet"
    pq.write_table(TYPED, path)
    return f"file://{path}"


def expected(where: Where) -> list[int]:
    return [row["m"] for row in TYPED.to_pylist() if where.matches(row)]


def reading(location: str, where: Where) -> Context:
    link = Files()
    link.files = [InputFile(location, 5, 0, 0, 99)]
    tree = msgspec.to_builtins(where.tree)
    source = PayloadInput(0, uuid4(), uuid4(), 0, "source", "parquet", where_tree=tree)
    return Context(a_task("mine", inputs=[source]), link)


@pytest.mark.parametrize("predicate", PREDICATES)
def test_where_means_in_arrow_what_it_means_row_by_row(typed: str, predicate: str) -> None:
    where = parse_where(predicate)
    read = reading(typed, where).inputs[0].arrow()
    assert read.column("m").to_pylist() == expected(where)


def test_where_means_in_spark_what_it_means_row_by_row(typed: str, spark: SparkSession) -> None:
    frame = spark.read.parquet(typed)
    trees = [parse_where(predicate) for predicate in PREDICATES]
    verdicts = [where_column(where.tree, frame.schema).alias(where.text) for where in trees]
    rows = frame.select("m", *verdicts).collect()
    found = {where.text: sorted(row["m"] for row in rows if row[where.text]) for where in trees}
    assert found == {where.text: expected(where) for where in trees}


def test_an_input_is_cut_to_the_scope_and_read_from_the_listed_files_alone(
    tmp_path: Path, spark: SparkSession
) -> None:
    link = Files(spark)
    manifest = Site(tmp_path, link, 0, 99).ctx.outputs[0].write(BLOCKS, blocks_per_file=10)
    listed = Manifest(files=manifest.files[:2], schema_hash=manifest.schema_hash)
    link.commit(listed, 0, 99)
    ctx = Site(tmp_path, link, 5, 15, parse_where("value <> 'b'")).ctx
    assert ctx.inputs["source"].arrow().column("value").to_pylist() == ["d"]
    assert [row["value"] for row in ctx.inputs[0].dataframe().collect()] == ["d"]


def test_spark_reads_and_sums_the_digits_of_a_wide_integer(tmp_path: Path, spark: SparkSession) -> None:
    link = Files(spark)
    amounts = [0, 5, 10**18 + 7, 2**256 - 1, -(10**20), -(2**255), None]
    rows = [{"block_number": place, **stored_integer("value", each)} for place, each in enumerate(amounts)]
    kinds = {f"value{part}": kind for part, kind in zip(UINT256_PARTS, UINT256_ARROW, strict=True)}
    written = pa.Table.from_pylist(rows, pa.schema({"block_number": pa.int64(), **kinds}))
    link.commit(Site(tmp_path, link, 0, 99).ctx.outputs[0].write(written), 0, 99)
    frame = Site(tmp_path, link, 0, 99).ctx.inputs[0].dataframe()
    found = sorted(frame.collect(), key=lambda row: row["block_number"])
    assert [row.asDict() for row in found] == rows
    [summed] = frame.selectExpr(
        "sum(value_e0) AS e0", "sum(CAST(value_e18 AS DECIMAL(38,0))) AS e18"
    ).collect()
    known = [row for row in rows if row["value_string"] is not None]
    assert summed["e0"] == sum(row["value_e0"] for row in known)
    assert summed["e18"] == sum(row["value_e18"] for row in known)


def test_rows_without_a_block_number_are_only_read_where_nothing_has_to_be_cut(tmp_path: Path) -> None:
    link = Files()
    manifest = Site(tmp_path, link, 0, 99).ctx.outputs[0].write(pa.table({"name": ["a"]}))
    link.commit(manifest, 0, 99)
    assert Site(tmp_path, link, 0, 99).ctx.inputs[0].arrow().num_rows == 1
    with pytest.raises(Invalid, match="a partition 0-99 that reaches beyond 0-50"):
        Site(tmp_path, link, 0, 50).ctx.inputs[0].arrow()


async def test_executors_write_the_files_that_arrow_would_whatever_the_parallelism(
    tmp_path: Path, spark: SparkSession
) -> None:
    by_arrow = Site(tmp_path, Files(), 5, 2999)
    numbers = list(range(5, 3000))
    table = pa.table({"block_number": numbers, "square": [n * n for n in numbers]})
    first = by_arrow.ctx.outputs[0].write(table, blocks_per_file=1000)
    names = await by_arrow.verified()
    for parallelism in (1, 7):
        by_spark = Site(tmp_path, Files(), 5, 2999)
        frame = spark.range(5, 3000, 1, parallelism).selectExpr("id as block_number", "id * id as square")
        manifest = by_spark.ctx.outputs[0].write(
            frame.orderBy("square", ascending=False), blocks_per_file=1000
        )
        assert await by_spark.verified() == names
        assert rows_of(manifest) == table.to_pylist()
        assert manifest.schema_hash == first.schema_hash
        assert [file.content_hash for file in manifest.files] == [file.content_hash for file in first.files]


async def test_spark_rows_of_every_kind_are_stored_as_they_are(tmp_path: Path, spark: SparkSession) -> None:
    site = Site(tmp_path, Files(), 0, 9)
    frame = spark.sql(
        """select 1 as block_number, timestamp'2024-01-01 00:00:00Z' as at, x'ff' as raw,
           array(1, 2) as list, named_struct('a', 1, 'b', 'x') as pair, map('k', 1) as pairs,
           cast(1.5 as decimal(38, 2)) as amount, cast(null as string) as nothing"""
    )
    manifest = site.ctx.outputs[0].write(frame)
    assert await site.verified() == ["result_0_9.parquet"]
    [row] = rows_of(manifest)
    assert row["at"] == datetime(2024, 1, 1, tzinfo=UTC)
    assert (row["raw"], row["list"], row["pair"]) == (b"\xff", [1, 2], {"a": 1, "b": "x"})
    assert (row["amount"], row["nothing"], row["pairs"]) == (Decimal("1.50"), None, [("k", 1)])
    stored = pq.ParquetFile(path_of(manifest.files[0].location)).schema_arrow
    assert schema_hash(stored_schema(stored)) == manifest.schema_hash
    read = spark.read.parquet(manifest.files[0].location).collect()
    assert read[0]["pair"]["b"] == "x"


async def test_a_spark_result_without_rows_is_an_empty_file(tmp_path: Path, spark: SparkSession) -> None:
    site = Site(tmp_path, Files(), 0, 9)
    site.ctx.outputs[0].write(spark.sql("select 1 as block_number, 'x' as name where false"))
    assert await site.verified() == ["result_0_9.parquet"]


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("select id as block_number from range(5, 15)", "rows of blocks 5 to 14"),
        ("select cast(null as bigint) as block_number", "1 rows have no block_number"),
        ("select 'x' as block_number", "block_number must be an integer, not string"),
        ("select 1 as a, 2 as a", "two columns of one name"),
    ],
)
def test_what_is_wrong_with_rows_comes_back_from_the_executors_as_such(
    tmp_path: Path, spark: SparkSession, query: str, why: str
) -> None:
    with pytest.raises(Invalid, match=why):
        Site(tmp_path, Files(), 0, 9).ctx.outputs[0].write(spark.sql(query))


def test_the_example_operator_works_as_printed(tmp_path: Path) -> None:
    objects = tmp_path / "objects"
    source = PayloadInput(0, uuid4(), uuid4(), 0, None, "none", start=10, end=12)
    output = an_output(storage="parquet", staging=f"file://{objects}/")
    with operator_process(tmp_path, EXAMPLE) as process:
        assert "block_squares" in process.ready().operators
        process.run(a_task("block_squares", config={"offset": 1}, inputs=[source], outputs=[output]))
        finished, _ = process.until_finished()
        assert finished.status == "Completed", process.log()
        assert "squaring blocks=3" in process.log()
    [manifest] = [output.manifest for output in finished.outputs]
    assert manifest is not None
    assert [row["square"] for row in rows_of(manifest)] == [101, 122, 145]
    assert len([line for line in EXAMPLE.read_text().splitlines() if line.strip()]) <= 15
