"""What a job's configuration and the names of its outputs ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tracelake.domain import ingest_config
from tracelake.domain.errors import Invalid
from tracelake.evm.raw_block import Dataset, Verify
from tracelake.operators.job_config import refuse_wrong


@dataclass(frozen=True, slots=True)
class IngestConfig:
    datasets: tuple[Dataset, ...]
    verify: Verify
    finality: str | int
    chain_id: int | None = None
    blocks_per_file: int | None = None


def read_config(config: Mapping[str, Any], outputs: Sequence[str]) -> IngestConfig:
    """``outputs`` are the names of the job's outputs, in their order."""
    refuse_wrong("evm_ingest", config, ingest_config.KEYS, ingest_config.problems(config))
    for name in outputs:
        if name not in ingest_config.OUTPUTS:
            known = ", ".join(ingest_config.OUTPUTS)
            raise Invalid("InvalidOutput", f"evm_ingest has no output {name!r}; it has {known}")
    given = {**ingest_config.DEFAULTS, **config}
    return IngestConfig(
        datasets=tuple(Dataset(name) for name in outputs),
        verify=Verify(given["verify"]),
        finality=given["finality"],
        chain_id=given.get("chain_id"),
        blocks_per_file=given.get("blocks_per_file"),
    )
