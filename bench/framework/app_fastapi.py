"""FastAPI: pydantic models in and out, the worker header checked by a dependency."""

from __future__ import annotations

from datetime import datetime
from hmac import compare_digest
from typing import Annotated, Any
from uuid import UUID

from fastapi import Depends, FastAPI, Header, HTTPException
from pydantic import BaseModel, ConfigDict

from bench.framework.lookup import Lookup
from bench.framework.shapes import CAPABILITY, EXPIRES, TOKEN, task_fields

lookup = Lookup()
app = FastAPI()


class ClaimRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    task_id: UUID
    worker_id: str
    claim_key: str | None = None


class Job(BaseModel):
    dag_name: str
    name: str


class Input(BaseModel):
    dataset_uuid: UUID
    dataset_version: int
    revision: int
    dataset: str | None
    storage: str
    partition_key: str
    start: int
    end: int


class Output(BaseModel):
    output_index: int
    name: str
    dataset_uuid: UUID
    dataset_version: int
    storage: str
    staging: str


class Task(BaseModel):
    task_id: UUID
    attempt: int
    epoch: int
    job: Job
    operator: str
    config: dict[str, Any]
    inputs: list[Input]
    outputs: list[Output]


class Claimed(BaseModel):
    status: str
    attempt: int
    lease_token: UUID
    lease_expires_at: datetime
    capability_token: str
    task: Task


async def known_worker(x_trace_worker_token: Annotated[str, Header()] = "") -> None:
    if not compare_digest(x_trace_worker_token, TOKEN):
        raise HTTPException(401)


@app.post("/internal/task-claim", dependencies=[Depends(known_worker)])
async def claim(data: ClaimRequest) -> Claimed:
    attempt, lease_token, config = await lookup.find(data.task_id)
    return Claimed(
        status="Claimed",
        attempt=attempt,
        lease_token=lease_token,
        lease_expires_at=EXPIRES,
        capability_token=CAPABILITY,
        task=Task(**task_fields(attempt, config)),
    )
