"""The declaration of ``integrity_check``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from msgspec import Struct

from tracelake.domain.dag.model import Activation, Storage
from tracelake.domain.operators import shared_settings as shared
from tracelake.domain.operators.spec import Need, OperatorSpec, Setting, model_problems
from tracelake.domain.runtimes import ECS_SPARK


class IntegrityCheckSettings(Struct, frozen=True, kw_only=True):
    rpc_pool: Annotated[
        shared.PoolName | None,
        Setting(shared.POOL + " `verify: off` needs none.", must=shared.MUST_BE_POOL),
    ] = None
    chain_id: Annotated[shared.ChainId | None, shared.CHAIN] = None
    verify: Annotated[
        shared.VerifyLevel,
        Setting(
            "How much of the chain is compared: `bloom` headers, `full` every value, `off` nothing.",
            must=shared.MUST_BE_VERIFY,
        ),
    ] = "bloom"


def _problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    # Not a required field of the model: with verify: off, no endpoint is asked.
    if config.get("rpc_pool") is None and config.get("verify") != "off":
        yield "rpc_pool", f"is required: {shared.MUST_BE_POOL} (verify: off needs none)"
    yield from model_problems(IntegrityCheckSettings, config)


SPEC = OperatorSpec(
    "integrity_check",
    IntegrityCheckSettings,
    checks=_problems,
    about="Stored blocks against themselves and against the chain; wrong ranges are invalidated and made again "
    "([chains](chains.md#hot-rows-into-files)).",
    reads="tables of one chain, hot or cold, and the chain, through an RPC pool",
    writes="events: the blocks that were wrong (PerPartition), or how far the check has come (PerUpdate)",
    runtimes=(ECS_SPARK,),
    needs=frozenset({Need.SPARK, Need.RPC_POOL}),
    function="tracelake.operators.integrity_check:integrity_check",
    activation=Activation.REACTIVE,
    outputs=("findings",),
    storage=Storage.NONE,
    storages=frozenset({Storage.NONE}),
    reads_blocks=True,
    invalidates_inputs=True,
)
