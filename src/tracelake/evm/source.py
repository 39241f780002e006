"""``spark.read.format("evm")``: a chain's tables as a DataFrame, on any Spark 4.1 or later.

    from tracelake.evm.source import register
    register(spark)
    logs = (
        spark.read.format("evm")
        .option("url", "https://…")             # or .option("pool", "rpc.toml").option("pool_name", "main")
        .option("dataset", "logs")
        .option("start", 20_000_000).option("end", 20_000_999)
        .load()
    )

Every block is proven before its rows are handed on (``verify``: ``full``, ``bloom``, ``off``). The range is read in
partitions of ``blocks_per_partition``; conditions on ``block_number`` cut it before anything is fetched.
``columns`` (names with commas) leaves out the others. Planning calls nobody, unless ``end`` is a tag.
``tasks_at_once`` is what the endpoints' limits are divided by, the cores of the driver's machine if not given.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)

from tracelake.domain.errors import Unavailable
from tracelake.evm.columns import spark_fields
from tracelake.evm.decode import decode
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.portions import need_receipts, portions
from tracelake.evm.raw_block import Dataset
from tracelake.evm.rpc.kept_pool import kept_pool
from tracelake.evm.rpc.pool import Pool
from tracelake.evm.schemas import TABLES
from tracelake.evm.source_options import SourceOptions, partition_size, read_options, table_of

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
BLOCK = ("block_number",)


def register(spark: SparkSession) -> None:
    """Make the format known to a session, and have Spark hand over conditions on blocks."""
    spark.dataSource.register(EvmDataSource)
    spark.conf.set(PUSHDOWN, "true")


class EvmDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "evm"

    def schema(self) -> str:
        dataset, columns = table_of(self.options)
        fields = [field for column in TABLES[dataset].columns for field in spark_fields(column)]
        by_name = {field.split(" ", 1)[0]: field for field in fields}
        return ", ".join(by_name[name] for name in columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        return EvmReader(read_options(self.options))


class BlockPartition(InputPartition):
    def __init__(self, blocks: range) -> None:
        super().__init__(blocks)


class EvmReader(DataSourceReader):
    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._least = options.start
        self._most: int | None = None
        self._share = 1.0

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Bounds on the block number are kept exactly; everything else is Spark's to check."""
        for each in filters:
            if not self._bounds(each):
                yield each

    def partitions(self) -> list[InputPartition]:
        least, most = self._least, self._end()
        if self._most is not None:
            most = min(most, self._most)
        size = partition_size(max(0, most - least + 1), self._options.blocks_per_partition)
        cuts: list[InputPartition] = [
            BlockPartition(range(start, min(start - start % size + size, most + 1)))
            for start in [least, *range(least - least % size + size, most + 1, size)]
            if start <= most
        ]
        at_once = self._options.tasks_at_once or os.cpu_count() or 1
        self._share = 1 / max(1, min(at_once, len(cuts)))
        return cuts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """A partition without blocks is Spark's way of reading nothing."""
        if not isinstance(partition, BlockPartition):
            return
        options = self._options
        with kept_pool(options.pool, share=self._share) as pool:
            chain_id = pool.chain_id(options.chain_id)
            blocks = fetch_blocks(
                pool,
                partition.value,
                receipts=need_receipts([options.dataset]),
                traces=options.dataset is Dataset.TRACES,
                verify=options.verify,
            )
            for portion in portions(blocks):
                yield decode(portion, options.dataset, chain_id).select(list(options.columns))

    def _bounds(self, condition: Filter) -> bool:
        number: Any = getattr(condition, "value", None)
        if getattr(condition, "attribute", None) != BLOCK or not isinstance(number, int):
            return False
        match condition:
            case EqualTo():
                self._cut(number, number)
            case GreaterThan():
                self._cut(number + 1, None)
            case GreaterThanOrEqual():
                self._cut(number, None)
            case LessThan():
                self._cut(None, number - 1)
            case LessThanOrEqual():
                self._cut(None, number)
            case _:
                return False
        return True

    def _cut(self, least: int | None, most: int | None) -> None:
        if least is not None:
            self._least = max(self._least, least)
        if most is not None:
            self._most = most if self._most is None else min(self._most, most)

    def _end(self) -> int:
        end = self._options.end
        if isinstance(end, int):
            return end
        with Pool(self._options.pool) as pool:
            pool.chain_id(self._options.chain_id)
            found = {"latest": lambda: pool.head().number, "safe": pool.safe, "finalized": pool.finalized}[
                end
            ]()
        if found is None:
            raise Unavailable("NoFinality", f"evm source: no endpoint knows a {end} block")
        return found
