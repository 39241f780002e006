"""What a stranger is told: every route of every port is asked without a credential, and with worthless ones."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.surfaces import Surfaces, open_surfaces
from tracelake.dispatcher.steps.context import StepContext
from tracelake.query.api import QUERY_ROUTES
from tracelake.serving.identity import CHALLENGES, Identity
from tracelake.serving.surface import Surface

ANY = "00000000-0000-0000-0000-000000000000"
OPEN = {
    "internal": {"/healthz", "/readyz", "/metrics", "/openapi.json", "/internal/jwks/task"},
    # A hook's caller signs its call; without a signature it gets a 401 of the source's own.
    "user": {"/healthz", "/readyz", "/openapi.json", f"/v1/hooks/{ANY}/{ANY}"},
    "query": {"/healthz", "/readyz", "/metrics", "/openapi.json"},
}
"""All that answers without a credential, by port."""
WORTHLESS: list[dict[str, str]] = [
    {},
    {"Authorization": "Bearer "},
    {"Authorization": "Bearer x"},
    {"Authorization": "Basic dXNlcjpwYXNz"},
    {"Authorization": "bearer tlu_" + "0" * 40},
    {"Cookie": "session=x"},
    {"X-Trace-Worker-Token": "x"},
    {"X-Trace-Task-Capability": "a.b.c"},
    {"X-Forwarded-For": "127.0.0.1", "X-Real-IP": "127.0.0.1", "Forwarded": "for=127.0.0.1"},
]
DAG = """
name: secretive
jobs:
  - { name: hidden_source, activation: source, runtime: dispatcher, source: { kind: manual }, outputs: 1 }
"""
NAMES = re.compile(r"secretive|hidden_source")


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx, token_ttl=0.0) as surfaces:
        yield surfaces


def routes(surface: Surface) -> Iterator[tuple[str, str, Identity]]:
    for route in surface.routes:
        path = re.sub(r"{[^}]*}", ANY, route.path)
        yield path, route.method, route.operation.identity


@pytest.mark.parametrize("port", ["internal", "user"])
async def test_nothing_but_what_is_listed_answers_a_stranger(api: Surfaces, port: str) -> None:
    assert (await api.person.post("/v1/dags", content=DAG)).status_code == 201
    surface, client = (api.internal_app, api.internal) if port == "internal" else (api.user_app, api.user)
    answered = set()
    for path, method, identity in routes(surface):
        for headers in WORTHLESS:
            answer = await client.request(method, path, headers=headers, content=b'{"task_id": 1}')
            told = f"{method} {path} {headers}: {answer.status_code} {answer.text[:200]}"
            assert not NAMES.search(answer.text), told
            if identity is Identity.NONE:
                assert answer.status_code < 500, told
                answered.add(path)
            else:
                assert answer.status_code == 401, told
                assert answer.headers["www-authenticate"] == CHALLENGES[identity]
                assert answer.headers["content-type"] == "application/problem+json"
    assert answered == OPEN[port]


def test_the_query_service_answers_strangers_what_is_listed() -> None:
    """Its port refuses worthless tokens in ``test_query_tokens``; here, that no route is without one."""
    kinds = {route.path: route.operation.identity for route in QUERY_ROUTES}
    assert {path for path, kind in kinds.items() if kind is Identity.NONE} == OPEN["query"]


async def test_metrics_on_the_user_port_take_a_user_token(api: Surfaces) -> None:
    answer = await api.user.get("/metrics")
    assert (answer.status_code, answer.json()["reason"]) == (401, "UserTokenMissing")
    answer = await api.person.get("/metrics")
    assert answer.status_code == 200
    assert "tracelake_http_requests_total" in answer.text
    assert (await api.internal.get("/metrics")).status_code == 200


async def test_other_methods_tell_a_stranger_no_more(api: Surfaces) -> None:
    for surface, client in ((api.internal_app, api.internal), (api.user_app, api.user)):
        for path, _, identity in routes(surface):
            for method in ("HEAD", "OPTIONS", "TRACE", "PUT", "PATCH", "DELETE", "PROPFIND"):
                answer = await client.request(method, path)
                if identity is not Identity.NONE or method != "HEAD":
                    assert answer.status_code in (401, 404, 405), f"{method} {path}: {answer.status_code}"


async def test_readiness_names_parts_and_nothing_of_them(ctx: StepContext) -> None:
    async def broken() -> None:
        raise ConnectionError("connect to postgres://user:password@10.0.0.7:5432/state failed")

    async with open_surfaces(ctx, checks={"queue": broken}) as api:
        for client in (api.internal, api.user):
            answer = await client.get("/readyz")
            assert answer.status_code == 503
            assert not re.search(r"postgres|password|10\.0\.0\.7", answer.text)
