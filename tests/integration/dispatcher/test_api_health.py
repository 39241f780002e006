"""What both ports say about themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.dispatcher.steps.context import StepContext


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


async def test_both_ports_are_alive_and_ready(api: Surfaces) -> None:
    for client in (api.internal, api.user):
        assert (await client.get("/healthz")).json() == {"status": "ok"}
        answer = await client.get("/readyz")
        assert (answer.status_code, answer.json()["checks"]) == (200, {"state": "ok"})


async def test_a_failing_check_makes_a_port_unready(ctx: StepContext) -> None:
    async def queue() -> None:
        raise ConnectionError("postgres://user:password@host")

    async with open_surfaces(ctx, checks={"queue": queue}) as api:
        answer = await api.user.get("/readyz")
        assert (answer.status_code, answer.json()["reason"]) == (503, "NotReady")
        assert "queue" in answer.json()["detail"]
        assert "password" not in answer.text
        assert (await api.user.get("/healthz")).status_code == 200


async def test_without_the_database_a_port_is_alive_but_not_ready(ctx: StepContext, pool) -> None:
    async with open_surfaces(ctx) as api:
        await pool.close()
        assert (await api.internal.get("/healthz")).status_code == 200
        assert (await api.internal.get("/readyz")).status_code == 503
        answer = await api.person.get("/v1/dags")
        assert (answer.status_code, answer.json()["reason"]) == (503, "StateUnavailable")


async def test_requests_are_counted_by_route_and_not_by_path(api: Surfaces) -> None:
    for number in range(3):
        await api.person.get(f"/v1/datasets/d{number}")
        await api.user.get(f"/nothing/{number}")
    await api.worker.post("/internal/task-claim", content=b"{}")
    text = (await api.internal.get("/metrics")).text
    count = "tracelake_http_requests_total"
    assert f'{count}{{method="GET",route="/v1/datasets/{{name}}",status="404",surface="user"}} 3.0' in text
    assert f'{count}{{method="any",route="unmatched",status="404",surface="user"}} 3.0' in text
    labels = 'method="POST",route="/internal/task-claim",status="422",surface="internal"'
    assert f"{count}{{{labels}}} 1.0" in text
    assert "tracelake_http_request_seconds_bucket" in text


async def test_each_port_describes_itself_and_nothing_else(api: Surfaces) -> None:
    internal = (await api.internal.get("/openapi.json")).json()
    user = (await api.user.get("/openapi.json")).json()
    assert set(internal["components"]["securitySchemes"]) == {"worker", "task"}
    assert set(user["components"]["securitySchemes"]) == {"user"}
    assert not [path for path in user["paths"] if path.startswith(("/internal", "/v1/task/"))]
    assert user["components"]["schemas"]["TriggerRequest"]["additionalProperties"] is False
    assert internal["paths"]["/internal/task-claim"]["post"]["security"] == [{"worker": []}]
