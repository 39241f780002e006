"""A compacted dataset reads as one table, without doubles or gaps, whatever the compaction is doing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from tests.support.hot_scene import HotChain, rows_of
from tests.support.operator_process import a_task
from tests.support.postgres import CloneDatabase
from tracelake.contracts.dispatcher_api import InputFile, PayloadHot, PayloadInput
from tracelake.contracts.operator_protocol import Action, ListFiles, SparkTarget
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import Conflict, Invalid
from tracelake.domain.where_parse import parse_where
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.raw_block import ChainTable
from tracelake.operators import Context
from tracelake.operators.inputs import Input
from tracelake.tables.data_database import DataDatabase
from tracelake.tables.hot_and_cold import blocks_without_files
from tracelake.tables.scope import ReadScope
from tracelake.worker.spark import session as spark_session

SIZE = 5
HEAD = 59


class Compaction:
    """A hot table that grows, and a catalog of committed files; what happens between two looks is the test's."""

    canceled = paused = False

    def __init__(
        self, folder: Path, dsn: str, dataset: ChainTable, spark: SparkSession | None = None
    ) -> None:
        self.folder = folder
        self.dataset = dataset
        self.chain = DevChain(seed=5, blocks=HEAD)
        self.hot = HotChain(dsn, [dataset])
        self.files: list[InputFile] = []
        self.before_listing: Callable[[], None] = lambda: None
        self.after_listing: Callable[[], None] = lambda: None
        self._spark = spark
        self._contexts: list[Context] = []

    def call(self, action: Action) -> Any:
        assert action == ListFiles(0)
        self.before_listing()
        listed = msgspec.to_builtins(self.files)
        self.after_listing()
        return listed

    def report(self, fields: dict[str, Any]) -> None: ...

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> Any:
        return self._spark

    def commit(self, start: int, end: int) -> None:
        """The files of a range become visible."""
        path = self.folder / f"{uuid4()}.parquet"
        rows = rows_of(self.chain, self.dataset, start, end)
        pq.write_table(rows, path)
        self.files.append(InputFile(f"file://{path}", rows.num_rows, path.stat().st_size, start, end))

    def reading(self, where: str | None = None, **scope: Any) -> Input:
        tree = msgspec.to_builtins(parse_where(where).tree) if where else None
        hot = PayloadHot(self.hot.versions[self.dataset], 0)
        source = PayloadInput(
            0, uuid4(), uuid4(), 0, None, "parquet", trigger=False, where_tree=tree, hot=hot, **scope
        )
        ctx = Context(a_task("mine", inputs=[source]), self, data_ticket_dsn=self.hot.dsn)
        self._contexts.append(ctx)
        return ctx.inputs[0]

    def close(self) -> None:
        for ctx in self._contexts:
            ctx.close()
        self.hot.close()


def table(rows: pa.Table) -> pa.Table:
    order = [name for name in ("block_number", "log_index") if name in rows.column_names]
    return rows.sort_by([(name, "ascending") for name in order]).combine_chunks()


def same(one: pa.Table, other: pa.Table) -> bool:
    return bool(table(one).equals(table(other)))


@pytest.fixture
def dsn(clone_database: CloneDatabase) -> str:
    return clone_database("empty", lambda dsn: None)


@pytest.fixture
def compaction(tmp_path: Path, dsn: str) -> Iterator[Compaction]:
    scene = Compaction(tmp_path, dsn, ChainTable.LOGS)
    yield scene
    scene.close()


def test_files_and_hot_rows_make_one_table(compaction: Compaction) -> None:
    compaction.hot.store(compaction.chain, 0, HEAD)
    whole = rows_of(compaction.chain, ChainTable.LOGS, 0, HEAD)
    assert same(compaction.reading().arrow(), whole), "hot alone"
    compaction.commit(10, 29)
    assert same(compaction.reading().arrow(), whole), "a hole in the middle is cold"
    compaction.commit(0, 9)
    compaction.hot.delete(0, 29)
    assert same(compaction.reading().arrow(), whole), "and needn't be hot any more"
    within = rows_of(compaction.chain, ChainTable.LOGS, 20, 35)
    assert same(compaction.reading(start=20, end=35).arrow(), within)
    compaction.hot.execute(ChainTable.LOGS, "DROP TABLE {}")
    assert same(compaction.reading().arrow(), rows_of(compaction.chain, ChainTable.LOGS, 0, 29)), "cold alone"


def test_where_holds_for_both_parts(compaction: Compaction) -> None:
    compaction.hot.store(compaction.chain, 0, HEAD)
    compaction.commit(0, 29)
    whole = rows_of(compaction.chain, ChainTable.LOGS, 0, HEAD)
    found = compaction.reading("log_index > 2 and block_number in (7, 8, 40, 41, 42)").arrow()
    expected = [
        row for row in whole.to_pylist() if row["log_index"] > 2 and row["block_number"] in (7, 8, 40, 41, 42)
    ]
    assert table(found).to_pylist() == expected
    assert expected


def test_a_compaction_that_commits_between_the_two_looks_doubles_nothing(compaction: Compaction) -> None:
    compaction.hot.store(compaction.chain, 0, HEAD)

    def commit_and_delete() -> None:
        compaction.commit(0, 29)
        compaction.hot.delete(0, 29)

    compaction.before_listing = commit_and_delete
    assert same(compaction.reading().arrow(), rows_of(compaction.chain, ChainTable.LOGS, 0, HEAD))


