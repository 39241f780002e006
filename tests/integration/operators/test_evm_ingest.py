"""``evm_ingest`` on a real Spark, from a dev chain to files: complete, proven, the same however they are made."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession, functions

from tests.support.dev_stack import descendants, eventually
from tests.support.faulty_rpc import Fault, FaultyRpc
from tests.support.operator_process import a_task, an_input, an_output
from tests.support.spark import SharedSpark
from tracelake.contracts.dispatcher_api import OutputIn
from tracelake.contracts.operator_protocol import SparkTarget
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.decode import decode
from tracelake.evm.devchain.chain import DevChain
from tracelake.evm.devchain.jsonrpc import RpcCaller
from tracelake.evm.devchain.methods import ChainMethods
from tracelake.evm.devchain.server import RunningChain, running, serving
from tracelake.evm.raw_block import PORTION_ITEMS, ChainTable
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.objects.base import ObjectLocation
from tracelake.objects.directory import DirectoryStore
from tracelake.objects.verify import verify_output
from tracelake.operators import Context
from tracelake.operators.evm_ingest import evm_ingest
from tracelake.tables.stored_types import schema_hash
from tracelake.worker.spark import session as spark_session

BLOCKS = 130
USUAL = ("blocks", "transactions", "logs")


class Link:
    """To nobody but Spark; keeps what is said about progress."""

    canceled = paused = False

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self.told: list[dict[str, Any]] = []

    def call(self, action: Any) -> Any:
        raise AssertionError(action)

    def report(self, fields: dict[str, Any]) -> None:
        self.told.append(fields)

    def wait(self, seconds: float) -> None: ...

    def spark(self) -> Any:
        return self._spark


class Site:
    def __init__(self, folder: Path, spark: SparkSession) -> None:
        self._folder = folder
        self.store = DirectoryStore(folder / "objects")
        self.link = Link(spark)

    def ingest(
        self,
        urls: str | Sequence[str],
        start: int,
        end: int,
        names: Sequence[str] = USUAL,
        pool: dict[str, Any] | None = None,
        **config: Any,
    ) -> dict[str, OutputIn]:
        self.staging = self.store.staging_prefix(uuid4(), uuid4(), uuid4(), 1, 1)
        outputs = [
            an_output(index, name=name, storage="parquet", staging=self.staging.child(name).uri)
            for index, name in enumerate(names)
        ]
        task = a_task(
            "evm_ingest",
            config={"rpc_pool": "main", **config},
            inputs=[an_input(start=start, end=end)],
            outputs=outputs,
        )
        urls = [urls] if isinstance(urls, str) else urls
        ctx = Context(task, self.link, rpc_pool=pool_of(*urls, **(pool or {})))
        evm_ingest(ctx)
        reported, events = ctx.finish()
        assert events == []
        return {names[output.output_index]: output for output in reported}

    def accepted(self, outputs: dict[str, OutputIn]) -> dict[str, list[str]]:
        """The names of the files, once the Dispatcher would have taken them."""
        return {name: asyncio.run(self._accepted(name, output)) for name, output in outputs.items()}

    async def _accepted(self, name: str, output: OutputIn) -> list[str]:
        files = await verify_output(
            self.store,
            self.staging.child(name),
            output.location or "",
            output.manifest,
            output.row_count,
            output.start,
            output.end,
            name=name,
        )
        return [file.location.name for file in files]

    @property
    def files(self) -> list[Path]:
        return list(self._folder.rglob("*.parquet"))


def paths(output: OutputIn) -> list[str]:
    assert output.manifest is not None
    return ["/" + ObjectLocation.parse(file.location).path for file in output.manifest.files]


def table_of(output: OutputIn) -> pa.Table:
    """Read file by file, as they are: nothing that a folder's name could add."""
    return pa.concat_tables([pq.ParquetFile(path).read() for path in paths(output)])


def hashes(outputs: dict[str, OutputIn]) -> dict[str, list[str]]:
    manifests = {name: output.manifest for name, output in outputs.items()}
    return {
        name: [file.content_hash for file in manifest.files]
        for name, manifest in manifests.items()
        if manifest
    }


