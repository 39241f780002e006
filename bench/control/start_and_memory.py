"""W4: how long a start takes, on a new home and on one that exists, and what the processes hold in memory."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from bench.control.stack import running
from bench.control.workloads import independent_tasks

STARTS = 3


async def measure(folder: Path) -> dict[str, Any]:
    cold: list[float] = []
    warm: list[float] = []
    for number in range(STARTS):
        home = folder / str(number)
        for times in (cold, warm):
            async with running(home) as stack:
                times.append(stack.started_in)
                idle = stack.memory()
    async with running(folder / "0") as stack:
        await independent_tasks(stack, 2000)
        loaded = stack.memory()
    return {
        "cold_start_s": round(statistics.median(cold), 3),
        "warm_start_s": round(statistics.median(warm), 3),
        "idle": idle,
        "after_2000_tasks": loaded,
    }
