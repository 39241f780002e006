"""``python -m bench.alerts``: how long after a large transfer was mined its alert is there, and after a reorg gone.

``examples/alerts`` on anvil, with the whole stack of ``tracelake dev``: follower, decoded events on Spark, a
function in its sandbox that queries its window and publishes, the sink. A watcher looks for the row every few
milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from tests.support.alert_scene import CRITICAL, AlertScene, Table, alert_scene

TARGET_P50 = 3.0
_LOOK_SECONDS = 0.005
_PATIENCE = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--alerts", type=int, default=20)
    parser.add_argument("--language", choices=("python", "node"), default="python")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tracelake-alerts-") as folder,
        alert_scene(Path(folder)) as scene,
    ):
        scene.deploy(options.language)
        raised, retracted = _measure(scene, options.alerts)
    for what, seconds in (("alert", raised), ("retraction", retracted)):
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        p50, p99 = round(cuts[49], 3), round(cuts[98], 3)
        line: dict[str, Any] = {"workload": what, "count": len(seconds), "p50": p50, "p99": p99}
        if what == "alert":
            line |= {"target_p50": TARGET_P50, "verdict": "reached" if p50 <= TARGET_P50 else "missed"}
        sys.stdout.write(orjson.dumps(line).decode() + "\n")
    return 0


def _measure(scene: AlertScene, count: int) -> tuple[list[float], list[float]]:
    raised, retracted = [], []
    with scene.table("alert_events") as table:
        # The first one finds nothing warm.
        _seconds_until(lambda: _alerts(table), lambda: scene.transfer(CRITICAL))
        for _ in range(count):
            more = partial(_is_more, table, len(_alerts(table)))
            raised.append(_seconds_until(more, lambda: scene.transfer(CRITICAL)))
        for _ in range(max(2, count // 4)):
            head = scene.transfer(CRITICAL)
            _until(partial(_standing, table, head))
            gone = partial(_is_gone, table, head)
            retracted.append(_seconds_until(gone, lambda: scene.node.reorg(1)))
    return raised, retracted


def _alerts(table: Table) -> set[object]:
    return {key for (key,) in table.rows("dedupe_key")}


def _is_more(table: Table, than: int) -> bool:
    return len(_alerts(table)) > than


def _is_gone(table: Table, block: int) -> bool:
    return not _standing(table, block)


def _standing(table: Table, block: int) -> list[object]:
    rows = table.rows("dedupe_key", "block_number", "retracted_at")
    return [key for key, number, retracted_at in rows if number == block and retracted_at is None]


def _seconds_until(seen: Callable[[], object], do: Callable[[], object]) -> float:
    do()
    began = time.monotonic()
    _until(seen)
    return time.monotonic() - began


def _until(seen: Callable[[], object]) -> object:
    until = time.monotonic() + _PATIENCE
    while not (found := seen()):
        if time.monotonic() > until:
            raise SystemExit(f"nothing came within {_PATIENCE:g} s")
        time.sleep(_LOOK_SECONDS)
    return found


if __name__ == "__main__":
    sys.exit(main())
