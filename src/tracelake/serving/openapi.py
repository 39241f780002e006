"""The OpenAPI document of a surface, made from the routes that it really has.

Schemas are msgspec's own, so they describe what the decoder enforces, including that unknown fields are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

import tracelake
from tracelake.contracts.headers import CAPABILITY_HEADER, WORKER_HEADER
from tracelake.contracts.problem import PROBLEM_JSON, Problem
from tracelake.domain.errors import BY_STATUS
from tracelake.serving.endpoint import Operation, Route
from tracelake.serving.identity import Identity

OpenApiNode = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(?P<name>[a-z_]+)}")
_NAME: OpenApiNode = {"type": "string", "minLength": 1, "maxLength": 200}
_PATH_SCHEMAS: dict[str, OpenApiNode] = {
    "task_id": {"type": "string", "format": "uuid"},
    "version": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
}
_SCHEMES: dict[Identity, OpenApiNode] = {
    Identity.WORKER: {"type": "apiKey", "in": "header", "name": WORKER_HEADER},
    Identity.TASK: {"type": "apiKey", "in": "header", "name": CAPABILITY_HEADER},
    Identity.USER: {"type": "http", "scheme": "bearer"},
}
_DONE = {200: "Done.", 201: "Created.", 202: "Accepted."}


def document(title: str, routes: Iterable[Route]) -> bytes:
    found = sorted(routes, key=lambda route: (route.path, route.method))
    kinds = [Problem, *(kind for route in found for kind in _kinds(route.operation))]
    refs, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schemas = dict(zip(map(_key, kinds), refs, strict=True))
    paths: dict[str, OpenApiNode] = {}
    for route in found:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas)
    # A port doesn't describe credentials that it never asks for.
    used = {route.operation.identity for route in found} & _SCHEMES.keys()
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": tracelake.__version__},
            "paths": paths,
            "components": {
                "schemas": _plain_patterns(components),
                "securitySchemes": {identity.value: _SCHEMES[identity] for identity in sorted(used)},
            },
        }
    )


def _kinds(operation: Operation) -> Iterator[Any]:
    forms = (form for kind in (operation.body, *operation.answers.values()) for form in _forms(kind))
    yield from (form for form in forms if _is_json(form))


def _forms(kind: Any) -> tuple[Any, ...]:
    return kind if isinstance(kind, tuple) else (kind,)


def _is_json(kind: Any) -> bool:
    return kind is not None and not isinstance(kind, str)


def _key(kind: Any) -> str:
    return repr(kind)


def _operation(route: Route, schemas: dict[str, OpenApiNode]) -> OpenApiNode:
    path, operation = route.path, route.operation
    summary = (route.handler.__doc__ or "").strip().split("\n")[0]
    described: OpenApiNode = {"operationId": route.handler.__name__, "summary": summary, "responses": {}}
    for status, kind in operation.answers.items():
        described["responses"][str(status)] = {
            "description": _DONE[status],
            "content": _content(kind, schemas),
        }
    for status in _refusals(path, operation):
        content = {PROBLEM_JSON: {"schema": schemas[_key(Problem)]}}
        described["responses"][str(status)] = {"description": BY_STATUS[status].__doc__, "content": content}
    if operation.identity in _SCHEMES:
        described["security"] = [{operation.identity.value: []}]
    if operation.body is not None:
        content = _content(operation.body, schemas)
        described["requestBody"] = {"required": operation.body_required, "content": content}
    if parameters := [*_path_parameters(path), *_query_parameters(operation)]:
        described["parameters"] = parameters
    return described


def _content(kind: Any, schemas: dict[str, OpenApiNode]) -> OpenApiNode:
    forms = _forms(kind)
    content: OpenApiNode = {form: {"schema": {"type": "string"}} for form in forms if isinstance(form, str)}
    found = [schemas[_key(form)] for form in forms if _is_json(form)]
    if found:
        content["application/json"] = {"schema": found[0] if len(found) == 1 else {"anyOf": found}}
    return content


def _refusals(path: str, operation: Operation) -> list[int]:
    statuses = {*operation.refusals, 503}
    if operation.identity is not Identity.NONE:
        statuses.add(401)
    if operation.body is not None:
        statuses |= {400, 413, 422}
    if operation.query is not None:
        statuses |= {400, 422}
    if _PARAMETER.search(path):
        statuses |= {404, 422}
    return sorted(statuses)


def _path_parameters(path: str) -> Iterator[OpenApiNode]:
    for found in _PARAMETER.finditer(path):
        name = found["name"]
        yield {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS.get(name, _NAME)}


def _query_parameters(operation: Operation) -> Iterator[OpenApiNode]:
    if operation.query is None:
        return
    _, components = msgspec.json.schema_components([operation.query], ref_template=_REF)
    shape = components[operation.query.__name__]
    for name, schema in shape["properties"].items():
        yield {"name": name, "in": "query", "required": name in shape["required"], "schema": schema}


def _plain_patterns(value: Any) -> Any:
    """JSON Schema uses ECMA's regular expressions, which have no ``\\A`` and ``\\Z``."""
    match value:
        case dict():
            return {
                name: item.replace(r"\A", "^").replace(r"\Z", "$")
                if name == "pattern" and isinstance(item, str)
                else _plain_patterns(item)
                for name, item in value.items()
            }
        case list() | tuple():
            return [_plain_patterns(item) for item in value]
        case _:
            return value
