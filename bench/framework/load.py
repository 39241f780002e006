"""A load generator that costs little: keep-alive sockets, one request in flight on each, no HTTP library.

Run as a process of its own: ``python -m bench.framework.load PORT SECONDS CONNECTIONS`` prints one JSON line.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time

import uvloop

from bench.framework.shapes import TASK_ID, TOKEN


def request(task_id: str = str(TASK_ID), token: str = TOKEN) -> bytes:
    body = json.dumps({"task_id": task_id, "worker_id": "worker-1", "claim_key": "c-1"}).encode()
    head = (
        "POST /internal/task-claim HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"X-Trace-Worker-Token: {token}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, message: bytes
) -> tuple[int, int]:
    """Status and body length of one reply."""
    writer.write(message)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    at = head.index(b"content-length:") + 15
    length = int(head[at : head.index(b"\r\n", at)])
    await reader.readexactly(length)
    return int(head[9:12]), length


async def connection(port: int, until: float, latencies: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    message = request()
    while (begun := time.perf_counter()) < until:
        status, _ = await exchange(reader, writer, message)
        if status != 200:
            raise RuntimeError(f"the claim answered {status}")
        latencies.append(time.perf_counter() - begun)
    writer.close()


async def run(port: int, seconds: float, connections: int) -> dict[str, float]:
    latencies: list[float] = []
    begun = time.perf_counter()
    await asyncio.gather(*(connection(port, begun + seconds, latencies) for _ in range(connections)))
    elapsed = time.perf_counter() - begun
    return {
        "requests": len(latencies),
        "requests_per_second": len(latencies) / elapsed,
        "p50_ms": statistics.median(latencies) * 1000,
        "p99_ms": statistics.quantiles(latencies, n=100)[98] * 1000,
    }


if __name__ == "__main__":
    outcome = uvloop.run(run(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
    print(json.dumps(outcome))