def what_the_node_says(url: str, start: int, end: int, dataset: ChainTable) -> pa.Table:
    with Pool(pool_of(url)) as pool:
        raw = pool.fetch(range(start, end + 1), receipts=True, traces=True)
        return pa.Table.from_batches([decode(raw, dataset, pool.chain_id())])


@pytest.fixture(scope="module")
def spark(spark_target: SparkTarget) -> Iterator[SparkSession]:
    work = spark_session.begin(spark_session.open_session(spark_target), str(uuid4()), 1, 1)
    yield work.session
    work.end()


@pytest.fixture(scope="module")
def node() -> Iterator[RunningChain]:
    # A fork begins in the middle of a file.
    with running(DevChain(seed=11, blocks=BLOCKS, forks=("osaka", "amsterdam@60"))) as node:
        yield node


@pytest.fixture
def site(tmp_path: Path, spark: SparkSession) -> Site:
    return Site(tmp_path, spark)


def test_a_range_becomes_the_tables_that_the_node_has(site: Site, node: RunningChain) -> None:
    names = [str(dataset) for dataset in ChainTable]
    outputs = site.ingest(node.url, 0, BLOCKS, names, blocks_per_file=40)
    for name, files in site.accepted(outputs).items():
        grid = [(0, 39), (40, 79), (80, 119), (120, BLOCKS)]
        assert files == [f"{name}_{start}_{end}.parquet" for start, end in grid], name
    for dataset in ChainTable:
        output = outputs[dataset]
        assert (output.start, output.end) == (0, BLOCKS)
        assert output.manifest is not None
        assert output.manifest.schema_hash == schema_hash(TABLES[dataset].arrow)
        assert output.manifest.verified == ("bloom" if dataset is ChainTable.TRACES else "full")
        assert output.manifest.endpoints == (node.url.removeprefix("http://"),)
        assert table_of(output).equals(what_the_node_says(node.url, 0, BLOCKS, dataset)), dataset


def test_progress_counts_blocks(site: Site, node: RunningChain) -> None:
    site.ingest(node.url, 10, BLOCKS, blocks_per_file=50)
    assert (site.link.told[-1]["done"], site.link.told[-1]["total"]) == (BLOCKS - 9, BLOCKS - 9)


def test_what_comes_out_depends_on_neither_parallelism_nor_time(site: Site, node: RunningChain) -> None:
    first = site.ingest(node.url, 3, 99, blocks_per_file=20)
    again = site.ingest(node.url, 3, 99, blocks_per_file=20, pool={"max_batch": 1, "max_concurrency": 1})
    assert hashes(first) == hashes(again)
    assert set(paths(first["logs"])).isdisjoint(paths(again["logs"]))


@pytest.mark.parametrize("name", ["blocks", "transactions", "logs"])
def test_files_are_read_alike_by_spark_duckdb_pandas_and_polars(
    site: Site, node: RunningChain, spark: SparkSession, name: str
) -> None:
    output = site.ingest(node.url, 0, 60, [name], blocks_per_file=25)[name]
    table = table_of(output)
    files = paths(output)
    order = list(TABLES[ChainTable(name)].sort_by)
    by_spark = spark.read.parquet(*(f"file://{path}" for path in files)).orderBy(*order).toArrow()
    assert by_spark.cast(table.schema).equals(table)
    by_duckdb = duckdb.read_parquet(files).order(", ".join(order)).to_arrow_table()
    assert by_duckdb.cast(table.schema).equals(table)
    by_pandas = [
        pa.Table.from_pandas(pd.read_parquet(path), schema=table.schema, preserve_index=False)
        for path in files
    ]
    assert pa.concat_tables(by_pandas).equals(table)
    by_polars = pl.concat([pl.read_parquet(path) for path in files]).to_arrow()
    assert by_polars.cast(table.schema).equals(table)


