"""The settings of a ``block_follower``: what a deploy refuses, the operator refuses too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tracelake.domain import setting_checks
from tracelake.domain.block_range import MAX_BLOCK
from tracelake.domain.setting_checks import is_number, is_whole

DEFAULTS: Mapping[str, Any] = {
    "start_block": 0,
    "verify": "full",
    "finality": "finalized",
    "poll_seconds": 1.0,
    "max_blocks_per_commit": 1000,
    "catch_up": "auto",
    "shorter_after_seconds": 10.0,
}
KEYS = frozenset(DEFAULTS) | {"chain_id", "rpc_pool"}
CATCH_UP = ("auto", "spark", "process")
OUTPUTS = setting_checks.CHAIN_TABLES
USUAL_OUTPUTS = setting_checks.USUAL_TABLES
LATEST = "latest"
FINALIZED = "finalized"

_CHECKS: setting_checks.Checks = {
    "chain_id": setting_checks.chain_id,
    "rpc_pool": setting_checks.rpc_pool,
    "verify": setting_checks.verify,
    "finality": partial(setting_checks.finality, tags=(FINALIZED,)),
}
_MAX_BLOCKS = 10_000


def problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of key and what is wrong with it; unknown keys are the caller's to find."""
    given = {**DEFAULTS, **config}
    for key in ("chain_id", "rpc_pool"):
        if config.get(key) is None:
            yield key, "is required"
    yield from setting_checks.problems_of(config, DEFAULTS, _CHECKS)
    if given["start_block"] != LATEST and not is_whole(given["start_block"], 0, MAX_BLOCK):
        yield "start_block", f"must be a block number or {LATEST}"
    if not is_number(given["poll_seconds"], 0.02, 60):
        yield "poll_seconds", "must be a number of seconds from 0.02 to 60"
    if not is_whole(given["max_blocks_per_commit"], 1, _MAX_BLOCKS):
        yield "max_blocks_per_commit", f"must be a whole number from 1 to {_MAX_BLOCKS}"
    if given["catch_up"] not in CATCH_UP:
        yield "catch_up", f"must be one of {', '.join(CATCH_UP)}"
    if not is_number(given["shorter_after_seconds"], 0, 3600):
        yield "shorter_after_seconds", "must be a number of seconds from 0 to 3600"
