"""The whole conversation over HTTP: deploy, trigger, claim, heartbeat, complete, see the downstream task."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tracelake.dispatcher.steps.context import StepContext
from tracelake.testing.surfaces import Surfaces, open_surfaces

CHAIN = """
name: chain
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: first
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
    scaling: { max_concurrency: 1 }
  - name: second
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: first, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
publish:
  firsts: { from: { job: first, output: 0 } }
"""


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


async def deployed(api: Surfaces) -> dict:
    answer = await api.person.post("/v1/dags", content=CHAIN)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def triggered(api: Surfaces, start: int = 0, end: int = 99) -> str:
    answer = await api.person.post("/v1/sources/chain/src/trigger", json={"start": start, "end": end})
    assert answer.status_code == 202, answer.text
    assert answer.json()["tasks_created"] == 1
    return (await tasks(api, job="first"))[0]["task_id"]


async def tasks(api: Surfaces, **query: object) -> list[dict]:
    answer = await api.person.get("/v1/tasks", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()["tasks"]


async def claimed(api: Surfaces, task_id: str) -> dict:
    answer = await api.worker.post("/internal/task-claim", json={"task_id": task_id, "worker_id": "w1"})
    assert answer.json()["status"] == "Claimed", answer.text
    return answer.json()


def fence(claim: dict) -> dict:
    return {name: claim[name] for name in ("task_id", "attempt", "lease_token")}


async def test_a_task_runs_from_deploy_to_the_downstream_task(api: Surfaces) -> None:
    first = (await deployed(api))["jobs"][1]["outputs"][0]
    assert first["dataset"] == "firsts"
    task_id = await triggered(api)
    claim = await claimed(api, task_id)
    beat = await api.worker.post("/internal/heartbeat", json=fence(claim))
    assert (beat.status_code, beat.json()["cancel"], beat.json()["pause"]) == (200, False, False)
    output = {"output_index": 0, "start": 0, "end": 99, "row_count": 0}
    done = {**fence(claim), "status": "Completed", "outputs": [output]}
    answer = await api.worker.post("/internal/task-complete", json=done)
    assert (answer.status_code, answer.json()["task_status"]) == (200, "Completed")
    again = await api.worker.post("/internal/task-complete", json=done)
    assert (again.status_code, again.json()) == (200, answer.json())
    [downstream] = await tasks(api, job="second", status="Queued")
    fetched = await api.worker.get("/internal/task-fetch", params={"task_id": downstream["task_id"]})
    assert fetched.json()["task"]["inputs"][0]["dataset_uuid"] == first["dataset_uuid"]
