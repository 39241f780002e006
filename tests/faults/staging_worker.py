"""A worker process that claims one task, stages a file, and completes it when told to on stdin.

    python staging_worker.py URL TOKEN TASK_ID NAME

It heartbeats all the while, prints the claim once the file is there, and at the end the status and the reason
of its completion.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx


def main(url: str, token: str, task_id: str, name: str) -> None:
    with httpx.Client(
        base_url=url, headers={"X-Trace-Worker-Token": token}, timeout=10, trust_env=False
    ) as http:
        claim = http.post("/internal/task-claim", json={"task_id": task_id, "worker_id": name}).json()
        fence = {key: claim[key] for key in ("task_id", "attempt", "lease_token")}
        done = threading.Event()
        beating = threading.Thread(target=beat, args=(url, token, fence, done))
        beating.start()
        output = stage(claim, name)
        say({"claim": claim, "output": output})
        sys.stdin.readline()
        answer = http.post(
            "/internal/task-complete", json={**fence, "status": "Completed", "outputs": [output]}
        )
        say({"status": answer.status_code, "reason": answer.json().get("reason")})
        done.set()
        beating.join()


def beat(url: str, token: str, fence: dict[str, Any], done: threading.Event) -> None:
    with httpx.Client(
        base_url=url, headers={"X-Trace-Worker-Token": token}, timeout=10, trust_env=False
    ) as http:
        while not done.wait(0.3):
            http.post("/internal/heartbeat", json=fence)


def stage(claim: dict[str, Any], name: str) -> dict[str, Any]:
    """A file of the attempt's own in its staging place, and the output that reports it."""
    read, output = claim["task"]["inputs"][0], claim["task"]["outputs"][0]
    folder = Path(urlsplit(output["staging"]).path)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{output['name']}_{read['start']}_{read['end']}.parquet"
    content = f"rows of {name}".encode()
    file.write_bytes(content)
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    listed = {
        "location": f"{output['staging'].removesuffix('/')}/{file.name}",
        "rows": 1,
        "bytes": len(content),
        "content_hash": digest,
    }
    return {
        "output_index": 0,
        "start": read["start"],
        "end": read["end"],
        "row_count": 1,
        "location": output["staging"],
        "manifest": {"files": [listed], "schema_hash": digest},
    }


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
