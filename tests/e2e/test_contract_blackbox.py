"""The contract as a stranger reads it: a running stack, its handle, and nothing but HTTP."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import jwt
import pytest

from tests.support.dev_stack import DevStack, eventually

pytestmark = pytest.mark.xdist_group("cli")

_NUMBERS = count()

CHAIN = """
name: {name}
defaults: {{ max_attempts: 2, heartbeat_timeout_seconds: 60, retry: {{ base: 1s, max: 1s }} }}
jobs:
  - {{ name: ask, activation: source, runtime: dispatcher, source: {{ kind: manual }}, outputs: 1 }}
  - name: first
    activation: reactive
    runtime: ecs_python
    operator: {operator}
    inputs: [{{ from: {{ job: ask, output: 0 }} }}]
    outputs: [{{ name: rows, storage: {storage} }}]
    execution_strategy: PerPartition
    heartbeat_timeout_seconds: {lease}
  - name: second
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: first, output: 0 }} }}]
    outputs: 1
    execution_strategy: PerPartition
publish:
  {name}_rows: {{ from: {{ job: first, output: 0 }} }}
"""

FOLLOWER = """
name: {name}
defaults: {{ retry: {{ base: 1s, max: 1s }} }}
jobs:
  - {{ name: follow, activation: source, runtime: ecs_python, operator: noop, source: {{ kind: always_on }} }}
  - name: sum
    activation: reactive
    runtime: ecs_python
    operator: noop
    inputs: [{{ from: {{ job: follow, output: 0 }}, where: "severity = 'critical'" }}]
    outputs: 1
    execution_strategy: PerUpdate
publish:
  {name}_ticks: {{ from: {{ job: follow, output: 0 }} }}
