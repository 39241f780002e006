"""Three identities: each surface takes its own credential, before it looks at anything else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from prometheus_client import CollectorRegistry

from tests.support.surfaces import OLD_WORKER_TOKEN, DirectDispatch, Surfaces, open_surfaces
from tracelake.dispatcher.api.apps import INTERNAL_ROUTES, user_app
from tracelake.dispatcher.steps.context import StepContext
from tracelake.serving.identity import Identity
from tracelake.serving.surface import HttpMetrics
from tracelake.store import users

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
"""
PROBLEM = "application/problem+json"

WORKER_CALLS = [
    ("POST", "/internal/task-claim"),
    ("POST", "/internal/task-claim-batch"),
    ("GET", "/internal/task-fetch"),
    ("POST", "/internal/heartbeat"),
    ("POST", "/internal/task-complete"),
    ("POST", "/internal/task-complete-batch"),
    ("POST", "/internal/events"),
    ("GET", "/internal/bundle"),
    ("POST", "/internal/invoker"),
    ("POST", "/internal/task-state"),
    ("GET", "/internal/task-inputs"),
]
TASK_CALLS = [("POST", "/v1/task/heartbeat"), ("POST", "/v1/task/complete"), ("POST", "/v1/task/events")]
USER_CALLS = [
    ("POST", "/v1/dags"),
    ("POST", "/v1/dags/plan"),
    ("GET", "/v1/dags"),
    ("GET", "/v1/tasks"),
    ("GET", "/v1/tasks/not-a-uuid"),
    ("POST", "/v1/tasks/not-a-uuid/cancel"),
    ("POST", "/v1/tasks/not-a-uuid/retry"),
    ("GET", "/v1/datasets"),
    ("GET", "/v1/datasets/x"),
    ("GET", "/v1/datasets/x/partitions"),
    ("POST", "/v1/sources/d/j/trigger"),
    ("POST", "/v1/bundles"),
    ("GET", "/v1/bundles"),
    ("GET", "/v1/bundles/x"),
    ("POST", "/v1/jobs/d/j/pause"),
    ("POST", "/v1/jobs/d/j/resume"),
    ("GET", "/v1/outbox/failed"),
    ("POST", "/v1/outbox/replay"),
]


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx, token_ttl=0.0) as surfaces:
        yield surfaces


async def two_claims(api: Surfaces) -> tuple[dict, dict]:
    assert (await api.person.post("/v1/dags", content=DAG)).status_code == 201
    for start in (0, 10):
        await api.person.post("/v1/sources/one/src/trigger", json={"start": start, "end": start + 9})
    claims = []
    for task in (await api.person.get("/v1/tasks")).json()["tasks"]:
        body = {"task_id": task["task_id"], "worker_id": "w"}
        claims.append((await api.worker.post("/internal/task-claim", json=body)).json())
    return claims[0], claims[1]


def fence(claim: dict) -> dict:
    return {name: claim[name] for name in ("task_id", "attempt", "lease_token")}


async def test_every_route_declares_the_credential_that_it_takes(api: Surfaces) -> None:
    """Walks the routers as they are served, so that a route can't be added without saying who may call it."""
    expected = {"/internal/": Identity.WORKER, "/v1/task/": Identity.TASK, "/v1/": Identity.USER}
    open_to_all = {"/healthz", "/readyz", "/openapi.json"}
    for surface, more, kind_of_metrics in (
        (api.internal_app, {"/internal/jwks/task", "/metrics"}, None),
        # A webhook's caller is known by its signature over the body.
        (api.user_app, {"/v1/hooks/{dag}/{job}"}, Identity.USER),
    ):
        for route in surface.routes:
            wanted = next((kind for start, kind in expected.items() if route.path.startswith(start)), None)
            declared = route.operation.identity
            if route.path in open_to_all | more:
                assert declared is Identity.NONE, route.path
            else:
                assert declared is (kind_of_metrics if route.path == "/metrics" else wanted), route.path


