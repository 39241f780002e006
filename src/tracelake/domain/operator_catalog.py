"""The built-in operators as a DAG author sees them: outputs, storages, configuration.

An operator that is not listed is somebody's own: it may be called anything, has as many outputs as the
DAG says, and nothing is known about its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tracelake.domain import compact_config, follower_config, ingest_config, integrity_config
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.dag.model import ExecutionStrategy, Storage
from tracelake.domain.errors import Invalid
from tracelake.domain.event_abi import decode_config
from tracelake.domain.setting_checks import MAX_RANGE, is_whole
from tracelake.domain.spark_select.queries import read_select

NOOP = "noop"
UDF = "udf"
BUFFER_SINK = "buffer_sink"
PLATFORM_OPERATORS = frozenset({BUFFER_SINK})
"""Their jobs come with what a DAG publishes; no DAG names them."""
READS_BLOCKS = frozenset({"parquet_compact", "range_aggregator", "range_splitter", "integrity_check"})
"""What they do to their inputs they do by block number."""
_ANY_STORAGE = frozenset(Storage)


class OperatorTraits(msgspec.Struct, frozen=True):
    """``outputs`` None: as many as the DAG asks for. ``config`` None: the operator itself checks it."""

    outputs: tuple[str, ...] | None
    storage: Storage
    storages: frozenset[Storage]
    strategy: ExecutionStrategy | None = None
    in_process: bool = False
    config: frozenset[str] | None = None
    outputs_named_after_inputs: bool = False
    outputs_by_name: bool = False
    """What an output holds follows from its name, which is one of ``outputs``."""
    usual_outputs: int | None = None
    """How many of ``outputs`` a job has that doesn't say; None is all of them."""
    takes_back_inputs: bool = False
    """May say of what it reads that it is wrong. Everybody else may speak of their own outputs only."""


_COLD = frozenset({Storage.PARQUET})
_HOT = frozenset({Storage.POSTGRES})
_EVENT_ONLY = frozenset({Storage.NONE})
_PER_PARTITION = ExecutionStrategy.PER_PARTITION

CATALOG: Mapping[str, OperatorTraits] = {
    NOOP: OperatorTraits(None, Storage.NONE, _ANY_STORAGE, in_process=True),
    "block_follower": OperatorTraits(
        follower_config.OUTPUTS,
        Storage.POSTGRES,
        _HOT,
        config=follower_config.KEYS,
        outputs_by_name=True,
        usual_outputs=follower_config.USUAL_OUTPUTS,
    ),
    "evm_ingest": OperatorTraits(
        ingest_config.OUTPUTS,
        Storage.PARQUET,
        _COLD,
        _PER_PARTITION,
        config=ingest_config.KEYS,
        outputs_by_name=True,
        usual_outputs=ingest_config.USUAL_OUTPUTS,
    ),
    "parquet_compact": OperatorTraits(
        None,
        Storage.PARQUET,
        _COLD,
        _PER_PARTITION,
        config=compact_config.KEYS,
        outputs_named_after_inputs=True,
    ),
    "range_splitter": OperatorTraits(
        ("chunks",), Storage.NONE, _EVENT_ONLY, in_process=True, config=frozenset({"chunk_size"})
    ),
    "range_aggregator": OperatorTraits(
        ("ranges",),
        Storage.NONE,
        _EVENT_ONLY,
        in_process=True,
        config=frozenset({"range_size", "finality", "start_block"}),
    ),
    "sql_transform": OperatorTraits(("result",), Storage.PARQUET, _COLD | _HOT),
    "decode_events": OperatorTraits(("events",), Storage.PARQUET, _COLD | _HOT, config=decode_config.KEYS),
    "integrity_check": OperatorTraits(
        ("findings",),
        Storage.NONE,
        _EVENT_ONLY,
        config=integrity_config.KEYS,
        takes_back_inputs=True,
    ),
    BUFFER_SINK: OperatorTraits(("rows",), Storage.POSTGRES, _HOT, config=frozenset()),
}

IN_PROCESS_OPERATORS = tuple(sorted(name for name, traits in CATALOG.items() if traits.in_process))


def default_output_count(operator: str) -> int:
    """How many outputs a job has that doesn't say: a built-in's own, none for an operator we don't know."""
    traits = CATALOG.get(operator)
    if traits is None:
        return 0
    if traits.usual_outputs is not None:
        return traits.usual_outputs
    return 1 if traits.outputs is None else len(traits.outputs)


def complete_config(operator: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults written out, so that spelling one out is no change of the job."""
    if operator == "block_follower":
        return {**follower_config.DEFAULTS, **config}
    if operator == "evm_ingest":
        return {**ingest_config.DEFAULTS, **config}
    if operator == "parquet_compact":
        return {**compact_config.DEFAULTS, **config}
    if operator == "integrity_check":
        return {**integrity_config.DEFAULTS, **config}
    if operator == "range_aggregator":
        return {"finality": "finalized", **config}
    return dict(config)


def config_problems(operator: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of config key and what is wrong with it, for the operators that the platform itself runs."""
    match operator:
        case "block_follower":
            yield from follower_config.problems(config)
        case "evm_ingest":
            yield from ingest_config.problems(config)
        case "decode_events":
            yield from decode_config.problems(config)
        case "parquet_compact":
            yield from compact_config.problems(config)
        case "integrity_check":
            yield from integrity_config.problems(config)
        case "sql_transform":
            yield from _sql_problems(config)
        case "range_splitter":
            yield from _size_problems("chunk_size", config)
        case "range_aggregator":
            yield from _size_problems("range_size", config)
            finality = config.get("finality", "finalized")
            if finality not in ("finalized", "latest") and not is_whole(finality, 0, MAX_RANGE):
                yield "finality", f"must be finalized, latest or a number of blocks (0 to {MAX_RANGE})"
            if not is_whole(config.get("start_block", 0), 0, MAX_BLOCK):
                yield "start_block", f"must be a whole number from 0 to {MAX_BLOCK}"
        case _:
            return


def _sql_problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What can be told without Spark, and without knowing what the inputs will be called."""
    try:
        read_select(config.get("sql"), None)
    except Invalid as error:
        yield "sql", error.message.removeprefix("sql ")


def _size_problems(key: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if key not in config:
        yield key, "is required"
    elif not is_whole(config[key], 1, MAX_RANGE):
        yield key, f"must be a whole number from 1 to {MAX_RANGE}"