def test_a_file_can_be_searched_without_reading_it(
    site: Site, node: RunningChain, spark: SparkSession
) -> None:
    [path] = paths(site.ingest(node.url, 0, 60, ["logs"], blocks_per_file=100)["logs"])
    metadata = pq.ParquetFile(path).metadata
    assert metadata.metadata == {
        b"tracelake.dataset": b"logs",
        b"tracelake.chain_id": str(node.chain.chain_id).encode(),
        b"tracelake.verified": b"full",
    }
    group = metadata.row_group(0)
    columns = {group.column(i).path_in_schema: group.column(i) for i in range(metadata.num_columns)}
    assert {group.column(each.column_index).path_in_schema for each in group.sorting_columns} == {
        "block_number",
        "log_index",
    }
    for looked_up in ("address", "topic0", "transaction_hash"):
        assert columns[looked_up].bloom_filter_offset is not None
        assert columns[looked_up].statistics.has_min_max
    assert columns["block_number"].statistics.max == 60
    assert columns["block_number"].has_column_index
    assert columns["timestamp"].physical_type == "INT64"
    assert {each.compression for each in columns.values()} == {"ZSTD"}
    some = pq.read_table(path).column("address")[0].as_py()
    probe = "select bloom_filter_excludes from parquet_bloom_probe(?, 'address', ?)"
    assert duckdb.execute(probe, [path, b"\x01" * 20]).fetchall() == [(True,)]
    assert duckdb.execute(probe, [path, some]).fetchall() == [(False,)]
    addresses = spark.read.parquet(f"file://{path}").select("address")
    assert addresses.where(addresses.address == functions.lit(b"\x01" * 20)).count() == 0
    found = addresses.where(addresses.address == functions.lit(some)).count()
    assert found == pc.sum(pc.equal(pq.read_table(path).column("address"), some)).as_py()


@pytest.mark.parametrize("verify", ["full", "bloom", "off"])
def test_a_single_block_and_block_0_are_ranges(site: Site, node: RunningChain, verify: str) -> None:
    for number in (0, 7):
        outputs = site.ingest(node.url, number, number, verify=verify)
        assert table_of(outputs["blocks"]).column("block_number").to_pylist() == [number]
        assert {each.manifest.verified for each in outputs.values() if each.manifest} == {verify}


def test_a_range_of_empty_blocks_has_files_without_rows(site: Site) -> None:
    chain = DevChain(seed=2, blocks=30, transactions_per_block=0, logs_per_transaction=0, steady=True)
    with running(chain) as node:
        outputs = site.ingest(node.url, 5, 30, blocks_per_file=10)
    assert site.accepted(outputs) == {
        "blocks": [
            "blocks_5_9.parquet",
            "blocks_10_19.parquet",
            "blocks_20_29.parquet",
            "blocks_30_30.parquet",
        ],
        "transactions": ["transactions_5_30.parquet"],
        "logs": ["logs_5_30.parquet"],
    }
    assert table_of(outputs["logs"]).schema.equals(TABLES[ChainTable.LOGS].arrow)
    assert outputs["logs"].row_count == 0


def test_one_huge_block_goes_through(site: Site) -> None:
    chain = DevChain(seed=3, blocks=1, transactions_per_block=450, logs_per_transaction=50, steady=True)
    with running(chain) as node:
        logs = site.ingest(node.url, 1, 1, ["logs"], verify="bloom")["logs"]
    assert logs.row_count == 22_500
    assert PORTION_ITEMS < 22_500, "more than is otherwise decoded at once"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({}, rf"block {BLOCKS + 1} isn't there yet: .* is at {BLOCKS}"),
        ({"finality": 20}, f"block {BLOCKS - 19} isn't there yet: .* less 20 for finality"),
        ({"finality": "finalized"}, f"block {BLOCKS - 63} isn't there yet: the chain's finalized block is"),
        ({"finality": "safe"}, f"block {BLOCKS - 31} isn't there yet: the chain's safe block is"),
    ],
)
def test_blocks_that_are_not_there_yet_may_be_tried_again(
    site: Site, node: RunningChain, config: dict[str, Any], why: str
) -> None:
    with pytest.raises(Unavailable, match=why) as refused:
        site.ingest(node.url, 0, BLOCKS + 5, **config)
    assert refused.value.reason == "BlockNotFound"