def test_a_scope_that_is_all_cold_needs_no_data_database(compaction: Compaction) -> None:
    compaction.commit(0, 29)
    source = compaction.reading(start=5, end=29)
    source.data = DataDatabase()
    assert same(source.arrow(), rows_of(compaction.chain, ChainTable.LOGS, 5, 29))
    beyond = compaction.reading(start=5, end=30)
    beyond.data = DataDatabase()
    with pytest.raises(Invalid) as refused:
        beyond.arrow()
    assert refused.value.reason == "NoDataDatabase"


EVENTS = st.lists(st.sampled_from(["grow", "reorg", "commit", "delete", "replace"]), max_size=6)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS, EVENTS, EVENTS)
@example([], [], ["commit", "commit", "delete"])
@example(["commit"], ["commit", "delete"], ["commit", "delete"])
def test_every_block_is_read_once_whatever_happens_between_the_looks(
    tmp_path: Path, dsn: str, before: list[str], between: list[str], after: list[str]
) -> None:
    scene = Compaction(tmp_path, dsn, ChainTable.BLOCKS)
    chain = scene.chain = DevChain(seed=11, blocks=24)
    scene.hot.store(chain, 0, 24)
    committed = listed = 0

    def happen(events: list[str]) -> None:
        nonlocal committed
        for event in events:
            match event:
                case "grow":
                    scene.hot.store(chain, chain.head + 1, chain.mine(SIZE))
                case "reorg":
                    chain.reorg(2)
                    scene.hot.store(chain, chain.head - 1, chain.head)
                case "commit" if committed + SIZE - 1 <= chain.head - 2:
                    scene.commit(committed, committed + SIZE - 1)
                    committed += SIZE
                case "delete" if committed:
                    scene.hot.delete(0, committed - 1)
                case "replace" if scene.files:
                    first = scene.files.pop(0)
                    scene.commit(first.start, first.end)

    def between_the_looks() -> None:
        nonlocal listed
        happen(between)
        listed = committed

    happen(before)
    head = chain.head
    at_snapshot = rows_of(chain, ChainTable.BLOCKS, 0, head)
    scene.before_listing = between_the_looks
    scene.after_listing = lambda: happen(after)
    rows = table(scene.reading().arrow())
    assert rows.column("block_number").to_pylist() == list(range(max(head + 1, listed)))
    assert rows.slice(0, listed).equals(
        rows_of(chain, ChainTable.BLOCKS, 0, max(listed, 1) - 1).slice(0, listed)
    )
    assert rows.slice(listed).equals(at_snapshot.slice(listed)), "what isn't cold is as the snapshot has it"
    scene.close()


def test_the_blocks_that_no_file_holds() -> None:
    def file(start: int, end: int) -> InputFile:
        return InputFile("file:///x", 0, 0, start, end)

    def left(scope: ReadScope | None, *files: InputFile) -> list[tuple[int, int]]:
        return [(span.start, span.end) for span in blocks_without_files(scope, files)]

    assert left(None) == [(0, MAX_BLOCK)]
    assert left(None, file(10, 19), file(0, 9)) == [(20, MAX_BLOCK)]
    assert left(ReadScope(5, 30), file(10, 19), file(10, 19), file(28, 99)) == [(5, 9), (20, 27)]
    assert left(ReadScope(5, 30), file(0, 99)) == []
    assert left(ReadScope(8, 7)) == []
    assert left(ReadScope(5, 30), file(40, 49)) == [(5, 30)]


@pytest.fixture(scope="module")
def spark(spark_target: SparkTarget) -> Iterator[Any]:
    work = spark_session.begin(spark_session.open_session(spark_target), str(uuid4()), 1, 1)
    yield work.session
    work.end()


def test_spark_sees_the_same_one_table(tmp_path: Path, dsn: str, spark: SparkSession) -> None:
    scene = Compaction(tmp_path, dsn, ChainTable.LOGS, spark)
    scene.hot.store(scene.chain, 0, HEAD)
    whole = rows_of(scene.chain, ChainTable.LOGS, 0, HEAD)
    assert table(scene.reading().dataframe().toArrow()).to_pylist() == whole.to_pylist(), "hot alone"
    scene.before_listing = lambda: scene.commit(len(scene.files) * 10, len(scene.files) * 10 + 9)
    assert table(scene.reading().dataframe().toArrow()).to_pylist() == whole.to_pylist()
    scene.hot.delete(0, 9)
    expected = [row for row in whole.to_pylist() if row["block_number"] in (3, 4, 30, 31)]
    both = scene.reading("block_number in (3, 4, 30, 31, 58)", start=1, end=50).dataframe()
    assert table(both.toArrow()).to_pylist() == expected
    scene.close()


def test_spark_waits_for_the_first_rows(tmp_path: Path, dsn: str, spark: SparkSession) -> None:
    scene = Compaction(tmp_path, dsn, ChainTable.LOGS, spark)
    scene.hot.execute(ChainTable.LOGS, "DROP TABLE {}")
    source = scene.reading()
    with pytest.raises(Conflict) as empty:
        source.dataframe()
    assert empty.value.reason == "InputEmpty"
    scene.close()