async def test_a_surface_with_a_route_that_it_cannot_authenticate_is_not_built(
    ctx: StepContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracelake.dispatcher.api.apps.USER_ROUTES", INTERNAL_ROUTES)
    with pytest.raises(ValueError, match="can't authenticate"):
        user_app(DirectDispatch(ctx), metrics=HttpMetrics(CollectorRegistry()))


@pytest.mark.parametrize(("method", "path"), WORKER_CALLS + TASK_CALLS)
async def test_internal_calls_without_a_valid_credential_are_401_whatever_the_body(
    api: Surfaces, method: str, path: str
) -> None:
    for headers in ({}, {"X-Trace-Worker-Token": "w" * 44, "X-Trace-Task-Capability": "a.b.c"}):
        answer = await api.internal.request(method, path, content=b"{not json", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["content-type"] == PROBLEM
        assert answer.headers["www-authenticate"].startswith("Trace")
    swapped = {"Authorization": f"Bearer {api.user_token}"}
    assert (await api.internal.request(method, path, headers=swapped)).status_code == 401


@pytest.mark.parametrize(("method", "path"), USER_CALLS)
async def test_user_calls_without_a_valid_token_are_401_whatever_the_request(
    api: Surfaces, method: str, path: str
) -> None:
    for value in (None, "Bearer", "Bearer tlu_unknown", "Bearer \xff", f"Basic {api.user_token}"):
        headers = {"Authorization": value.encode("latin-1")} if value else {}
        answer = await api.user.request(method, path, content=b"\xff{", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["content-type"] == PROBLEM
        assert answer.headers["www-authenticate"].startswith("Bearer")


@pytest.mark.parametrize("path", [path for _, path in WORKER_CALLS + TASK_CALLS])
@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
async def test_the_user_port_knows_nothing_of_internal_paths(api: Surfaces, method: str, path: str) -> None:
    for client in (api.user, api.person):
        for spelling in (path, path + "/", "/" + path, path.replace("/", "//")):
            answer = await client.request(method, f"http://dispatcher{spelling}")
            assert answer.status_code == 404, spelling


async def test_the_internal_port_knows_nothing_of_user_paths(api: Surfaces) -> None:
    for method, path in USER_CALLS:
        assert (await api.worker.request(method, path)).status_code == 404


async def test_several_worker_tokens_are_valid_at_a_time(api: Surfaces) -> None:
    body = {"task_id": str(uuid4()), "worker_id": "w"}
    answer = await api.internal.post(
        "/internal/task-claim", json=body, headers={"X-Trace-Worker-Token": OLD_WORKER_TOKEN}
    )
    assert (answer.status_code, answer.json()["reason"]) == (200, "NotFound")


async def test_a_capability_token_speaks_for_its_own_attempt_only(api: Surfaces) -> None:
    mine, other = await two_claims(api)
    headers = api.task(mine["capability_token"])
    beat = await api.internal.post("/v1/task/heartbeat", json=fence(mine), headers=headers)
    assert beat.status_code == 200
    for stolen in (fence(other), fence(mine) | {"attempt": 2}):
        for path, more in (
            ("heartbeat", {}),
            ("complete", {"status": "Failed"}),
            ("events", {"events": [{"dataset": "x", "cursor": 1}]}),
        ):
            answer = await api.internal.post(f"/v1/task/{path}", json=stolen | more, headers=headers)
            assert (answer.status_code, answer.json()["reason"]) == (403, "NotYourTask"), path


async def test_task_scoped_events_need_the_lease_and_internal_ones_do_not(api: Surfaces) -> None:
    claim, _ = await two_claims(api)
    output = claim["task"]["outputs"][0]
    event = {name: output[name] for name in ("dataset_uuid", "dataset_version")} | {"start": 10, "end": 19}
    body = {"task_id": claim["task_id"], "attempt": 1, "events": [event]}
    headers = api.task(claim["capability_token"])
    answer = await api.internal.post("/v1/task/events", json=body, headers=headers)
    assert (answer.status_code, answer.json()["reason"]) == (400, "FenceMissing")
    stale = body | {"lease_token": str(uuid4())}
    answer = await api.internal.post("/v1/task/events", json=stale, headers=headers)
    assert (answer.status_code, answer.json()["reason"]) == (409, "StaleLease")
    answer = await api.internal.post("/v1/task/events", json=body | fence(claim), headers=headers)
    assert (answer.status_code, answer.json()["events"][0]["state"]) == (200, "counted")
    answer = await api.worker.post("/internal/events", json=body)
    assert (answer.status_code, answer.json()["events"][0]["state"]) == (200, "counted")
    answer = await api.worker.post("/internal/events", json=body | {"attempt": 2})
    assert (answer.status_code, answer.json()["reason"]) == (409, "StaleAttempt")


async def test_both_spellings_of_completion_run_the_same_code(api: Surfaces) -> None:
    one, two = await two_claims(api)
    headers = api.task(one["capability_token"])
    done = {"status": "Failed", "error_message": "no", "retryable": False}
    scoped = await api.internal.post("/v1/task/complete", json=fence(one) | done, headers=headers)
    trusted = await api.worker.post("/internal/task-complete", json=fence(two) | done)
    assert (scoped.status_code, trusted.status_code) == (200, 200)
    assert {k: v for k, v in scoped.json().items() if k != "task_id"} == {
        k: v for k, v in trusted.json().items() if k != "task_id"
    }


@pytest.mark.parametrize(
    "given",
    [{"location": "file:///x/y.parquet"}, {"manifest": {"files": [], "schema_hash": f"sha256:{0:064}"}}],
)
async def test_files_are_reported_by_the_worker_alone(api: Surfaces, given: dict[str, object]) -> None:
    """An attempt's own report would commit files that still belong to whoever wrote them."""
    one, _ = await two_claims(api)
    done = {
        "status": "Completed",
        "outputs": [{"output_index": 0, "start": 0, "end": 9, "row_count": 0} | given],
    }
    headers = api.task(one["capability_token"])
    scoped = await api.internal.post("/v1/task/complete", json=fence(one) | done, headers=headers)
    assert (scoped.status_code, scoped.json()["reason"]) == (403, "FilesByWorker")


async def test_a_revoked_user_token_is_refused(api: Surfaces, ctx: StepContext) -> None:
    assert (await api.person.get("/v1/dags")).status_code == 200
    assert await ctx.db.run(lambda tx: users.revoke_token(tx, api.user_token))
    assert (await api.person.get("/v1/dags")).status_code == 401


async def test_a_remembered_user_token_asks_the_database_once(ctx: StepContext) -> None:
    async with open_surfaces(ctx, token_ttl=60.0) as api:
        assert (await api.person.get("/v1/dags")).status_code == 200
        assert await ctx.db.run(lambda tx: users.revoke_token(tx, api.user_token))
        assert (await api.person.get("/v1/dags")).status_code == 200


async def test_the_organisation_and_a_user_are_made_once(ctx: StepContext) -> None:
    first = await ctx.db.run(users.ensure_org)
    assert (first, first) == (ctx.org_id, await ctx.db.run(users.ensure_org))
    user = await ctx.db.run(lambda tx: users.ensure_user(tx, first, "ann"))
    assert user == await ctx.db.run(lambda tx: users.ensure_user(tx, first, "ann"))


async def test_public_keys_are_for_everybody(api: Surfaces) -> None:
    answer = await api.internal.get("/internal/jwks/task")
    assert answer.status_code == 200
    [key] = answer.json()["keys"]
    assert (key["kty"], key["alg"], "d" in key) == ("EC", "ES256", False)


async def test_tokens_are_verified_at_the_state_databases_time(api: Surfaces, ctx: StepContext) -> None:
    ahead = "SELECT statement_timestamp() + interval '1 hour'"
    change = f"CREATE OR REPLACE FUNCTION tl_now() RETURNS timestamptz LANGUAGE sql STABLE AS $$ {ahead} $$"
    await ctx.db.run(lambda tx: tx.execute(change))
    claim, _ = await two_claims(api)
    headers = api.task(claim["capability_token"])
    answer = await api.internal.post("/v1/task/heartbeat", json=fence(claim), headers=headers)
    assert answer.status_code == 200, answer.text
