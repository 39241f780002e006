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

Options are checked before anything is planned. Every block is proven before its rows are returned (``verify``:
``full``, ``bloom``, ``off``; ``senders``: ``derive``, ``node``). The range is read in partitions of
``blocks_per_partition``; conditions on ``block_number`` narrow it before anything is fetched. ``columns``
(comma-separated names) selects columns. Planning makes no request, unless ``end`` is a tag. The endpoints' limits
are divided by ``tasks_at_once``, by default the number of cores of the driver's machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
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

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import Invalid, Unavailable
from tracelake.evm.columns import spark_fields
from tracelake.evm.decode import decode
from tracelake.evm.fetch import fetch_blocks
from tracelake.evm.profiles.registry import PROFILES
from tracelake.evm.raw_block import ChainTable, Senders, Verify, need_receipts, portions
from tracelake.evm.rpc.config import AddressProblem, load_pools, parse_address, pool_of
from tracelake.evm.rpc.pool import Pool, kept_pool
from tracelake.evm.schemas import TABLES

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"
BLOCK = ("block_number",)
T = TypeVar("T", ChainTable, Senders, Verify)
BLOCKS_PER_PARTITION = 1000
MAX_PARTITIONS = 10_000
TAGS = ("latest", "safe", "finalized")
_KNOWN = {
    *("dataset", "columns", "start", "end", "verify", "senders", "url", "pool", "pool_name", "chain_id"),
    *("chain", "blocks_per_partition", "tasks_at_once"),
}


