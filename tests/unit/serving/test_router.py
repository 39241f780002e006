"""Routes are found by method and path, and what isn't served is refused as such."""

from __future__ import annotations

import pytest

from tracelake.domain.errors import MethodNotAllowed, NotFound
from tracelake.serving.endpoint import Operation, Route, Router
from tracelake.serving.identity import Identity
from tracelake.serving.response import Response

OPERATION = Operation(identity=Identity.NONE, answers={200: dict})


async def handler() -> Response:
    return Response(b"{}")


def route(method: str, path: str) -> Route:
    return Route(method, path, OPERATION, handler)


ROUTER = Router(
    [
        route("GET", "/v1/dags"),
        route("POST", "/v1/dags"),
        route("GET", "/v1/dags/{dag}"),
        route("POST", "/v1/dags/plan"),
        route("POST", "/v1/jobs/{dag}/{job}/pause"),
        route("POST", "/v1/jobs/{dag}/{job}/resume"),
    ]
)


@pytest.mark.parametrize(
    ("method", "path", "template", "parameters"),
    [
        ("GET", "/v1/dags", "/v1/dags", {}),
        ("GET", "/v1/dags/", "/v1/dags", {}),
        ("GET", "//v1//dags", "/v1/dags", {}),
        ("GET", "/v1/dags/monad", "/v1/dags/{dag}", {"dag": "monad"}),
        ("POST", "/v1/dags/plan", "/v1/dags/plan", {}),
        ("POST", "/v1/jobs/a/b/resume", "/v1/jobs/{dag}/{job}/resume", {"dag": "a", "job": "b"}),
    ],
)
def test_a_route_is_found(method: str, path: str, template: str, parameters: dict[str, str]) -> None:
    found, given = ROUTER.find(method, path)
    assert (found.method, found.path, given) == (method, template, parameters)


@pytest.mark.parametrize("path", ["/", "", "/v1", "/v1/dags/a/b", "/v1/jobs/a/b/stop", "/v1/jobs//b/pause"])
def test_an_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(NotFound):
        ROUTER.find("GET", path)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("DELETE", "/v1/dags", "GET, POST"),
        ("OPTIONS", "/v1/dags", "GET, POST"),
        ("HEAD", "/v1/dags/monad", "GET"),
        ("GET", "/v1/jobs/a/b/pause", "POST"),
    ],
)
def test_another_method_is_told_which_are_allowed(method: str, path: str, allowed: str) -> None:
    with pytest.raises(MethodNotAllowed) as refused:
        ROUTER.find(method, path)
    assert refused.value.allowed == allowed


def test_a_route_is_declared_once() -> None:
    with pytest.raises(ValueError, match="twice"):
        Router([route("GET", "/v1/dags"), route("GET", "/v1/dags")])
