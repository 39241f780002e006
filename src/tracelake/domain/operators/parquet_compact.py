"""The declaration of ``parquet_compact``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Struct

from tracelake.domain.dag.model import Activation, ExecutionStrategy, Storage
from tracelake.domain.operators import shared_settings as shared
from tracelake.domain.operators.spec import Need, OperatorSpec, Setting, model_problems
from tracelake.domain.runtimes import ECS_SPARK

_NO_DELETING = "is not supported: hot rows stay where they are, and readers see each block once"
_REFUSED = Setting("Refused: hot rows stay.", decides_rows=False)


class ParquetCompactSettings(Struct, frozen=True, kw_only=True):
    finality: Annotated[
        Literal["finalized", "latest"] | shared.Depth,
        shared.finality(
            "`finalized` (as the source reports), `latest`, or a number of blocks below the highest.",
            "finalized",
            "latest",
        ),
    ] = "finalized"
    blocks_per_file: Annotated[shared.BlocksPerFile | None, shared.FILES] = None
    verified: Annotated[
        shared.VerifyLevel | None,
        Setting(
            "The level that the source has checked, to be recorded in the files: `full`, `bloom`, `off`.",
            must=shared.MUST_BE_VERIFY,
            decides_rows=False,
        ),
    ] = None
    delete_hot: Annotated[Any, _REFUSED] = None
    keep_hot_blocks: Annotated[Any, _REFUSED] = None


def _problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from model_problems(ParquetCompactSettings, config)
    for key in ("delete_hot", "keep_hot_blocks"):
        if config.get(key):
            yield key, _NO_DELETING


SPEC = OperatorSpec(
    "parquet_compact",
    ParquetCompactSettings,
    checks=_problems,
    about="Final rows of hot tables as the files that an ingest would have written "
    "([chains](chains.md#hot-rows-into-files)).",
    reads="block ranges from the input that triggers it; hot tables of a chain with `trigger: false`",
    writes="one table for each hot input, with its columns, as in [the chain's schema](schemas.md)",
    runtimes=(ECS_SPARK,),
    needs=frozenset({Need.SPARK}),
    function="tracelake.operators.parquet_compact:parquet_compact",
    activation=Activation.REACTIVE,
    strategy=ExecutionStrategy.PER_PARTITION,
    outputs_named_after_inputs=True,
    chain_tables=True,
    reads_blocks=True,
    storage=Storage.PARQUET,
    storages=frozenset({Storage.PARQUET}),
)
