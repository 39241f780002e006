"""Progress, saved state and the files of an input, over HTTP: by both spellings, within limits, by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.dispatcher.steps.context import StepContext

UNKNOWN = "7e0c9a52-93d5-4a53-8d0e-0d0c6c6f5f11"
DAG = """
name: one
jobs:
  - { name: src, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: job
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{ from: { job: src, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
    idle_timeout: 5m
"""


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


@pytest.fixture
async def claim(api: Surfaces) -> dict[str, Any]:
    assert (await api.person.post("/v1/dags", content=DAG)).status_code == 201
    await api.person.post("/v1/sources/one/src/trigger", json={"start": 0, "end": 9})
    [task] = (await api.person.get("/v1/tasks")).json()["tasks"]
    return await claimed(api, task["task_id"])


async def claimed(api: Surfaces, task_id: str) -> dict[str, Any]:
    answer = await api.worker.post("/internal/task-claim", json={"task_id": task_id, "worker_id": "w"})
    found: dict[str, Any] = answer.json()
    assert found["status"] == "Claimed"
    return found


def fence(claim: dict[str, Any]) -> dict[str, Any]:
    return {name: claim[name] for name in ("task_id", "attempt", "lease_token")}


async def shown(api: Surfaces, claim: dict[str, Any]) -> dict[str, Any]:
    detail: dict[str, Any] = (await api.person.get(f"/v1/tasks/{claim['task_id']}")).json()
    return detail


async def test_progress_by_both_spellings_is_shown_to_people(api: Surfaces, claim: dict[str, Any]) -> None:
    said = {"rows": 7, "share": 0.5, "stage": "read", "done": False, "left": None}
    answer = await api.worker.post("/internal/heartbeat", json=fence(claim) | {"progress": said})
    assert answer.status_code == 200, answer.text
    assert (await shown(api, claim))["progress"] == said
    headers = api.task(claim["capability_token"])
    own = fence(claim) | {"progress": {"rows": 8}}
    assert (await api.internal.post("/v1/task/heartbeat", json=own, headers=headers)).status_code == 200
    [listed] = (await api.person.get("/v1/tasks", params={"status": "Running"})).json()["tasks"]
    assert listed["progress"] == {"rows": 8}


@pytest.mark.parametrize(
    ("progress", "field"),
    [
        ({"a": "x" * 4096}, "progress"),
        ({f"k{n}": n for n in range(500)}, "progress"),
        ({"a": {"deep": 1}}, "progress[...]"),
        ({"a": [1]}, "progress[...]"),
        ({"a": "\0"}, "progress.a"),
        ([], "progress"),
        ("half", "progress"),
    ],
)
async def test_progress_that_is_not_small_and_flat_is_refused_and_extends_nothing(
    api: Surfaces, claim: dict[str, Any], progress: Any, field: str
) -> None:
    before = await shown(api, claim)
    headers = api.task(claim["capability_token"])
    for client, path, more in (
        (api.worker, "/internal/heartbeat", {}),
        (api.internal, "/v1/task/heartbeat", headers),
    ):
        answer = await client.post(path, json=fence(claim) | {"progress": progress}, headers=more)
        assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
    assert await shown(api, claim) == before


async def test_a_saved_state_is_in_the_next_payload(api: Surfaces, claim: dict[str, Any]) -> None:
    assert (claim["task"]["state"], claim["task"]["idle_timeout_seconds"]) == (None, 300)
    state = {"cursor": 5, "text": "x" * 65_000}
    answer = await api.worker.post("/internal/task-state", json=fence(claim) | {"state": state})
    assert (answer.status_code, answer.json()) == (200, {"task_id": claim["task_id"], "attempt": 1})
    assert (await shown(api, claim))["state"] == state
    fetched = await api.worker.get("/internal/task-fetch", params={"task_id": claim["task_id"]})
    assert fetched.json()["task"]["state"] == state
    await api.worker.post("/internal/task-complete", json=fence(claim) | {"status": "Released"})
    again = await claimed(api, claim["task_id"])
    assert again["task"]["state"] == state
    stale = await api.worker.post("/internal/task-state", json=fence(claim) | {"state": 1})
    assert (stale.status_code, stale.json()["reason"]) == (409, "StaleAttempt")
    forged = fence(again) | {"lease_token": UNKNOWN, "state": 1}
    answer = await api.worker.post("/internal/task-state", json=forged)
    assert (answer.status_code, answer.json()["reason"]) == (409, "StaleLease")
    strange = fence(again) | {"task_id": UNKNOWN, "state": 1}
    answer = await api.worker.post("/internal/task-state", json=strange)
    assert (answer.status_code, answer.json()["reason"]) == (404, "UnknownTask")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'"' + b"x" * 65_536 + b'"', 422),
        (b'{"a": "\\u0000"}', 422),
        (b"1e400", 422),
        (b"9" * 10_000, 422),
        (b"[" * 30_000 + b"]" * 30_000, 400),
        (b'"\\ud800 and more"', 400),
        (b"NaN", 400),
    ],
)
async def test_a_state_that_cannot_be_kept_is_refused(
    api: Surfaces, claim: dict[str, Any], body: bytes, status: int
) -> None:
    head = b'{"task_id": "%s", "attempt": 1, "lease_token": "%s", "state": ' % (
        claim["task_id"].encode(),
        claim["lease_token"].encode(),
    )
    answer = await api.worker.post("/internal/task-state", content=head + body + b"}")
    assert answer.status_code == status, answer.text
    if status == 422:
        assert answer.json()["errors"][0]["field"].startswith("state")
    assert (await shown(api, claim))["state"] is None


async def test_a_state_must_be_said(api: Surfaces, claim: dict[str, Any]) -> None:
    answer = await api.worker.post("/internal/task-state", json=fence(claim))
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "state")


async def test_an_input_without_files_says_its_storage(api: Surfaces, claim: dict[str, Any]) -> None:
    asked = {"task_id": claim["task_id"], "attempt": 1, "input_index": 0}
    answer = await api.worker.get("/internal/task-inputs", params=asked)
    assert (answer.status_code, answer.json()) == (200, {"storage": "none", "files": [], "next": None})
    for changed, status, reason in (
        ({"input_index": 1}, 404, "UnknownInput"),
        ({"task_id": UNKNOWN}, 404, "UnknownTask"),
        ({"attempt": 2}, 409, "StaleAttempt"),
    ):
        answer = await api.worker.get("/internal/task-inputs", params=asked | changed)
        assert (answer.status_code, answer.json()["reason"]) == (status, reason)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"task_id": "x"}, "task_id"),
        ({"attempt": "0"}, "attempt"),
        ({"input_index": "-1"}, "input_index"),
        ({"input_index": str(2**63)}, "input_index"),
        ({"after": ""}, "after"),
        ({"after": "1"}, "after"),
        ({"after": "9999999999999999999-1"}, "after"),
        ({"colour": "red"}, "colour"),
    ],
)
async def test_a_list_of_inputs_is_refused_by_name(
    api: Surfaces, changed: dict[str, str], field: str
) -> None:
    asked = {"task_id": UNKNOWN, "attempt": "1", "input_index": "0"} | changed
    answer = await api.worker.get("/internal/task-inputs", params=asked)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)
