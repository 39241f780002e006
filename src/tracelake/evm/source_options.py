"""The options of the ``evm`` data source, checked before anything is planned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tracelake.contracts.rpc_pool import PoolConfig
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.errors import Invalid
from tracelake.evm.raw_block import Dataset, Verify
from tracelake.evm.rpc.address import AddressProblem, parse_address
from tracelake.evm.rpc.config import load_pools, pool_of
from tracelake.evm.schemas import TABLES

T = TypeVar("T", Dataset, Verify)

BLOCKS_PER_PARTITION = 1000
MAX_PARTITIONS = 10_000
TAGS = ("latest", "safe", "finalized")

_KNOWN = {
    *("dataset", "columns", "start", "end", "verify", "url", "pool", "pool_name", "chain_id"),
    *("blocks_per_partition", "tasks_at_once"),
}


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """``end`` is a block, included, or a tag that is looked up when the read is planned."""

    dataset: Dataset
    columns: tuple[str, ...]
    verify: Verify
    pool: PoolConfig
    start: int
    end: int | str
    chain_id: int | None
    blocks_per_partition: int | None
    tasks_at_once: int | None


def table_of(options: Mapping[str, str]) -> tuple[Dataset, tuple[str, ...]]:
    """Which table and which of its columns: all that the schema needs."""
    for name in options:
        if name.lower() not in _KNOWN:
            raise _wrong(name, f"unknown; it has {', '.join(sorted(_KNOWN))}")
    dataset = _one_of("dataset", options.get("dataset"), Dataset)
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
        pool=_pool(options),
        start=start,
        end=end,
        chain_id=_optional("chain_id", options),
        blocks_per_partition=_optional("blocks_per_partition", options),
        tasks_at_once=_optional("tasks_at_once", options),
    )


def partition_size(blocks: int, asked: int | None) -> int:
    """However long the range, the number of partitions is bounded: planning is not the work itself."""
    size = asked or BLOCKS_PER_PARTITION
    if asked is None:
        while blocks > size * MAX_PARTITIONS:
            size *= 10
    elif blocks > size * MAX_PARTITIONS:
        count = -(-blocks // size)
        raise _wrong("blocks_per_partition", f"{count} partitions; at most {MAX_PARTITIONS}: raise it")
    return size


def _pool(options: Mapping[str, str]) -> PoolConfig:
    """Never repeats what it was given: an address may hold a key."""
    urls, pool = options.get("url", "").replace(",", " ").split(), options.get("pool", "").strip()
    if bool(urls) == bool(pool):
        raise _wrong("url", "give url (addresses, with commas), or pool (JSON, or the path of an rpc.toml)")
    if urls:
        return pool_of(*urls)
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
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= MAX_BLOCK):
        raise _wrong(name, f"must be a whole number, {least} or more{others}, not {text[:40]!r}")
    return int(text)


def _one_of(name: str, text: str | None, kind: type[T]) -> T:
    try:
        return kind((text or "").lower())
    except ValueError:
        said = "is missing" if text is None else f"{text[:40]!r} is none"
        raise _wrong(name, f"{said}; it is one of {', '.join(kind)}") from None


def _wrong(option: str, what: str) -> Invalid:
    return Invalid("InvalidOption", f"evm source, option {option}: {what}")
