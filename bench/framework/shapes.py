"""The claim endpoint's request and response, the same bytes for every candidate.

The reply is about 1.2 KiB, most of it the task's payload and a token of the size of a real ES256 capability.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec

TOKEN = "measured-worker-token"
TASK_ID = UUID("018f6f0e-0000-7000-8000-000000000001")
DSN = os.environ.get("FRAMEWORK_BENCH_DSN")
QUERY = "SELECT attempt, lease_token, config FROM task WHERE task_id = $1"
UUID_A = UUID("018f6f0e-aaaa-7000-8000-000000000002")
EXPIRES = datetime(2030, 1, 1, tzinfo=UTC)
CAPABILITY = "eyJhbGciOiJFUzI1NiIsImtpZCI6IjEifQ." + "c" * 420 + "." + "s" * 86
CONFIG: dict[str, Any] = {"chain_id": 143, "rpc_pool": "main", "start_block": 0, "verify": "full"}


class ClaimRequest(msgspec.Struct, forbid_unknown_fields=True):
    task_id: UUID
    worker_id: str
    claim_key: str | None = None


class Job(msgspec.Struct):
    dag_name: str
    name: str


class Input(msgspec.Struct):
    dataset_uuid: UUID
    dataset_version: int
    revision: int
    dataset: str | None
    storage: str
    partition_key: str
    start: int
    end: int


class Output(msgspec.Struct):
    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: int
    storage: str
    staging: str


class Task(msgspec.Struct):
    task_id: UUID
    attempt: int
    epoch: int
    job: Job
    operator: str
    config: dict[str, Any]
    inputs: list[Input]
    outputs: list[Output]


class Claimed(msgspec.Struct):
    status: str
    attempt: int
    lease_token: UUID
    lease_expires_at: datetime
    capability_token: str
    task: Task


def task_fields(attempt: int, config: dict[str, Any]) -> dict[str, Any]:
    """The payload as plain values, for each framework to build its own models from."""
    source = {
        "dataset_uuid": UUID_A,
        "dataset_version": 3,
        "revision": 1,
        "dataset": "blocks",
        "storage": "postgres",
        "partition_key": "1000-1999",
        "start": 1000,
        "end": 1999,
    }
    target = {
        "output_index": 0,
        "name": "blocks",
        "dataset_uuid": UUID_A,
        "dataset_version": 3,
        "storage": "parquet",
        "staging": f"objects/staging/{TASK_ID}/{attempt}/77/",
    }
    return {
        "task_id": TASK_ID,
        "attempt": attempt,
        "epoch": 77,
        "job": {"dag_name": "monad", "name": "compact"},
        "operator": "parquet_compact",
        "config": config,
        "inputs": [source],
        "outputs": [target],
    }


def claimed(attempt: int, lease_token: UUID, config: dict[str, Any]) -> Claimed:
    """The reply of the msgspec candidates."""
    fields = task_fields(attempt, config)
    fields["job"] = Job(**fields["job"])
    fields["inputs"] = [Input(**item) for item in fields["inputs"]]
    fields["outputs"] = [Output(**item) for item in fields["outputs"]]
    return Claimed("Claimed", attempt, lease_token, EXPIRES, CAPABILITY, Task(**fields))
