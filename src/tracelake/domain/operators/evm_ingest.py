"""The declaration of ``evm_ingest``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Struct

from tracelake.domain.dag.model import Activation, ExecutionStrategy, Storage
from tracelake.domain.operators import shared_settings as shared
from tracelake.domain.operators.spec import Need, OperatorSpec, Setting
from tracelake.domain.runtimes import ECS_SPARK


class EvmIngestSettings(Struct, frozen=True, kw_only=True):
    rpc_pool: Annotated[
        shared.PoolName,
        Setting(shared.POOL, must=shared.MUST_BE_POOL, required=f"is required: {shared.MUST_BE_POOL}"),
    ]
    chain_id: Annotated[shared.ChainId | None, shared.CHAIN] = None
    verify: Annotated[shared.VerifyLevel, shared.VERIFY_SETTING] = "full"
    senders: Annotated[shared.SendersFrom, shared.SENDERS_SETTING] = "derive"
    finality: Annotated[
        Literal["latest", "safe", "finalized"] | shared.Depth,
        shared.finality(
            "How settled the last block must be: `latest`, `safe`, `finalized`, or a number of blocks.",
            "latest",
            "safe",
            "finalized",
        ),
    ] = "latest"
    blocks_per_file: Annotated[shared.BlocksPerFile | None, shared.FILES] = None


SPEC = OperatorSpec(
    "evm_ingest",
    EvmIngestSettings,
    about="A block range of a chain as Parquet, in one pass and proven against the headers "
    "([chains](chains.md#ranges-into-files)).",
    reads="the scope of its input, and a chain, through an RPC pool",
    writes="files of [the chain's schema](schemas.md), each table by its name",
    runtimes=(ECS_SPARK,),
    needs=frozenset({Need.SPARK, Need.RPC_POOL}),
    function="tracelake.operators.evm_ingest:evm_ingest",
    activation=Activation.REACTIVE,
    strategy=ExecutionStrategy.PER_PARTITION,
    outputs=shared.CHAIN_TABLES,
    usual_outputs=shared.USUAL_TABLES,
    outputs_by_name=True,
    chain_tables=True,
    storage=Storage.PARQUET,
    storages=frozenset({Storage.PARQUET}),
)
