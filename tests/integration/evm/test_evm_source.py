"""The data source ``evm``: a chain's tables in any Spark session, without anything else of the platform."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from tests.support.faulty_rpc import Fault, FaultyRpc
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.server import RunningChain, running
from tracelake.evm.raw_block import ChainTable
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.evm.source import register
from tracelake.worker.spark import session as spark_session

BLOCKS = 60
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def spark(spark_target: SparkTarget) -> Iterator[SparkSession]:
    work = spark_session.begin(spark_session.open_session(spark_target), str(uuid4()), 1, 1)
    register(work.session)
    yield work.session
    work.end()


@pytest.fixture(scope="module")
def node() -> Iterator[RunningChain]:
    with running(DevChain(seed=5, blocks=BLOCKS)) as node:
        yield node


def read(spark: SparkSession, url: str | None, **options: Any) -> DataFrame:
    options = {"dataset": "logs", "start": 0, "end": BLOCKS, **options}
    reader = spark.read.format("evm").options(**{key: str(value) for key, value in options.items()})
    return (reader.option("url", url) if url else reader).load()


def what_the_node_says(url: str, dataset: ChainTable) -> pa.Table:
    with Pool(pool_of(url)) as pool:
        raw = pool.fetch(range(BLOCKS + 1), receipts=True, traces=True)
        return pa.Table.from_batches([decode(raw, dataset, pool.chain_id())])


@pytest.mark.parametrize("dataset", list(ChainTable))
def test_a_dataset_is_what_the_node_says(
    spark: SparkSession, node: RunningChain, dataset: ChainTable
) -> None:
    frame = read(spark, node.url, dataset=dataset, blocks_per_partition=25)
    table = frame.orderBy(*TABLES[dataset].sort_by).toArrow()
    assert table.cast(TABLES[dataset].arrow).equals(what_the_node_says(node.url, dataset))


def test_columns_are_those_that_were_asked_for(spark: SparkSession, node: RunningChain) -> None:
    frame = read(spark, node.url, columns="topic0, block_number", end=20)
    assert frame.columns == ["topic0", "block_number"]
    assert frame.where("topic0 is not null").count() > 0


def test_conditions_on_blocks_cut_what_is_fetched(spark: SparkSession, node: RunningChain) -> None:
    with FaultyRpc(node.url) as watched:
        frame = read(spark, watched.url, dataset="blocks", columns="block_number")
        found = frame.where("block_number between 10 and 12 and block_number <> 11").collect()
        asked = {call["params"][0] for call in watched.asked if call["method"] == "eth_getBlockByNumber"}
    assert sorted(row.block_number for row in found) == [10, 12]
    assert {number for number in asked if number.startswith("0x")} == {"0xa", "0xb", "0xc"}


def test_a_million_blocks_are_planned_without_asking_anybody(spark: SparkSession) -> None:
    frame = read(spark, NOBODY, end=999_999)
    assert "BatchScan" in frame._explain_string()
    assert frame.schema.fieldNames()[:2] == ["chain_id", "block_number"]


def test_a_pool_comes_from_a_file_and_the_end_from_the_chain(
    spark: SparkSession, node: RunningChain, tmp_path: Path
) -> None:
    file = tmp_path / "rpc.toml"
    file.write_text(
        f'[[pools.main.endpoints]]\nurl = "{node.url}"\n[[pools.b.endpoints]]\nurl = "{NOBODY}"\n'
    )
    frame = read(spark, None, pool=file, pool_name="main", dataset="blocks", end="latest", verify="off")
    assert frame.count() == BLOCKS + 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"columns": "topic9"}, "option columns: logs has no column 'topic9'; it has chain_id"),
        ({"chain_id": 5}, "is of chain .*, not 5"),
        ({"end": 1000}, "block \\d+ isn't there: the newest block is 60"),
    ],
)
def test_what_is_wrong_is_said(
    spark: SparkSession, node: RunningChain, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(PySparkException, match=why):
        read(spark, node.url, **options).count()


def test_a_node_that_lies_is_caught(spark: SparkSession, node: RunningChain) -> None:
    with FaultyRpc(node.url) as liar:
        liar.lie(Fault.WRONG_BLOOM, block=30)
        with pytest.raises(PySparkException, match=f"block 30 from {liar.name}"):
            read(spark, liar.url, dataset="logs").count()
