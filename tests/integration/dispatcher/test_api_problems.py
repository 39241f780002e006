"""Bad input: always a problem document that names what is wrong, never a 5xx."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from tests.support.surfaces import DirectDispatch, Surfaces, open_surfaces
from tracelake.contracts.dispatcher_api import ClaimRequest, ClaimResponse
from tracelake.dispatcher.steps.context import StepContext

ID = "7e0c9a52-93d5-4a53-8d0e-0d0c6c6f5f11"
CLAIM = b'{"task_id": "%s", "worker_id": %s}'


@pytest.fixture
async def api(ctx: StepContext) -> AsyncIterator[Surfaces]:
    async with open_surfaces(ctx) as surfaces:
        yield surfaces


def claim_with(worker_id: bytes) -> bytes:
    return CLAIM % (ID.encode(), worker_id)


@pytest.mark.parametrize(
    ("body", "status", "field"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"NaN", 400, None),
        (b"nul", 400, None),
        (claim_with(b'"\xff"'), 400, None),
        (claim_with(b'"\\ud800"'), 400, None),
        (claim_with(b'"a\0b"'), 400, None),
        (b"[" * 100_000, 422, ""),
        (b"[]", 422, ""),
        (b"{}", 422, "task_id"),
        (b'{"task_id": "not-a-uuid", "worker_id": "w"}', 422, "task_id"),
        (b'{"task_id": 1e400, "worker_id": "w"}', 422, "task_id"),
        (b'{"task_id": "%s"}' % ID.encode(), 422, "worker_id"),
        (claim_with(b'""'), 422, "worker_id"),
        (claim_with(b'"' + b"w" * 201 + b'"'), 422, "worker_id"),
        (claim_with(b'"w\\u0000"'), 422, "worker_id"),
        (claim_with(b"[" * 50_000), 422, "worker_id"),
        (claim_with(b'"w", "worker": 1'), 422, "worker"),
        (claim_with(b'"w", "x": ' + b"[" * 100_000), 422, "x"),
        (claim_with(b'"w", "claim_key": ' + b"9" * 10_000), 422, "claim_key"),
    ],
)
async def test_a_malformed_claim_is_refused_by_name(
    api: Surfaces, body: bytes, status: int, field: str | None
) -> None:
    answer = await api.worker.post("/internal/task-claim", content=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert {"type", "title", "status", "detail", "reason"} <= problem.keys()
    assert problem["status"] == status
    if field is not None:
        assert problem["errors"][0]["field"] == field


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"attempt": 0}, "attempt"),
        ({"attempt": 2**31}, "attempt"),
        ({"attempt": "1"}, "attempt"),
        ({"attempt": 1.5}, "attempt"),
        ({"attempt": True}, "attempt"),
        ({"events": [{"cursor": -1}]}, "events[0].cursor"),
        ({"events": [{"cursor": 2**63}]}, "events[0].cursor"),
        ({"events": [{"cursor": 10**400}]}, "events[0].cursor"),
        ({"events": [{"dataset": "a\0"}]}, "events[0].dataset"),
        ({"events": []}, "events"),
        ({"events": [{}] * 1001}, "events"),
    ],
)
async def test_events_out_of_range_are_refused_by_name(api: Surfaces, changed: dict, field: str) -> None:
    body = {"task_id": ID, "attempt": 1, "events": [{"dataset": "x", "cursor": 1}]} | changed
    answer = await api.worker.post("/internal/events", json=body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


async def test_a_nul_is_found_only_where_there_is_one(api: Surfaces) -> None:
    answer = await api.worker.post("/internal/task-claim", content=claim_with(b'"\\\\u0000"'))
    assert (answer.status_code, answer.json()["status"]) == (200, "NotClaimed")


async def test_a_repeated_key_is_no_accident(api: Surfaces) -> None:
    answer = await api.worker.post("/internal/task-claim", content=claim_with(b'"w", "worker_id": "v"'))
    assert answer.status_code == 200


async def test_json_needs_no_content_type(api: Surfaces) -> None:
    for kind in (None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "\x7f"):
        headers = {"content-type": kind} if kind else {}
        answer = await api.worker.post("/internal/task-claim", content=claim_with(b'"w"'), headers=headers)
        assert answer.status_code == 200


async def test_unknown_paths_and_methods_are_problems(api: Surfaces) -> None:
    for client in (api.worker, api.person):
        answer = await client.get("/no/such/path")
        assert (answer.status_code, answer.json()["reason"]) == (404, "NotFound")
        answer = await client.delete("/healthz")
        assert (answer.status_code, answer.json()["reason"]) == (405, "MethodNotAllowed")
        assert answer.headers["allow"] == "GET"
        assert answer.headers["content-type"] == "application/problem+json"
    for client in (api.user, api.person):
        answer = await client.options("/v1/dags")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")


@pytest.mark.parametrize("announced", [True, False])
async def test_bodies_have_a_limit(api: Surfaces, announced: bool) -> None:
    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(0, size, 65536):
            yield b" " * 65536

    def body(size: int) -> bytes | AsyncIterator[bytes]:
        return b" " * size if announced else chunks(size)

    mib = 1024 * 1024
    for client, path, limit in (
        (api.worker, "/internal/task-claim", mib),
        (api.worker, "/internal/task-complete", 16 * mib),
        (api.person, "/v1/dags", mib),
    ):
        over = await client.post(path, content=body(limit + 65536))
        assert (over.status_code, over.json()["reason"]) == (413, "TooLarge")
        assert (await client.post(path, content=body(limit))).status_code in (400, 422)


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/tasks?limit=0", "limit"),
        ("/v1/tasks?limit=1001", "limit"),
        ("/v1/tasks?limit=x", "limit"),
        ("/v1/tasks?limit=1&limit=2", "limit"),
        ("/v1/tasks?status=Lost", "status"),
        ("/v1/tasks?dag=", "dag"),
        ("/v1/tasks?dag=%00", "dag"),
        ("/v1/tasks?after=-1", "after"),
        ("/v1/tasks?after=99999999999999999999", "after"),
        ("/v1/tasks?colour=red", "colour"),
        ("/v1/tasks/nonsense", "task_id"),
        ("/v1/datasets/a%00b", "name"),
        ("/v1/datasets?after=x", "after"),
        ("/v1/datasets/x/partitions?after=1", "after"),
    ],
)
async def test_queries_are_refused_by_name(api: Surfaces, path: str, field: str) -> None:
    answer = await api.person.get(path)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field)


async def test_an_invalid_dag_lists_every_problem_with_its_place(api: Surfaces) -> None:
    answer = await api.person.post("/v1/dags", content="name: x\njobs:\n  - { name: a }\n  - { name: a }\n")
    assert (answer.status_code, answer.json()["reason"]) == (422, "InvalidDag")
    errors = answer.json()["errors"]
    assert len(errors) > 1
    assert all({"line", "column", "field", "message"} <= error.keys() for error in errors)


@pytest.mark.parametrize("body", [b"", b"\xff", b"a: \0", b"- " * 5000, b"{" * 5000, b"&a [*a]", b"a: 1e999"])
async def test_a_file_that_is_no_dag_is_refused(api: Surfaces, body: bytes) -> None:
    for path in ("/v1/dags", "/v1/dags/plan"):
        answer = await api.person.post(path, content=body)
        assert answer.status_code in (400, 422), answer.text


class Broken(DirectDispatch):
    async def claim(self, request: ClaimRequest) -> ClaimResponse:
        raise RuntimeError("secret detail")

    async def claim_many(self, requests: Sequence[ClaimRequest]) -> list[ClaimResponse]:
        await asyncio.Event().wait()
        raise AssertionError


async def test_what_is_unexpected_is_logged_and_not_told(
    ctx: StepContext, capsys: pytest.CaptureFixture[str]
) -> None:
    async with open_surfaces(ctx, dispatch=Broken(ctx)) as api:
        answer = await api.worker.post("/internal/task-claim", content=claim_with(b'"w"'))
    assert (answer.status_code, answer.json()["reason"]) == (500, "Internal")
    assert "secret" not in answer.text
    printed = capsys.readouterr()
    assert "secret detail" in printed.out + printed.err


async def test_a_request_that_takes_too_long_is_answered_503(ctx: StepContext) -> None:
    async with open_surfaces(ctx, dispatch=Broken(ctx), timeout=0.05) as api:
        body = {"claims": [{"task_id": ID, "worker_id": "w"}]}
        answer = await api.worker.post("/internal/task-claim-batch", json=body)
    assert (answer.status_code, answer.json()["reason"]) == (503, "Timeout")
    assert answer.headers["content-type"] == "application/problem+json"
