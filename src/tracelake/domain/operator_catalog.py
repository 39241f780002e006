"""The built-in operators as a DAG author sees them: outputs, storages, configuration.

An operator that is not listed is somebody's own: it may be called anything, has as many outputs as the
DAG says, and nothing is known about its configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from tracelake.domain.dag.model import ExecutionStrategy, Storage

NOOP = "noop"
UDF = "udf"
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


_CHAIN_TABLES = ("blocks", "transactions", "logs")
_COLD = frozenset({Storage.PARQUET})
_HOT = frozenset({Storage.POSTGRES})
_EVENT_ONLY = frozenset({Storage.NONE})
_PER_PARTITION = ExecutionStrategy.PER_PARTITION

CATALOG: Mapping[str, OperatorTraits] = {
    NOOP: OperatorTraits(None, Storage.NONE, _ANY_STORAGE, in_process=True),
    "block_follower": OperatorTraits(_CHAIN_TABLES, Storage.POSTGRES, _HOT),
    "evm_ingest": OperatorTraits(_CHAIN_TABLES, Storage.PARQUET, _COLD, _PER_PARTITION),
    "parquet_compact": OperatorTraits(
        None, Storage.PARQUET, _COLD, _PER_PARTITION, outputs_named_after_inputs=True
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
    "decode_events": OperatorTraits(("events",), Storage.PARQUET, _COLD | _HOT),
    "integrity_check": OperatorTraits(("findings",), Storage.NONE, _EVENT_ONLY),
}

IN_PROCESS_OPERATORS = tuple(sorted(name for name, traits in CATALOG.items() if traits.in_process))


def default_output_count(operator: str) -> int:
    """How many outputs a job has that doesn't say: a built-in's own, none for an operator we don't know."""
    traits = CATALOG.get(operator)
    if traits is None:
        return 0
    return 1 if traits.outputs is None else len(traits.outputs)


def complete_config(operator: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults written out, so that spelling one out is no change of the job."""
    if operator == "range_aggregator":
        return {"finality": "finalized", **config}
    return dict(config)


def config_problems(operator: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of config key and what is wrong with it, for the operators that the platform itself runs."""
    match operator:
        case "range_splitter":
            yield from _size_problems("chunk_size", config)
        case "range_aggregator":
            yield from _size_problems("range_size", config)
            finality = config.get("finality", "finalized")
            if finality not in ("finalized", "latest") and not _is_whole(finality, at_least=0):
                yield "finality", "must be finalized, latest or a number of blocks (0 or more)"
            if not _is_whole(config.get("start_block", 0), at_least=0):
                yield "start_block", "must be a whole number, 0 or more"
        case _:
            return


def _size_problems(key: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if key not in config:
        yield key, "is required"
    elif not _is_whole(config[key], at_least=1):
        yield key, "must be a whole number, 1 or more"


def _is_whole(value: object, *, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
