"""The settings of an ``evm_ingest``: what a deploy refuses, the operator refuses too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tracelake.domain import setting_checks

DEFAULTS: Mapping[str, Any] = {"verify": "full", "finality": "latest"}
KEYS = frozenset(DEFAULTS) | {"rpc_pool", "chain_id", "blocks_per_file"}
FINALITY = ("latest", "safe", "finalized")
OUTPUTS = setting_checks.CHAIN_TABLES
USUAL_OUTPUTS = setting_checks.USUAL_TABLES

_CHECKS: setting_checks.Checks = {
    "rpc_pool": setting_checks.rpc_pool,
    "chain_id": setting_checks.chain_id,
    "verify": setting_checks.verify,
    "finality": partial(setting_checks.finality, tags=FINALITY),
    "blocks_per_file": setting_checks.blocks_per_file,
}


def problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of key and what is wrong with it; unknown keys are the caller's to find."""
    if config.get("rpc_pool") is None:
        yield "rpc_pool", "is required: the name of an RPC pool"
    yield from setting_checks.problems_of(config, DEFAULTS, _CHECKS)
