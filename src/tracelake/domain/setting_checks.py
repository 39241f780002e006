"""What settings of the same name have in common, whichever operator has them: what they may be, and how it is said.

A check answers with what is wrong with a value, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

Checks = Mapping[str, Callable[[Any], str | None]]
"""A check for each setting, by its key."""

VERIFY = ("full", "bloom", "off")
CHAIN_TABLES = ("blocks", "transactions", "logs", "receipts", "withdrawals", "traces")
"""What an output of a chain's reader may hold, which follows from its name."""
USUAL_TABLES = 3
"""The first so many are what a job has that doesn't say."""

_MAX_CHAIN_ID = 2**63 - 1
MAX_BLOCKS_PER_FILE = 1_000_000
MAX_RANGE = 1_000_000_000
"""Blocks of a chunk, a range or a Postgres partition, and blocks until one is final."""


def unknown_settings(operator: str, config: Mapping[str, Any], known: Set[str]) -> Iterator[tuple[str, str]]:
    for key in sorted(set(config) - known):
        yield key, f"{operator} has no such setting"


def problems_of(
    config: Mapping[str, Any], defaults: Mapping[str, Any], checks: Checks
) -> Iterator[tuple[str, str]]:
    """Pairs of key and what is wrong with it. A setting without a default may be left out, or be null."""
    given = {**defaults, **config}
    for key, check in checks.items():
        value = given.get(key)
        if value is None and key not in defaults:
            continue
        if (wrong := check(value)) is not None:
            yield key, wrong


def rpc_pool(value: object) -> str | None:
    return None if isinstance(value, str) and value else "must be the name of an RPC pool"


def chain_id(value: object) -> str | None:
    return None if is_whole(value, 1, _MAX_CHAIN_ID) else f"must be a whole number from 1 to {_MAX_CHAIN_ID}"


def verify(value: object) -> str | None:
    return None if value in VERIFY else f"must be one of {', '.join(VERIFY)}"


def finality(value: object, tags: Sequence[str]) -> str | None:
    if value in tags or is_whole(value, 0, MAX_RANGE):
        return None
    return f"must be {', '.join(tags)} or a number of blocks (0 to {MAX_RANGE})"


def blocks_per_file(value: object) -> str | None:
    if is_whole(value, 1, MAX_BLOCKS_PER_FILE):
        return None
    return f"must be a whole number from 1 to {MAX_BLOCKS_PER_FILE}"


def is_whole(value: object, at_least: int, at_most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and at_least <= value <= at_most


def is_number(value: object, at_least: float, at_most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and at_least <= value <= at_most