@pytest.mark.parametrize(
    ("names", "config", "why"),
    [
        (USUAL, {"verify": "much"}, "config: verify: must be one of full, bloom, off"),
        (USUAL, {"rpc_pool": 1}, "config: rpc_pool: must be the name of an RPC pool"),
        (USUAL, {"block_per_file": 1}, "config: block_per_file: evm_ingest has no such setting"),
        (USUAL, {"blocks_per_file": 0}, "config: blocks_per_file: must be a whole number from 1"),
        (
            USUAL,
            {"finality": "soon"},
            "config: finality: must be latest, safe, finalized or a number",
        ),
        (USUAL, {"chain_id": "1"}, "config: chain_id: must be a whole number"),
        (USUAL, {"chain_id": 5}, "pool 'pool' is of chain .*, not 5"),
        (
            ("blocks", "uncles"),
            {},
            "no output 'uncles'; it has blocks, transactions, logs, receipts, withdrawals",
        ),
    ],
)
def test_what_can_never_work_is_refused(
    site: Site, node: RunningChain, names: Sequence[str], config: dict[str, Any], why: str
) -> None:
    with pytest.raises(Invalid, match=why):
        site.ingest(node.url, 0, 9, names, **config)
    assert site.files == []


def test_a_node_that_lies_about_a_single_log_is_caught_and_nothing_is_kept(
    site: Site, node: RunningChain
) -> None:
    number = block_with_logs(node.chain, 30)
    with FaultyRpc(node.url) as liar:
        liar.lie(Fault.ALTERED_LOG, block=number)
        with pytest.raises(Unavailable, match=f"block {number} .*receipts") as caught:
            site.ingest(liar.url, 0, 80, blocks_per_file=50, pool={"deadline_seconds": 5})
        assert liar.name in caught.value.message
        assert "Traceback" not in caught.value.message
        told = site.ingest([liar.url, node.url], 0, 80, blocks_per_file=50)
    assert table_of(told["logs"]).equals(what_the_node_says(node.url, 0, 80, ChainTable.LOGS))


def block_with_logs(chain: DevChain, start: int) -> int:
    blocks = chain.blocks(start, chain.head)
    return next(block.number for block in blocks if b'"logIndex"' in block.all_receipts)


class TwoChains:
    """Another chain from one block on, as a reorganisation between two requests would show it."""

    def __init__(self, before: DevChain, after: DevChain, first: int) -> None:
        self._before, self._after, self._first = ChainMethods(before), ChainMethods(after), first

    def call(self, method: str, params: list[Any], caller: RpcCaller) -> bytes:
        changed = method in ("eth_getBlockByNumber", "eth_getBlockReceipts") and params[0].startswith("0x")
        if changed and int(params[0], 16) >= self._first:
            return self._after.call(method, params, caller)
        return self._before.call(method, params, caller)


def test_a_chain_that_changes_between_two_cells_is_noticed(site: Site) -> None:
    chains = DevChain(seed=1, blocks=60), DevChain(seed=2, blocks=60)
    with serving(TwoChains(*chains, 50)) as url, pytest.raises(Unavailable, match="block 50 follows on 0x"):
        site.ingest(url, 40, 60, blocks_per_file=10)


def test_an_executor_that_is_killed_fails_the_attempt_in_one_line(
    site: Site, node: RunningChain, shared_spark: SharedSpark
) -> None:
    def kill_python_workers() -> None:
        eventually("a cell is being fetched", lambda: hanging.calls("eth_getBlockReceipts"))
        for pid in descendants(shared_spark.pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"python_daemon" in command and descendants(pid) == []:
                os.kill(pid, signal.SIGKILL)

    with FaultyRpc(node.url) as hanging:
        hanging.lie(Fault.HANG, method="eth_getBlockReceipts")
        killer = threading.Thread(target=kill_python_workers)
        killer.start()
        with pytest.raises(Unavailable, match="Spark could not do it: ") as failed:
            site.ingest(hanging.url, 0, 9)
        killer.join()
    assert failed.value.reason == "SparkFailed"
    assert len(failed.value.message.splitlines()) == 1
