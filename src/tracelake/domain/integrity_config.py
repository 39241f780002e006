"""The settings of an ``integrity_check``: what a deploy refuses, the operator refuses too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tracelake.domain import setting_checks

DEFAULTS: Mapping[str, Any] = {"verify": "bloom"}
KEYS = frozenset(DEFAULTS) | {"rpc_pool", "chain_id"}

_CHECKS: setting_checks.Checks = {
    "verify": setting_checks.verify,
    "rpc_pool": setting_checks.rpc_pool,
    "chain_id": setting_checks.chain_id,
}


def problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of key and what is wrong with it; unknown keys are the caller's to find."""
    if config.get("rpc_pool") is None and config.get("verify") != "off":
        yield "rpc_pool", "is required: the name of an RPC pool (verify: off needs none)"
    yield from setting_checks.problems_of(config, DEFAULTS, _CHECKS)
