"""What the ``evm`` data source makes of its options and of conditions on blocks, without Spark or a node."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from tracelake.domain.errors import Invalid
from tracelake.evm.raw_block import ChainTable, Senders, Verify
from tracelake.evm.rpc.config import pool_of
from tracelake.evm.source import MAX_PARTITIONS, EvmDataSource, EvmReader, SourceOptions, read_options

URL = "http://127.0.0.1:9"
BLOCK = ("block_number",)


def options(**given: Any) -> SourceOptions:
    every = {"dataset": "logs", "start": 0, "end": 9, "url": URL, **given}
    return read_options({key: str(value) for key, value in every.items() if value is not None})


def planned(filters: Sequence[Filter] = (), **given: Any) -> tuple[list[tuple[int, int]], list[Filter]]:
    reader = EvmReader(options(**given))
    left = list(reader.pushFilters(list(filters)))
    cuts = [partition.value for partition in reader.partitions()]
    return [(cut.start, cut.stop - 1) for cut in cuts], left


def test_defaults_are_the_careful_ones() -> None:
    read = options()
    assert (read.dataset, read.verify, read.columns[0]) == (ChainTable.LOGS, Verify.FULL, "chain_id")
    assert read.senders is Senders.DERIVE
    assert read.chain_id is None


def test_partitions_lie_on_a_grid_and_cover_the_range_once() -> None:
    assert planned(start=15, end=40, blocks_per_partition=10)[0] == [(15, 19), (20, 29), (30, 39), (40, 40)]
    assert planned(start=20, end=29, blocks_per_partition=10)[0] == [(20, 29)]


def test_planning_is_bounded_however_long_the_range() -> None:
    million, _ = planned(end=999_999)
    assert len(million) == 1000
    assert sum(end - start + 1 for start, end in million) == 1_000_000
    assert len(planned(end=10**12)[0]) <= MAX_PARTITIONS


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (EqualTo(BLOCK, 5), [(5, 5)]),
        (GreaterThan(BLOCK, 7), [(8, 9)]),
        (GreaterThanOrEqual(BLOCK, 7), [(7, 9)]),
        (LessThan(BLOCK, 2), [(0, 1)]),
        (LessThanOrEqual(BLOCK, 2), [(0, 2)]),
        (LessThan(BLOCK, 10**9), [(0, 9)]),
        (GreaterThan(BLOCK, 10**9), []),
        (EqualTo(BLOCK, -1), []),
    ],
)
def test_bounds_on_blocks_are_kept_here(condition: Filter, expected: list[tuple[int, int]]) -> None:
    assert planned([condition]) == (expected, [])


@pytest.mark.parametrize(
    "condition",
    [
        In(BLOCK, (3, 5)),
        EqualNullSafe(BLOCK, None),
        EqualTo(("log_index",), 5),
        EqualTo(("block_number", "x"), 5),
        GreaterThan(BLOCK, 5.5),
    ],
)
def test_other_conditions_are_left_to_spark(condition: Filter) -> None:
    assert planned([condition]) == ([(0, 9)], [condition])


def test_several_bounds_hold_together() -> None:
    bounds = [
        GreaterThanOrEqual(BLOCK, 3),
        LessThan(BLOCK, 8),
        GreaterThan(BLOCK, 1),
        LessThanOrEqual(BLOCK, 6),
    ]
    assert planned(bounds)[0] == [(3, 6)]


def test_limits_are_divided_among_the_tasks_that_run_at_once() -> None:
    reader = EvmReader(options(end=99, blocks_per_partition=10, tasks_at_once=4))
    reader.partitions()
    assert pickle.loads(pickle.dumps(reader))._share == 0.25


def test_the_schema_has_the_columns_that_were_asked_for() -> None:
    source = EvmDataSource({"dataset": "logs", "columns": "data, block_number"})
    assert source.schema() == "data BINARY, block_number BIGINT"


def test_a_pool_comes_as_json_or_from_a_file(tmp_path: Path) -> None:
    pool = pool_of(URL)
    assert options(url=None, pool=msgspec.json.encode(pool).decode()).pool == pool
    file = tmp_path / "rpc.toml"
    file.write_text(f'[[pools.a.endpoints]]\nurl = "{URL}"\n[[pools.b.endpoints]]\nurl = "{URL}/x"\n')
    assert options(url=None, pool=file, pool_name="b").pool.endpoints[0].url == f"{URL}/x"
    with pytest.raises(Invalid, match=r"option pool_name: which of its pools\? It has a, b"):
        options(url=None, pool=file)


def test_an_address_is_not_repeated() -> None:
    with pytest.raises(Invalid) as refused:
        options(url=None, pool='{"name": "p", "endpoints": [{"name": "e", "url": "ftp://secret"}]}')
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"dataset": "uncles"}, "option dataset: 'uncles' is none; it is one of blocks, transactions, logs"),
        ({"dataset": None}, "option dataset: is missing; it is one of"),
        ({"columns": "topic9"}, "option columns: logs has no column 'topic9'; it has chain_id"),
        ({"columns": "data,data"}, "option columns: 'data' is there twice"),
        ({"start": None}, "option start: is missing: a block number"),
        ({"start": -1}, "option start: must be a whole number, 0 or more, not '-1'"),
        (
            {"end": "soon"},
            "option end: must be a whole number, 0 or more, latest, safe or finalized, not 'soon'",
        ),
        ({"start": 9, "end": 3}, "option end: 3 is below start, which is 9"),
        ({"verify": "much"}, "option verify: 'much' is none; it is one of full, bloom, off"),
        ({"senders": "all"}, "option senders: 'all' is none; it is one of derive, node"),
        ({"url": None}, "option url: give url"),
        ({"pool": "{}"}, "option url: give url"),
        ({"url": "ftp://host"}, "an address begins with http"),
        ({"pool": "{}", "url": None}, "option pool: not a pool"),
        ({"pool": '{"name": "x", "endpoints": []}', "url": None}, "option pool: it has no endpoints"),
        ({"blocks_per_partition": 0}, "option blocks_per_partition: must be a whole number, 1 or more"),
        ({"blocks": 1}, "option blocks: unknown; it has blocks_per_partition, chain, chain_id"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], why: str) -> None:
    with pytest.raises(Invalid, match=why):
        options(**given)


def test_too_many_partitions_are_refused_when_they_were_asked_for() -> None:
    with pytest.raises(Invalid, match="1000000 partitions; at most 10000: raise it"):
        planned(end=999_999, blocks_per_partition=1)
