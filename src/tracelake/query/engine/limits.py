"""What one query may use. Time is counted by the service and ends in a kill; the rest holds inside the slot."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass, field

MIB = 1024 * 1024
#: For the interpreter, the engine's code, and rows on their way in and out.
OWN_BYTES = 512 * MIB
#: Beside those of a query: what the engine opens anew, a few for each thread, and the interpreter's.
OTHER_DESCRIPTORS = 1024
#: Descriptors of one query; more files than that are compacted first, or asked for in parts.
MOST_DESCRIPTORS = 16_000


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLimits:
    """``memory_bytes`` is DuckDB's own limit; the process as a whole gets some more for the rows it hands in and
    out. ``spill_bytes`` is what may go to the slot's private folder; 0 means that nothing may."""

    seconds: float = 30.0
    memory_bytes: int = 1024 * MIB
    spill_bytes: int = 2048 * MIB
    threads: int = field(default_factory=_cores)


def raise_descriptor_limit() -> None:
    """As far as it may be raised: a query's files are open in the service before they are handed over."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def most_descriptors() -> int:
    """Of one query, on this machine; a slot has the same limit as the service."""
    return max(1, min(MOST_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1] - OTHER_DESCRIPTORS))