def register(spark: SparkSession) -> None:
    """Register the format with a session, and have Spark push down conditions on blocks."""
    spark.dataSource.register(EvmDataSource)
    # Spark doesn't offer conditions to Python sources by default.
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
        """Apply bounds on the block number; return all other conditions to Spark."""
        for each in filters:
            if not self._bounds(each):
                yield each

    def partitions(self) -> list[InputPartition]:
        least, most = self._least, self._end()
        if self._most is not None:
            most = min(most, self._most)
        size = partition_size(max(0, most - least + 1), self._options.blocks_per_partition)
        cuts: list[InputPartition] = [
            # Cuts are at multiples of the size, so that overlapping reads have the same bounds.
            BlockPartition(range(start, min(start - start % size + size, most + 1)))
            for start in [least, *range(least - least % size + size, most + 1, size)]
            if start <= most
        ]
        # Every task has a pool of its own, in its own process, so each gets a part of the endpoints' limits.
        at_once = self._options.tasks_at_once or os.cpu_count() or 1
        self._share = 1 / max(1, min(at_once, len(cuts)))
        return cuts

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Rows of a partition. Spark plans an empty read as one partition of another type."""
        if not isinstance(partition, BlockPartition):
            return
        options = self._options
        with kept_pool(options.pool, share=self._share) as pool:
            chain_id = pool.chain_id(options.chain_id)
            blocks = fetch_blocks(
                pool,
                partition.value,
                receipts=need_receipts([options.dataset], options.verify),
                traces=options.dataset is ChainTable.TRACES,
                verify=options.verify,
                senders=options.senders,
            )
            for portion in portions(blocks):
                yield decode(portion, options.dataset, chain_id).select(list(options.columns))

    def _bounds(self, condition: Filter) -> bool:
        number: Any = getattr(condition, "value", None)
        # Conditions that aren't understood go back to Spark, which applies them to the rows.
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


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """``end`` is the last block, included, or a tag that is resolved when the read is planned."""

    dataset: ChainTable
    columns: tuple[str, ...]
    verify: Verify
    senders: Senders
    pool: PoolConfig
    start: int
    end: int | str
    chain_id: int | None
    blocks_per_partition: int | None
    tasks_at_once: int | None


def table_of(options: Mapping[str, str]) -> tuple[ChainTable, tuple[str, ...]]:
    """The table and its selected columns, which is all that the schema needs."""
    for name in options:
        if name.lower() not in _KNOWN:
            raise _wrong(name, f"unknown; it has {', '.join(sorted(_KNOWN))}")
    dataset = _one_of("dataset", options.get("dataset"), ChainTable)
    known = TABLES[dataset].arrow.names
    asked = [name.strip() for name in options.get("columns", "").split(",") if name.strip()]
    for name in asked:
        if name not in known:
            raise _wrong("columns", f"{dataset} has no column {name!r}; it has {', '.join(known)}")
        if asked.count(name) > 1:
            raise _wrong("columns", f"{name!r} is there twice")
    return dataset, tuple(asked or known)


def read_options(options: Mapping[str, str]) -> SourceOptions:
    dataset, columns = table_of(options)
    start = _whole("start", options.get("start"), 0)
    end = _end(options.get("end"))
    if isinstance(end, int) and end < start:
        raise _wrong("end", f"{end} is below start, which is {start}")
    return SourceOptions(
        dataset=dataset,
        columns=columns,
        verify=_one_of("verify", options.get("verify", Verify.FULL), Verify),
        senders=_one_of("senders", options.get("senders", Senders.DERIVE), Senders),
        pool=_pool(options),
        start=start,
        end=end,
        chain_id=_optional("chain_id", options),
        blocks_per_partition=_optional("blocks_per_partition", options),
        tasks_at_once=_optional("tasks_at_once", options),
    )


def partition_size(blocks: int, asked: int | None) -> int:
    """Blocks per partition. The number of partitions is bounded, so that planning stays cheap for any range."""
    size = asked or BLOCKS_PER_PARTITION
    if asked is None:
        while blocks > size * MAX_PARTITIONS:
            size *= 10
    elif blocks > size * MAX_PARTITIONS:
        count = -(-blocks // size)
        raise _wrong("blocks_per_partition", f"{count} partitions; at most {MAX_PARTITIONS}: raise it")
    return size


def _pool(options: Mapping[str, str]) -> PoolConfig:
    """The pool. Its errors never quote an option, since an address may hold a key."""
    urls, pool = options.get("url", "").replace(",", " ").split(), options.get("pool", "").strip()
    chain = options.get("chain")
    if chain is not None and chain not in PROFILES:
        raise _wrong("chain", f"no such chain profile; there are {', '.join(PROFILES)}")
    if bool(urls) == bool(pool):
        raise _wrong("url", "give url (addresses, with commas), or pool (JSON, or the path of an rpc.toml)")
    if urls:
        return pool_of(*urls, chain=chain)
    if chain is not None:
        raise _wrong("chain", "a pool names its own chain profile: chain goes with url")
    if not pool.startswith("{"):
        return _named(load_pools(pool), options.get("pool_name"))
    try:
        config = msgspec.json.decode(pool, type=PoolConfig)
        for endpoint in config.endpoints:
            parse_address(endpoint.url)
    except msgspec.DecodeError as error:
        raise _wrong("pool", f"not a pool: {error}") from None
    except AddressProblem as problem:
        raise _wrong("pool", str(problem)) from None
    if not config.endpoints:
        raise _wrong("pool", "it has no endpoints")
    return config


def _named(pools: Mapping[str, PoolConfig], name: str | None) -> PoolConfig:
    if name is None and len(pools) == 1:
        return next(iter(pools.values()))
    if name is None or name not in pools:
        raise _wrong("pool_name", f"which of its pools? It has {', '.join(sorted(pools)) or 'none'}")
    return pools[name]


def _end(text: str | None) -> int | str:
    if text is not None and text.lower() in TAGS:
        return text.lower()
    return _whole("end", text, 0, f", {', '.join(TAGS[:-1])} or {TAGS[-1]}")


def _optional(name: str, options: Mapping[str, str]) -> int | None:
    return _whole(name, options[name], 1) if name in options else None


def _whole(name: str, text: str | None, least: int, others: str = "") -> int:
    if text is None:
        raise _wrong(name, f"is missing: a block number{others}")
    # ``isdigit`` alone accepts digits of other scripts; the length is checked before anything is parsed.
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= MAX_BLOCK):
        raise _wrong(name, f"must be a whole number, {least} or more{others}, not {text[:40]!r}")
    return int(text)


def _one_of(name: str, text: str | None, kind: type[T]) -> T:
    try:
        return kind((text or "").lower())
    except ValueError:
        problem = "is missing" if text is None else f"{text[:40]!r} is none"
        raise _wrong(name, f"{problem}; it is one of {', '.join(kind)}") from None


def _wrong(option: str, what: str) -> Invalid:
    return Invalid("InvalidOption", f"evm source, option {option}: {what}")
