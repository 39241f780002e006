"""The declarations of the operators that the Dispatcher runs itself."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.dag.model import Activation, ExecutionStrategy, Storage
from tracelake.domain.operators import shared_settings as shared
from tracelake.domain.operators.spec import NoSettings, OperatorSpec, Setting
from tracelake.domain.runtimes import DISPATCHER, ECS_PYTHON, ECS_SPARK, LAMBDA


class RangeSplitterSettings(Struct, frozen=True, kw_only=True):
    chunk_size: Annotated[
        shared.RangeSize,
        Setting("Blocks of a chunk; chunks are cut at its multiples.", must=shared.MUST_BE_RANGE),
    ]


class RangeAggregatorSettings(Struct, frozen=True, kw_only=True):
    range_size: Annotated[
        shared.RangeSize,
        Setting("Blocks of a range; ranges start at its multiples.", must=shared.MUST_BE_RANGE),
    ]
    finality: Annotated[
        Literal["finalized", "latest"] | shared.Depth,
        shared.finality(
            "`finalized` (as the source reports), `latest`, or a number of blocks behind the cursor.",
            "finalized",
            "latest",
        ),
    ] = "finalized"
    # Without a default in the model: completed configs, and so fingerprints, have never had it.
    start_block: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_BLOCK)] | UnsetType,
        Setting("No range begins before it.", must=f"a whole number from 0 to {MAX_BLOCK}"),
    ] = UNSET


RANGE_SPLITTER = OperatorSpec(
    "range_splitter",
    RangeSplitterSettings,
    about="A block range down to chunks on a grid: whole chunks are the same, whichever range is requested.",
    reads="the block range of its first input",
    writes="events: one for each chunk",
    runtimes=(DISPATCHER,),
    activation=Activation.REACTIVE,
    usual_strategy=ExecutionStrategy.PER_PARTITION,
    outputs=("chunks",),
    storages=frozenset({Storage.NONE}),
    reads_blocks=True,
)
RANGE_AGGREGATOR = OperatorSpec(
    "range_aggregator",
    RangeAggregatorSettings,
    about="A rising cursor up to whole block ranges, each announced as soon as its last block is final.",
    reads="the cursor of its first input",
    writes="events: one for each range",
    runtimes=(DISPATCHER,),
    activation=Activation.REACTIVE,
    usual_strategy=ExecutionStrategy.PER_UPDATE,
    outputs=("ranges",),
    storages=frozenset({Storage.NONE}),
    reads_blocks=True,
)
NOOP_SPEC = OperatorSpec(
    "noop",
    NoSettings,
    refuses_unknown=False,
    about="Does nothing and announces its scope as done. For tests and benchmarks; a manual source may name it.",
    reads="nothing",
    writes="its scope, as an event",
    runtimes=(DISPATCHER, ECS_PYTHON, ECS_SPARK, LAMBDA),
    function="tracelake.operators.in_process:noop",
)
