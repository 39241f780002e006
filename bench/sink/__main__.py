"""``python -m bench.sink``: rows per second from publish to committed, beside plain COPY into the same table.

Two embedded Postgres, everything durable, a Dispatcher and a sink as people run them. Publishers send batches over
HTTP with a task's capability token; the clock stops when the last row is committed. Beside it the same rows by
COPY, from CSV that was made before the clock started, into a table with the same columns and indexes: one COPY for
everything, and one for each batch. Rounds take turns; the ratio is that of the medians.

``--backlog N`` puts N batches of one record into the queue first and starts the sink then: how fast it drains them,
and how much memory it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from bench.sink.plain_copy import copy_batches, copy_whole
from bench.sink.records import Records
from bench.sink.stack import SinkStack, open_stack


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--batches", type=int, default=200, help="per round (200)")
    parser.add_argument("--rows", type=int, default=1000, help="per batch (1000)")
    parser.add_argument("--publishers", type=int, default=8, help="calls under way at once (8)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts (3)")
    parser.add_argument(
        "--backlog", type=int, default=0, help="number of batches of one record to drain instead"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tracelake-bench-sink-") as folder:
        asyncio.run(_run(Path(folder), options))
    return 0


async def _run(folder: Path, options: argparse.Namespace) -> None:
    async with open_stack(folder) as stack:
        if options.backlog:
            _say(await _drain_backlog(stack, options.backlog))
        else:
            await _compare(stack, options)


async def _compare(stack: SinkStack, options: argparse.Namespace) -> None:
    records = Records(seed=1)
    await stack.start_sink()
    await stack.published([records.batch(options.rows) for _ in range(20)], options.publishers)
    seconds: dict[str, list[float]] = {"copy_whole": [], "copy_batches": [], "published": []}
    for _ in range(options.rounds):
        batches = [records.batch(options.rows) for _ in range(options.batches)]
        seconds["copy_whole"].append(await stack.in_fresh_table(batches, copy_whole))
        seconds["copy_batches"].append(await stack.in_fresh_table(batches, copy_batches))
        seconds["published"].append(await stack.published(batches, options.publishers))
    rows = options.batches * options.rows
    speed = {name: rows / median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        line: dict[str, Any] = {"writer": name, "rows": rows, "rows_per_batch": options.rows}
        line |= {"seconds": [round(each, 3) for each in times], "rows_per_second": round(speed[name])}
        line |= {
            f"of_{other}": round(speed[name] / speed[other], 2)
            for other in ("copy_whole", "copy_batches")
            if other != name
        }
        _say(line)


async def _drain_backlog(stack: SinkStack, count: int) -> dict[str, Any]:
    records = Records(seed=2)
    await stack.put_in_queue(records, count)
    sink = await stack.start_sink()
    before = stack.memory_of(sink)
    took, most = await stack.until_drained(sink, count)
    return {
        "backlog": count,
        "seconds": round(took, 1),
        "batches_per_second": round(count / took),
        "rss_before_mib": before,
        "rss_highest_mib": most,
        "rss_after_mib": stack.memory_of(sink),
    }


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(orjson.dumps(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