"""

WRONG_ON_LINES = """name: wrong
jobs:
  - { name: ask, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - { name: ask, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
  - name: add
    activation: reactive
    runtime: ecs_cobol
    operator: noop
    inputs: [{ from: { job: nobody, output: 0 } }]
    outputs: 1
    execution_strategy: PerPartition
    update_strategy: append
    colour: red
publish:
  Not-A-Name: { from: { job: add, output: 0 } }
"""


@dataclass
class Site:
    user: httpx.Client
    worker: httpx.Client
    bare: httpx.Client
    user_url: str
    internal_url: str

    def deploy(self, template: str, **options: str) -> tuple[str, dict[str, list[dict[str, Any]]]]:
        name = f"bb{next(_NUMBERS)}_{uuid4().hex[:8]}"
        answer = self.user.post("/v1/dags", content=template.format(name=name, **options))
        assert answer.status_code == 201, answer.text
        return name, {job["name"]: job["outputs"] for job in answer.json()["jobs"]}

    def trigger(self, dag: str, start: int, end: int) -> None:
        answer = self.user.post(f"/v1/sources/{dag}/ask/trigger", json={"start": start, "end": end})
        assert answer.status_code == 202, answer.text
        assert answer.json().keys() >= {"event_id", "tasks_created"}

    def tasks(self, dag: str, job: str, status: str | None = None) -> list[dict[str, Any]]:
        asked = {"dag": dag, "job": job} | ({"status": status} if status else {})
        found: list[dict[str, Any]] = self.user.get("/v1/tasks", params=asked).json()["tasks"]
        return found

    def task(self, task_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.user.get(f"/v1/tasks/{task_id}").json()
        return found

    def claim(self, task_id: str, **more: str) -> dict[str, Any]:
        asked = {"task_id": task_id, "worker_id": "stranger", **more}
        answer = self.worker.post("/internal/task-claim", json=asked)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    def claim_when_ready(self, task_id: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            said = self.claim(task_id)
            return said if said["status"] == "Claimed" else None

        return eventually(f"task {task_id} can be claimed", look)

    def beat(self, claim: dict[str, Any], **other: Any) -> httpx.Response:
        return self.worker.post("/internal/heartbeat", json=fence(claim) | other)

    def complete(self, claim: dict[str, Any], status: str = "Completed", **more: Any) -> httpx.Response:
        return self.worker.post("/internal/task-complete", json={**fence(claim), "status": status, **more})

    def say(self, claim: dict[str, Any], *events: dict[str, Any]) -> httpx.Response:
        body = {"task_id": claim["task_id"], "attempt": claim["attempt"], "events": list(events)}
        return self.worker.post("/internal/events", json=body)


def fence(claim: dict[str, Any]) -> dict[str, Any]:
    return {key: claim[key] for key in ("task_id", "attempt", "lease_token")}


def output_of(claim: dict[str, Any], start: int, end: int, **more: Any) -> dict[str, Any]:
    own = claim["task"]["outputs"][0]
    named = {key: own[key] for key in ("output_index", "dataset_uuid", "dataset_version")}
    return {**named, "partition_key": f"{start}-{end}", "start": start, "end": end, **more}


def refused(answer: httpx.Response, code: int, reason: str) -> None:
    assert (answer.status_code, answer.json().get("reason")) == (code, reason), answer.text
    assert answer.headers["content-type"].startswith("application/problem+json")


@pytest.fixture(scope="module")
def site(stack: DevStack) -> Iterator[Site]:
    handle = stack.handle
    with (
        httpx.Client(
            base_url=handle.user_url,
            headers={"Authorization": f"Bearer {handle.user_token}"},
            trust_env=False,
        ) as user,
        httpx.Client(
            base_url=handle.internal_url,
            headers={"X-Trace-Worker-Token": handle.worker_token},
            trust_env=False,
        ) as worker,
        httpx.Client(trust_env=False) as bare,
    ):
        yield Site(user, worker, bare, handle.user_url, handle.internal_url)


def one_task(site: Site, *, lease: str = "60") -> tuple[str, str]:
    dag, _ = site.deploy(CHAIN, operator="noop", storage="none", lease=lease)
    site.trigger(dag, 0, 9)
    [task] = site.tasks(dag, "first")
    return dag, task["task_id"]


def test_the_user_port_knows_no_internal_path_whoever_asks(site: Site) -> None:
    worker = dict(site.worker.headers)
    for path in ("/internal/task-claim", "/internal/jwks/task", "/v1/task/heartbeat", "/v1/task/complete"):
        for method in ("GET", "POST"):
            refused(site.bare.request(method, site.user_url + path, headers=worker), 404, "NotFound")


def test_a_missing_or_wrong_credential_is_401_on_every_surface(site: Site) -> None:
    for url, header in (
        (site.internal_url + "/internal/task-claim", "X-Trace-Worker-Token"),
        (site.internal_url + "/v1/task/heartbeat", "X-Trace-Task-Capability"),
        (site.user_url + "/v1/dags", "Authorization"),
    ):
        for headers in ({}, {header: "Bearer wrong"}):
            answer = site.bare.post(url, json={}, headers=headers)
            assert answer.status_code == 401, answer.text
            assert answer.json()["reason"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"task_id": "not-a-uuid", "attempt": 1, "lease_token": str(uuid4())}, "task_id"),
        ({"task_id": str(uuid4()), "attempt": 2**40, "lease_token": str(uuid4())}, "attempt"),
        ({"task_id": str(uuid4()), "attempt": 1, "lease_token": str(uuid4()), "colour": 1}, "colour"),
        ({"task_id": str(uuid4()), "attempt": 1}, "lease_token"),
    ],
)
def test_a_malformed_request_is_refused_by_the_name_of_its_field(
    site: Site, body: dict[str, Any], field: str
) -> None:
    answer = site.worker.post("/internal/heartbeat", json=body)
    refused(answer, 422, "InvalidRequest")
    assert [error["field"] for error in answer.json()["errors"]] == [field]


def test_a_lost_claim_response_costs_nothing_with_a_claim_key(site: Site) -> None:
    _, task_id = one_task(site)
    first = site.claim(task_id, claim_key="k")
    again = site.claim(task_id, claim_key="k")
    assert fence(again) == fence(first)
    assert site.claim(task_id, claim_key="other")["reason"] == "AlreadyRunning"
    assert site.claim(task_id, worker_id="somebody", claim_key="k")["reason"] == "AlreadyRunning"


@pytest.mark.parametrize("status", ["Completed", "Failed", "Canceled", "Released"])
def test_a_stale_fence_changes_nothing_at_all(site: Site, status: str) -> None:
    dag, task_id = one_task(site)
    claim = site.claim(task_id)
    before = site.task(task_id)
    done = {"outputs": [output_of(claim, 0, 9)]} if status == "Completed" else {}
    refused(site.complete(claim | {"lease_token": str(uuid4())}, status, **done), 409, "StaleLease")
    refused(site.complete(claim | {"attempt": 2}, status, **done), 409, "StaleAttempt")
    refused(site.beat(claim, lease_token=str(uuid4())), 409, "StaleLease")
    assert site.task(task_id) == before
    assert site.tasks(dag, "second") == []


def test_a_repeated_completion_is_answered_like_the_first_and_routed_once(site: Site) -> None:
    dag, task_id = one_task(site)
    claim = site.claim(task_id)
    outputs = [output_of(claim, 0, 9, row_count=0)]
    first, again = (site.complete(claim, outputs=outputs) for _ in range(2))
    assert (first.status_code, again.status_code) == (200, 200)
    assert again.json() == first.json()
    assert len(site.tasks(dag, "second")) == 1
    refused(site.beat(claim), 409, "StaleLease")
    assert site.claim(task_id)["reason"] == "Completed"


def test_release_costs_no_attempt_and_failure_does(site: Site) -> None:
    _, task_id = one_task(site)
    assert site.complete(site.claim(task_id), "Released").json()["task_status"] == "Queued"
    assert site.complete(site.claim(task_id), "Failed", error_message="x").json()["task_status"] == "Queued"
    assert site.claim(task_id)["reason"] == "NotReady"
    assert site.task(task_id)["waiting_for"]["reason"] == "RetryTime"
    last = site.complete(site.claim_when_ready(task_id), "Failed", error_message="y")
    assert last.json()["task_status"] == "Failed"
    assert site.claim(task_id)["reason"] == "Failed"
    assert site.user.post(f"/v1/tasks/{task_id}/retry").status_code == 200
    assert site.claim(task_id)["attempt"] == 4


def test_a_canceled_attempt_hears_of_it_and_can_commit_nothing(site: Site) -> None:
    dag, task_id = one_task(site)
    claim = site.claim(task_id)
    assert site.user.post(f"/v1/tasks/{task_id}/cancel").status_code == 200
    beat = site.beat(claim)
    assert (beat.status_code, beat.json()["cancel"]) == (200, True)
    refused(site.complete(claim, outputs=[output_of(claim, 0, 9)]), 409, "Canceled")
    fetched = site.worker.get("/internal/task-fetch", params={"task_id": task_id})
    assert fetched.json()["status"] == "Canceled"
    unleased = {"task_id": task_id, "status": "Canceled"}
    assert site.worker.post("/internal/task-complete", json=unleased).status_code == 200
    assert site.tasks(dag, "second") == []


def test_a_late_reply_counts_until_a_newer_attempt_is_claimed(site: Site) -> None:
    _, task_id = one_task(site, lease="1")
    claim = site.claim(task_id)
    eventually("the lease is given up", lambda: site.task(task_id)["status"] == "Queued")
    newer = site.claim_when_ready(task_id)
    refused(site.complete(claim, outputs=[output_of(claim, 0, 9)]), 409, "StaleAttempt")
    eventually("so is the next one", lambda: site.task(task_id)["status"] == "Failed")
    assert site.complete(newer, outputs=[output_of(newer, 0, 9)]).json()["task_status"] == "Completed"


def test_the_capability_token_is_verifiable_by_the_published_keys_and_opens_its_own_attempt_only(
    site: Site,
) -> None:
    _, task_id = one_task(site)
    claim = site.claim(task_id)
    token = claim["capability_token"]
    keys = jwt.PyJWKSet.from_dict(site.bare.get(site.internal_url + "/internal/jwks/task").json())
    key = keys[jwt.get_unverified_header(token)["kid"]]
    claims = jwt.decode(token, key, algorithms=["ES256"], options={"verify_aud": False})
    assert (claims["task_id"], claims["attempt"]) == (task_id, 1)
    assert claims["exp"] - claims["iat"] == 600 + 300
    assert claims.keys() >= {"iss", "aud", "sub", "jti", "org_id", "datasets"}
    assert claims["s3"].keys() == {"read", "write", "scratch"}

    def beat(body: dict[str, Any], capability: str) -> httpx.Response:
        headers = {"X-Trace-Task-Capability": capability}
        return site.bare.post(site.internal_url + "/v1/task/heartbeat", json=body, headers=headers)

    assert beat(fence(claim), token).status_code == 200
    refused(beat(fence(claim) | {"lease_token": str(uuid4())}, token), 409, "StaleLease")
    _, other = one_task(site)
    refused(beat(fence(site.claim(other)), token), 403, "NotYourTask")
    head, body, signature = token.split(".")
    forged = ".".join((head, body, ("A" if signature[0] != "A" else "B") + signature[1:]))
    assert beat(fence(claim), forged).status_code == 401


def test_cursor_events_merge_freeze_at_the_claim_and_are_taken_back(site: Site) -> None:
    dag, outputs = site.deploy(FOLLOWER)
    [own] = outputs["follow"]
    ticks = {key: own[key] for key in ("dataset_uuid", "dataset_version")}
    [source] = site.tasks(dag, "follow")
    follow = site.claim(source["task_id"])
    assert site.say(follow, {**ticks, "cursor": 10}, {**ticks, "cursor": 12}).status_code == 200
    assert site.say(follow, {"dataset": f"{dag}_ticks", "cursor": 11}).status_code == 200
    [waiting] = site.tasks(dag, "sum")
    claim = site.claim(waiting["task_id"])
    [read] = claim["task"]["inputs"]
    assert (read["after"], read["upto"], read["where"]) == (-1, 12, "severity = 'critical'")

    assert site.say(follow, {**ticks, "cursor": 20}).status_code == 200
    [next_one] = site.tasks(dag, "sum", "Queued")
    assert site.claim(next_one["task_id"])["reason"] == "NotReady"
    assert site.complete(claim, outputs=[{"output_index": 0, "cursor": 12}]).status_code == 200
    claim = site.claim(next_one["task_id"])
    assert (claim["task"]["inputs"][0]["after"], claim["task"]["inputs"][0]["upto"]) == (12, 20)

    reorg = {**ticks, "id": "reorg", "invalidate": {"start": 6, "end": 20}, "reason": "reorg"}
    assert [site.say(follow, reorg).json()["events"][0]["revision"] for _ in range(2)] == [1, 1]
    refused(site.complete(claim, outputs=[{"output_index": 0, "cursor": 20}]), 409, "InputChanged")
    dataset = site.user.get(f"/v1/datasets/{dag}_ticks").json()
    assert (dataset["revision"], dataset["cursor"]) == (1, 5)
    [read] = site.claim(next_one["task_id"])["task"]["inputs"]
    assert (read["after"], read["revision"], read["invalidation"]["start"]) == (5, 1, 6)


def test_events_are_refused_for_what_is_not_the_tasks_own_or_never_was(site: Site) -> None:
    dag, outputs = site.deploy(FOLLOWER)
    follow = site.claim(site.tasks(dag, "follow")[0]["task_id"])
    foreign = {key: outputs["sum"][0][key] for key in ("dataset_uuid", "dataset_version")}
    refused(site.say(follow, {**foreign, "cursor": 1}), 403, "NotYourDataset")
    unheard = {"dataset_uuid": outputs["follow"][0]["dataset_uuid"], "dataset_version": str(uuid4())}
    refused(site.say(follow, {**unheard, "cursor": 1}), 422, "UnknownVersion")
    assert site.tasks(dag, "sum") == []


def test_an_always_on_source_keeps_its_task_however_often_it_fails(site: Site) -> None:
    dag, _ = site.deploy(FOLLOWER)
    [source] = site.tasks(dag, "follow")
    for attempt in (1, 2, 3, 4):
        claim = site.claim_when_ready(source["task_id"])
        assert claim["attempt"] == attempt
        assert site.complete(claim, "Failed", error_message="x").json()["task_status"] == "Queued"
    assert [task["task_id"] for task in site.tasks(dag, "follow")] == [source["task_id"]]


def test_parquet_counts_when_its_files_are_there_and_committed(site: Site) -> None:
    dag, _ = site.deploy(CHAIN, operator="theirs", storage="parquet", lease="60")
    site.trigger(dag, 0, 9)
    claim = site.claim(site.tasks(dag, "first")[0]["task_id"])
    staging = claim["task"]["outputs"][0]["staging"]
    assert claim["task_id"] in staging
    location = f"{staging}part-0/rows_0_9.parquet"
    content = b"PAR1 as far as the Dispatcher looks PAR1"
    file = {
        "location": location,
        "rows": 3,
        "bytes": len(content),
        "content_hash": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "min_block": 0,
        "max_block": 9,
    }
    manifest = {"files": [file], "schema_hash": f"sha256:{'0' * 64}", "verified": "full"}
    outputs = [output_of(claim, 0, 9, row_count=3, location=staging, manifest=manifest)]
    refused(site.complete(claim, outputs=outputs), 422, "OutputMissing")

    path = Path(location.removeprefix("file://"))
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    early = {key: outputs[0][key] for key in ("dataset_uuid", "dataset_version", "start", "end")}
    assert site.say(claim, early).json()["events"][0]["state"] == "pending"
    assert site.tasks(dag, "second") == []
    assert site.complete(claim, outputs=outputs).status_code == 200
    assert len(site.tasks(dag, "second")) == 1
    [partition] = site.user.get(f"/v1/datasets/{dag}_rows/partitions").json()["partitions"]
    assert (partition["partition_key"], partition["row_count"]) == ("0-9", 3)

    site.trigger(dag, 5, 14)
    cut = site.claim(site.tasks(dag, "first", "Queued")[0]["task_id"])
    empty = output_of(cut, 5, 14, row_count=0)
    refused(site.complete(cut, outputs=[empty]), 422, "PartitionOverlap")
    [still] = site.user.get(f"/v1/datasets/{dag}_rows/partitions").json()["partitions"]
    assert still == partition


def test_a_wrong_dag_is_told_all_that_is_wrong_with_line_and_field(site: Site) -> None:
    for path in ("/v1/dags", "/v1/dags/plan"):
        answer = site.user.post(path, content=WRONG_ON_LINES)
        refused(answer, 422, "InvalidDag")
        found = {(error["line"], error["field"]) for error in answer.json()["errors"]}
        assert found >= {
            (4, "jobs[1].name"),
            (7, "jobs[2].runtime"),
            (9, "jobs[2].inputs[0].from.job"),
            (13, "jobs[2].colour"),
            (15, "publish.Not-A-Name"),
        }
        assert "jobs[2].unique_key" in {field for _, field in found}


def test_a_changed_job_gives_itself_and_everything_downstream_a_new_version(site: Site) -> None:
    options = {"name": f"bb{next(_NUMBERS)}_{uuid4().hex[:8]}", "storage": "none", "lease": "60"}

    def deploy(operator: str, **changed: str) -> tuple[int, dict[str, str]]:
        yaml = CHAIN.format(**{**options, **changed}, operator=operator)
        answer = site.user.post("/v1/dags", content=yaml)
        versions = {job["name"]: job["outputs"][0]["dataset_version"] for job in answer.json()["jobs"]}
        return answer.status_code, versions

    code, first = deploy("noop")
    assert code == 201
    site.trigger(options["name"], 0, 9)
    [waiting] = site.tasks(options["name"], "first")
    assert deploy("noop") == (200, first)
    assert deploy("noop", lease="90") == (201, first)

    plan = site.user.post("/v1/dags/plan", content=CHAIN.format(**options, operator="other")).json()
    assert {job["job"]: job["kind"] for job in plan["jobs"]} == {
        "ask": "unchanged",
        "first": "replaced",
        "second": "replaced",
    }
    code, second = deploy("other")
    assert code == 201
    assert [second[job] == first[job] for job in ("ask", "first", "second")] == [True, False, False]
    assert site.claim(waiting["task_id"])["reason"] == "Canceled"


def test_both_ports_say_how_they_are_and_what_they_serve(site: Site) -> None:
    for url in (site.user_url, site.internal_url):
        for path in ("/healthz", "/readyz", "/openapi.json"):
            assert site.bare.get(url + path).status_code == 200
    assert site.bare.get(site.internal_url + "/metrics").status_code == 200
    assert site.bare.get(site.user_url + "/metrics").status_code == 401
    assert site.user.get("/metrics").status_code == 200
