"""The declaration of ``block_follower``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.dag.model import Activation, Storage
from tracelake.domain.operators import shared_settings as shared
from tracelake.domain.operators.spec import Need, OperatorSpec, Setting
from tracelake.domain.runtimes import ECS_PYTHON, ECS_SPARK

LATEST = "latest"
FINALIZED = "finalized"
_MAX_BLOCKS = 10_000


class BlockFollowerSettings(Struct, frozen=True, kw_only=True):
    chain_id: Annotated[shared.ChainId, shared.CHAIN]
    # The chain's id is required, so the pool can't decide which chain the rows are of.
    rpc_pool: Annotated[shared.PoolName, Setting(shared.POOL, must=shared.MUST_BE_POOL, decides_rows=False)]
    start_block: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_BLOCK)] | Literal["latest"],
        Setting("The first block, or `latest`.", must=f"a block number or {LATEST}"),
    ] = 0
    verify: Annotated[shared.VerifyLevel, shared.VERIFY_SETTING] = "full"
    senders: Annotated[shared.SendersFrom, shared.SENDERS_SETTING] = "derive"
    finality: Annotated[
        Literal["finalized"] | shared.Depth,
        shared.finality(
            "`finalized`, or a number of blocks; a reorg that goes deeper stops the follower until a person "
            "decides.",
            FINALIZED,
        ),
    ] = "finalized"
    poll_seconds: Annotated[
        float,
        Meta(ge=0.02, le=60),
        Setting(
            "Maximum time between two requests for the head, 0.02 to 60.",
            must="a number of seconds from 0.02 to 60",
            decides_rows=False,
        ),
    ] = 1.0
    max_blocks_per_commit: Annotated[
        int,
        Meta(ge=1, le=_MAX_BLOCKS),
        Setting(
            "Maximum number of blocks that become visible at once while catching up, 1 to 10,000.",
            must=f"a whole number from 1 to {_MAX_BLOCKS}",
            decides_rows=False,
        ),
    ] = 1000
    catch_up: Annotated[
        Literal["auto", "spark", "process"],
        Setting(
            "Where blocks are fetched then: by `spark`, in this `process`, or `auto`: Spark if the runtime has it.",
            must="one of auto, spark, process",
            decides_rows=False,
        ),
    ] = "auto"
    shorter_after_seconds: Annotated[
        float,
        Meta(ge=0, le=3600),
        Setting(
            "Time without any endpoint having the stored tip after which the chain counts as shorter.",
            must="a number of seconds from 0 to 3600",
            decides_rows=False,
        ),
    ] = 10.0


SPEC = OperatorSpec(
    "block_follower",
    BlockFollowerSettings,
    about="An always-on source that keeps hot tables equal to the head of a chain, reorgs included "
    "([chains](chains.md#following-the-tip)).",
    reads="a chain, through an RPC pool",
    writes="tables of [the chain's schema](schemas.md), each by its name",
    runtimes=(ECS_PYTHON, ECS_SPARK),
    needs=frozenset({Need.RPC_POOL}),
    function="tracelake.operators.block_follower.operator:block_follower",
    activation=Activation.SOURCE,
    outputs=shared.CHAIN_TABLES,
    usual_outputs=shared.USUAL_TABLES,
    outputs_by_name=True,
    chain_tables=True,
    reports_chain_progress=True,
    storage=Storage.POSTGRES,
    storages=frozenset({Storage.POSTGRES}),
)
