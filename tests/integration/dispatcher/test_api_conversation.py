"""The whole conversation over HTTP: deploy, trigger, claim, heartbeat, complete, see the downstream task."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.dispatcher.steps.context import StepContext

UNKNOWN = "7e0c9a52-93d5-4a53-8d0e-0d0c6c6f5f11"
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


async def test_a_misspelt_operator_is_a_warning_of_plan_and_deploy_with_its_place(api: Surfaces) -> None:
    assert (await deployed(api))["warnings"] == []
    text = CHAIN.replace("operator: noop", "operator: nooop", 1)
    for path in ("/v1/dags/plan", "/v1/dags"):
        answer = await api.person.post(path, content=text)
        assert answer.status_code in (200, 201), answer.text
        [warning] = answer.json()["warnings"]
        assert (warning["line"], warning["field"]) == (8, "jobs[1].operator")
        assert "did you mean noop?" in warning["message"]


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


async def test_the_same_file_again_is_the_same_version(api: Surfaces) -> None:
    first = await deployed(api)
    again = await api.person.post("/v1/dags", content=CHAIN, headers={"content-type": "text/x-anything"})
    assert (again.status_code, again.json()) == (200, first)
    [dag] = (await api.person.get("/v1/dags")).json()["dags"]
    assert (dag["dag_name"], dag["dag_version"]) == ("chain", 1)
    assert [job["name"] for job in dag["jobs"]] == ["first", "second", "src"]


async def test_a_plan_says_what_would_change_and_changes_nothing(api: Surfaces) -> None:
    plan = (await api.person.post("/v1/dags/plan", content=CHAIN)).json()
    assert {job["kind"] for job in plan["jobs"]} == {"added"}
    assert (await api.person.get("/v1/dags")).json() == {"dags": [], "next": None}
    await deployed(api)
    assert (await api.person.post("/v1/dags/plan", content=CHAIN)).json()["changes_nothing"] is True


async def test_batches_answer_each_entry_on_its_own(api: Surfaces) -> None:
    await deployed(api)
    task_id = await triggered(api)
    claims = [{"task_id": id_, "worker_id": "w1"} for id_ in (task_id, UNKNOWN)]
    answer = await api.worker.post("/internal/task-claim-batch", json={"claims": claims})
    good, bad = answer.json()["claims"]
    assert (good["status"], bad["status"], bad["reason"]) == ("Claimed", "NotClaimed", "NotFound")
    stale = fence(good) | {"attempt": 7, "status": "Failed"}
    failed = fence(good) | {"status": "Failed"}
    answer = await api.worker.post(
        "/internal/task-complete-batch", json={"completions": [stale, failed, {**failed, "task_id": UNKNOWN}]}
    )
    refused, accepted, unknown = answer.json()["completions"]
    assert (refused["code"], refused["reason"]) == (409, "StaleAttempt")
    assert (accepted["code"], accepted["accepted"]["task_status"]) == (200, "Queued")
    assert (unknown["code"], unknown["reason"]) == (404, "UnknownTask")


async def test_a_canceled_task_says_so_everywhere(api: Surfaces) -> None:
    await deployed(api)
    claim = await claimed(api, await triggered(api))
    path = f"/v1/tasks/{claim['task_id']}"
    assert (await api.person.post(f"{path}/cancel")).json()["status"] == "Canceled"
    beat = await api.worker.post("/internal/heartbeat", json=fence(claim))
    assert (beat.status_code, beat.json()["cancel"]) == (200, True)
    late = await api.worker.post("/internal/task-complete", json=fence(claim) | {"status": "Completed"})
    assert (late.status_code, late.json()["reason"]) == (409, "Canceled")
    assert (await api.person.post(f"{path}/retry")).json()["status"] == "Queued"
    assert (await api.person.get(path)).json()["status"] == "Queued"
    assert (await api.person.post(f"/v1/tasks/{UNKNOWN}/cancel")).status_code == 404


async def test_a_task_shows_its_attempts_inputs_outputs_and_events(api: Surfaces) -> None:
    await deployed(api)
    claim = await claimed(api, await triggered(api))
    failed = fence(claim) | {"status": "Failed", "error_message": "the node is away"}
    await api.worker.post("/internal/task-complete", json=failed)
    await api.person.post(f"/v1/tasks/{claim['task_id']}/retry")
    claim = await claimed(api, claim["task_id"])
    done = fence(claim) | {"status": "Completed", "outputs": [{"output_index": 0, "start": 0, "end": 99}]}
    assert (await api.worker.post("/internal/task-complete", json=done)).status_code == 200
    task = (await api.person.get(f"/v1/tasks/{claim['task_id']}")).json()
    assert (task["status"], task["attempt"], task["waiting_for"]) == ("Completed", 2, None)
    assert [(each["attempt"], each["outcome"]) for each in task["attempts"]] == [
        (2, "Completed"),
        (1, "Failed"),
    ]
    assert task["attempts"][1]["error_message"] == "the node is away"
    assert [(each["start"], each["end"], each["trigger"]) for each in task["inputs"]] == [(0, 99, True)]
    [output] = task["outputs"]
    assert (output["dataset"], output["partitions"][0]["partition_key"]) == ("firsts", "0-99")
    assert [(each["start"], each["end"], each["state"]) for each in task["events"]] == [(0, 99, "counted")]


async def test_a_queued_task_says_what_it_waits_for(api: Surfaces) -> None:
    await deployed(api)
    one = await triggered(api)

    async def reason(task_id: str) -> str:
        return (await api.person.get(f"/v1/tasks/{task_id}")).json()["waiting_for"]["reason"]

    assert await reason(one) == "Worker"
    await api.person.post("/v1/jobs/chain/first/pause")
    assert await reason(one) == "JobPaused"
    refused = await api.worker.post("/internal/task-claim", json={"task_id": one, "worker_id": "w"})
    assert refused.json()["reason"] == "NotReady"
    await api.person.post("/v1/jobs/chain/first/resume")
    two = await triggered(api, 100, 199)
    claim = await claimed(api, one)
    assert await reason(two) == "CapFull"
    await api.worker.post("/internal/task-complete", json=fence(claim) | {"status": "Failed"})
    assert await reason(one) == "RetryTime"
    assert await reason(two) == "Worker"


async def test_a_list_says_the_same_and_names_the_worker_that_is_missing(api: Surfaces) -> None:
    await deployed(api)
    one = await triggered(api)

    async def waits(task_id: str) -> dict:
        [listed] = [each for each in await tasks(api, job="first") if each["task_id"] == task_id]
        assert listed["waiting_for"] == (await api.person.get(f"/v1/tasks/{task_id}")).json()["waiting_for"]
        return listed["waiting_for"]

    assert "none is running (tracelake worker --runtime ecs_python)" in (await waits(one))["message"]
    body = {"worker_id": "w1", "runtime": "ecs_python", "slots": 2}
    answer = await api.worker.post("/internal/worker", json=body)
    assert (answer.status_code, answer.json()["again_in_seconds"]) == (200, 10.0)
    assert "1 worker serves it" in (await waits(one))["message"]
    claim = await claimed(api, one)
    assert claim["status"] == "Claimed"
    [running] = [each for each in await tasks(api, job="first") if each["task_id"] == one]
    assert running["waiting_for"] is None
    await api.worker.post("/internal/task-complete", json=fence(claim) | {"status": "Released"})
    await api.worker.post("/internal/worker", json={**body, "leaving": True})
    assert "none is running" in (await waits(one))["message"]
    await api.person.post("/v1/jobs/chain/first/pause")
    found = await waits(one)
    assert found["reason"] == "JobPaused"
    assert found["since"] is not None
    assert "its job is paused by " in found["message"]


async def test_registrations_are_for_workers_and_bounded(api: Surfaces) -> None:
    body = {"worker_id": "w1", "runtime": "ecs_python", "slots": 2}
    assert (await api.internal.post("/internal/worker", json=body)).status_code == 401
    assert (await api.person.post("/internal/worker", json=body)).status_code == 404
    for wrong in ({"slots": -1}, {"slots": 10**9}, {"worker_id": ""}, {"runtime": "x" * 500}, {"more": 1}):
        answer = await api.worker.post("/internal/worker", json={**body, **wrong})
        assert answer.status_code in (400, 422), wrong


async def test_only_manual_sources_can_be_triggered(api: Surfaces) -> None:
    await deployed(api)
    answer = await api.person.post("/v1/sources/chain/first/trigger", json={"cursor": 1})
    assert (answer.status_code, answer.json()["reason"]) == (409, "NotManual")
    answer = await api.person.post("/v1/sources/chain/nobody/trigger", json={"cursor": 1})
    assert (answer.status_code, answer.json()["reason"]) == (404, "UnknownJob")
    answer = await api.person.post("/v1/sources/chain/src/trigger", json={})
    assert answer.status_code == 422


async def test_a_page_of_tasks_ends_where_the_next_begins(api: Surfaces) -> None:
    await deployed(api)
    made = [await triggered(api, start, start) for start in range(5)]
    for query in (
        {},
        {"dag": "chain"},
        {"job": "first"},
        {"status": "Queued"},
        {"dag": "chain", "status": "Queued"},
    ):
        seen, after = [], None
        while True:
            params = {"limit": 2, **query} | ({"after": after} if after else {})
            page = (await api.person.get("/v1/tasks", params=params)).json()
            seen += [task["task_id"] for task in page["tasks"]]
            assert len(page["tasks"]) <= 2
            if (after := page["next"]) is None:
                break
        assert seen == made[::-1], query
    await api.person.post(f"/v1/tasks/{made[0]}/cancel")
    claim = await claimed(api, made[1])
    for status, found in (("Running", [made[1]]), ("Canceled", [made[0]]), ("Failed", []), ("Completed", [])):
        assert [task["task_id"] for task in await tasks(api, status=status)] == found
    await api.worker.post(
        "/internal/task-complete", json=fence(claim) | {"status": "Failed", "retryable": False}
    )
    assert [task["task_id"] for task in await tasks(api, status="Failed", job="first")] == [made[1]]
    claim = await claimed(api, made[2])
    done = fence(claim) | {"status": "Completed", "outputs": [{"output_index": 0, "start": 2, "end": 2}]}
    await api.worker.post("/internal/task-complete", json=done)
    assert [task["task_id"] for task in await tasks(api, status="Completed")] == [made[2]]
    assert await tasks(api, dag="nobody") == []


async def test_datasets_are_found_by_name_and_by_uuid(api: Surfaces) -> None:
    output = (await deployed(api))["jobs"][1]["outputs"][0]
    by_name = (await api.person.get("/v1/datasets/firsts")).json()
    assert by_name == (await api.person.get(f"/v1/datasets/{output['dataset_uuid']}")).json()
    assert (by_name["dataset_version"], by_name["partitions"]) == (output["dataset_version"], 0)
    seen, after = [], None
    while True:
        params = {"limit": 1} | ({"after": after} if after else {})
        page = (await api.person.get("/v1/datasets", params=params)).json()
        seen += [each["job"] for each in page["datasets"]]
        if (after := page["next"]) is None:
            break
    assert sorted(seen) == ["first", "second", "src"]
    for path in ("/v1/datasets/nobody", f"/v1/datasets/{UNKNOWN}", "/v1/datasets/nobody/partitions"):
        assert (await api.person.get(path)).json()["reason"] == "UnknownDataset"


async def test_partitions_are_paged_by_block(api: Surfaces) -> None:
    await deployed(api)
    for start in (20, 0, 10):
        await triggered(api, start, start + 9)
    source = (await api.person.get("/v1/tasks", params={"limit": 1})).json()["tasks"][0]["task_id"]
    uuid = (await api.person.get(f"/v1/tasks/{source}")).json()["inputs"][0]["dataset_uuid"]
    path = f"/v1/datasets/{uuid}/partitions"
    first = (await api.person.get(path, params={"limit": 2})).json()
    assert [each["partition_key"] for each in first["partitions"]] == ["0-9", "10-19"]
    rest = (await api.person.get(path, params={"limit": 2, "after": first["next"]})).json()
    assert ([each["partition_key"] for each in rest["partitions"]], rest["next"]) == (["20-29"], None)
    assert (await api.person.get(f"/v1/datasets/{uuid}")).json()["partitions"] == 3
    [only] = (await api.person.get(f"{path}?start=12&end=19&details=true")).json()["partitions"]
    assert (only["partition_key"], only["details"]) == ("10-19", [])


async def test_given_up_deliveries_are_shown_and_replayed(api: Surfaces, ctx: StepContext) -> None:
    await deployed(api)
    task_id = await triggered(api)
    give_up = "UPDATE outbox SET failed_at = tl_now(), last_error = 'no queue' RETURNING outbox_id"
    rows = await ctx.db.run(lambda tx: tx.fetch(give_up))
    [failed] = (await api.person.get("/v1/outbox/failed")).json()["failed"]
    assert (failed["task_id"], failed["last_error"]) == (task_id, "no queue")
    none = await api.person.post("/v1/outbox/replay", json={"outbox_ids": [rows[0]["outbox_id"] + 1]})
    assert none.json() == {"replayed": 0}
    assert (await api.person.post("/v1/outbox/replay")).json() == {"replayed": 1}
    assert (await api.person.get("/v1/outbox/failed")).json() == {"failed": []}


async def test_a_waiting_update_shows_what_it_would_read_now(api: Surfaces) -> None:
    update = CHAIN.replace("name: chain", "name: updates").replace("PerPartition", "PerUpdate")
    assert (await api.person.post("/v1/dags", content=update)).status_code == 201
    for cursor in (5, 9):
        await api.person.post("/v1/sources/updates/src/trigger", json={"cursor": cursor})
    [waiting] = (await api.person.get("/v1/tasks", params={"dag": "updates"})).json()["tasks"]
    detail = (await api.person.get(f"/v1/tasks/{waiting['task_id']}")).json()
    assert (detail["inputs"][0]["after"], detail["inputs"][0]["upto"]) == (-1, 9)
