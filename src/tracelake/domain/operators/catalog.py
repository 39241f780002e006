"""The built-in operators by name.

An operator that isn't listed is a user's own: it may have any name, has as many outputs as the DAG lists, and its
settings are known to its workers alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tracelake.domain.dag.model import Activation, Storage
from tracelake.domain.operators import (
    block_follower,
    decode_events,
    evm_ingest,
    integrity_check,
    parquet_compact,
    sql_transform,
)
from tracelake.domain.operators.in_process import NOOP_SPEC, RANGE_AGGREGATOR, RANGE_SPLITTER
from tracelake.domain.operators.spec import NoSettings, OperatorSpec
from tracelake.domain.runtimes import DELIVERY as DELIVERY_RUNTIME
from tracelake.domain.runtimes import SINK

UDF = "udf"
_BUFFER_SINK_SPEC = OperatorSpec(
    "buffer_sink",
    NoSettings,
    about="Writes a [buffered dataset](buffers.md). A deploy adds its job by itself; no DAG names it.",
    reads="the dataset's queue",
    writes="the declared columns and [the platform's](buffers.md#declare)",
    runtimes=(SINK,),
    activation=Activation.SOURCE,
    platform=True,
    outputs=("rows",),
    storage=Storage.POSTGRES,
    storages=frozenset({Storage.POSTGRES}),
)
_DELIVERY_SPEC = OperatorSpec(
    "delivery",
    NoSettings,
    about="Sends the rows of a [delivery](deliveries.md). A deploy adds its job by itself; no DAG names it.",
    reads="a buffered dataset",
    writes="nothing here: messages to a receiver",
    runtimes=(DELIVERY_RUNTIME,),
    activation=Activation.SOURCE,
    platform=True,
    outputs=(),
    storage=Storage.NONE,
    storages=frozenset({Storage.NONE}),
)

# In the order of the reference page: from the chain to tables, then the operators around them.
CATALOG: Mapping[str, OperatorSpec[Any]] = {
    spec.name: spec
    for spec in (
        block_follower.SPEC,
        evm_ingest.SPEC,
        parquet_compact.SPEC,
        decode_events.SPEC,
        sql_transform.SPEC,
        RANGE_AGGREGATOR,
        RANGE_SPLITTER,
        integrity_check.SPEC,
        NOOP_SPEC,
        _BUFFER_SINK_SPEC,
        _DELIVERY_SPEC,
    )
}
NOOP = NOOP_SPEC.name
BUFFER_SINK = _BUFFER_SINK_SPEC.name
DELIVERY = _DELIVERY_SPEC.name
IN_PROCESS_OPERATORS = tuple(sorted(spec.name for spec in CATALOG.values() if spec.in_process))


def default_output_count(operator: str) -> int:
    """Number of outputs of a job that doesn't list any; none for an operator that isn't built in."""
    spec = CATALOG.get(operator)
    return 0 if spec is None else spec.output_count


def complete_config(operator: str, config: Mapping[str, Any]) -> dict[str, Any]:
    spec = CATALOG.get(operator)
    return dict(config) if spec is None else spec.complete(config)


def config_problems(operator: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of setting and message for a built-in operator; unknown settings aside."""
    spec = CATALOG.get(operator)
    return iter(()) if spec is None else spec.problems(config)
