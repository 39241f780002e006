"""The settings of a ``parquet_compact``: what a deploy refuses, the operator refuses too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from tracelake.domain import setting_checks

DEFAULTS: Mapping[str, Any] = {"finality": "finalized"}
KEYS = frozenset(DEFAULTS) | {"blocks_per_file", "verified", "delete_hot", "keep_hot_blocks"}
FINALITY = ("finalized", "latest")

_CHECKS: setting_checks.Checks = {
    "finality": partial(setting_checks.finality, tags=FINALITY),
    "blocks_per_file": setting_checks.blocks_per_file,
    "verified": setting_checks.verify,
}
_NO_DELETING = "is not supported: hot rows stay where they are, and readers see each block once"


def problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Pairs of key and what is wrong with it; unknown keys are the caller's to find."""
    yield from setting_checks.problems_of(config, DEFAULTS, _CHECKS)
    for key in ("delete_hot", "keep_hot_blocks"):
        if config.get(key):
            yield key, _NO_DELETING
