"""``python -m bench.delivery``: from the commit of a row to the call of its receiver, and how many calls a second.

A durable Postgres, a Dispatcher, a sink and a delivery process as people run them; the receiver is a small server
in this process, which answers at once. A row's time is that of the transaction that commits it (``written_at``), so
the commit itself is part of each figure. First rows come one at a time; then as many as asked for at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from statistics import quantiles

from tests.support.buffer_scene import Publisher, open_buffer_scene
from tests.support.delivery_scene import DeliveryScene, Received, Receiver, Reply
from tracelake.embedded.postgres import Cluster

_BATCH = 250


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--singles", type=int, default=100, help="rows one at a time (100)")
    parser.add_argument("--rows", type=int, default=10_000, help="rows at once (10000)")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tracelake-bench-delivery-") as name,
        Cluster(Path(name) / "state", name="state") as cluster,
        open_buffer_scene(cluster, Path(name)) as buffers,
    ):
        scene = DeliveryScene(buffers, Receiver())
        asyncio.run(_run(scene, options.singles, options.rows))
    return 0


async def _run(scene: DeliveryScene, singles: int, rows: int) -> None:
    latencies: list[float] = []

    def receive(received: Received) -> Reply:
        at = datetime.fromisoformat(received.json["timestamp"])
        latencies.append(time.time() - at.timestamp())
        return 200, {}, b""

    scene.receiver.answer = receive
    await scene.receiver.open()
    scene.deploy(scene.delivery())
    process = scene.process("delivery")
    await process.start()
    async with scene.buffers.sinking("sink"):
        publisher = await scene.buffers.publisher()
        await _publish(publisher, "warm", 50)
        await _until(latencies, 50)
        latencies.clear()
        for number in range(singles):
            await _publish(publisher, f"one-{number}", 1)
            await _until(latencies, number + 1)
        _say("one at a time", latencies, {})
        latencies.clear()
        began = time.monotonic()
        await asyncio.gather(
            *(_publish(publisher, f"many-{start}", _BATCH) for start in range(0, rows, _BATCH))
        )
        await _until(latencies, rows)
        took = time.monotonic() - began
        _say("at once", latencies, {"seconds": round(took, 2), "per_second": round(rows / took)})
    await process.close()
    await scene.receiver.close()
    await scene.buffers.close()


async def _publish(publisher: Publisher, name: str, count: int) -> None:
    await publisher.publish(
        *(
            {"key": f"{name}-{each}", "note": "a transfer", "severity": "info", "payload": {"n": each}}
            for each in range(count)
        )
    )


async def _until(latencies: list[float], count: int) -> None:
    deadline = time.monotonic() + 300
    while len(latencies) < count:
        assert time.monotonic() < deadline, f"only {len(latencies)} of {count} arrived"
        await asyncio.sleep(0.001)


def _say(what: str, latencies: list[float], more: dict[str, float]) -> None:
    cuts = quantiles(latencies, n=100)
    figures = {"p50_ms": round(cuts[49] * 1000, 1), "p99_ms": round(cuts[98] * 1000, 1)}
    sys.stdout.write(json.dumps({"rows": what, "count": len(latencies), **figures, **more}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
