"""A worker in its smallest form, for the demo: polls its queue, claims, completes no-ops, acks.

    python -m tracelake.dev.demo_worker DEV_JSON NAME [--stall-after N]

``--stall-after`` makes it hang for good in the middle of its N-th task, as a worker does that has lost its
machine: its lease runs out, and somebody else does the work.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import httpx

from tracelake.queue.base import Message
from tracelake.queue.postgres import PostgresQueue

BATCH = 10
VISIBILITY_SECONDS = 30.0


async def work(stack: dict[str, Any], name: str, stall_after: int | None) -> None:
    queue = await PostgresQueue.open(stack["queue_dsn"])
    headers = {"X-Trace-Worker-Token": stack["worker_token"]}
    done = 0
    async with httpx.AsyncClient(base_url=stack["internal_url"], headers=headers, timeout=30) as dispatcher:
        while True:
            messages = await queue.receive(
                "ecs_python", max_messages=BATCH, wait_seconds=5, visibility_seconds=VISIBILITY_SECONDS
            )
            claims = await _claim(dispatcher, name, messages)
            if stall_after is not None and done + len(claims) > stall_after:
                await asyncio.Event().wait()
            await _complete(dispatcher, claims)
            done += len(claims)
            if messages:
                await queue.ack([message.receipt for message in messages])


async def _claim(dispatcher: httpx.AsyncClient, name: str, messages: list[Message]) -> list[dict[str, Any]]:
    if not messages:
        return []
    claims = [
        {"task_id": message.body["task_id"], "worker_id": name, "claim_key": message.receipt}
        for message in messages
    ]
    answer = await _call(dispatcher, "/internal/task-claim-batch", {"claims": claims})
    return [claim for claim in answer["claims"] if claim["status"] == "Claimed"]


async def _complete(dispatcher: httpx.AsyncClient, claims: list[dict[str, Any]]) -> None:
    completions = []
    for claim in claims:
        scope = claim["task"]["inputs"][0]
        outputs = [{"output_index": 0, "start": scope["start"], "end": scope["end"], "row_count": 0}]
        completions.append(
            {
                "task_id": claim["task"]["task_id"],
                "attempt": claim["attempt"],
                "lease_token": claim["lease_token"],
                "status": "Completed",
                "outputs": outputs,
            }
        )
    if completions:
        await _call(dispatcher, "/internal/task-complete-batch", {"completions": completions})


async def _call(dispatcher: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Until it is answered: a Dispatcher that is away comes back, and every call may be repeated."""
    pause = 0.1
    while True:
        try:
            answer = await dispatcher.post(path, json=body)
            if answer.status_code < 500:
                answer.raise_for_status()
                parsed: dict[str, Any] = answer.json()
                return parsed
        except httpx.TransportError:
            pass
        await asyncio.sleep(pause)
        pause = min(2.0, pause * 2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("dev_json", type=Path)
    parser.add_argument("name")
    parser.add_argument("--stall-after", type=int)
    options = parser.parse_args()
    stack = json.loads(options.dev_json.read_text())
    asyncio.run(work(stack, options.name, options.stall_after))


if __name__ == "__main__":
    main()
