"""The OpenAPI document of a surface, made from the routes that it really has.

Schemas are msgspec's own, so they say what the decoder enforces, unknown fields refused included.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler
from litestar.routes import BaseRoute, HTTPRoute

import tracelake
from tracelake.serving.endpoint import OPERATION, Operation
from tracelake.serving.identity import TASK_HEADER, WORKER_HEADER, Identity
from tracelake.serving.problems import MEDIA_TYPE, Problem

Json = dict[str, Any]

_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(?P<name>[a-z_]+)}")
_NAME: Json = {"type": "string", "minLength": 1, "maxLength": 200}
_PATH_SCHEMAS: dict[str, Json] = {
    "task_id": {"type": "string", "format": "uuid"},
    "version": {"type": "integer", "minimum": 1, "maximum": 999_999_999},
}
_SCHEMES: dict[Identity, Json] = {
    Identity.WORKER: {"type": "apiKey", "in": "header", "name": WORKER_HEADER},
    Identity.TASK: {"type": "apiKey", "in": "header", "name": TASK_HEADER},
    Identity.USER: {"type": "http", "scheme": "bearer"},
}
_WORDS = {
    200: "Done.",
    201: "Created.",
    202: "Accepted.",
    400: "Not well-formed.",
    401: "No valid credential.",
    403: "Not yours to touch.",
    404: "Not there.",
    409: "A lost race or a stale fence.",
    413: "The body is too large.",
    422: "Asks for something impossible.",
    429: "As much as you may have.",
    503: "Try again later.",
}


def declared(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str, HTTPRouteHandler, Operation]]:
    """Every route that was declared, as ``(path, method, handler, operation)``."""
    for route in routes:
        if not isinstance(route, HTTPRoute):
            continue
        for handler in route.route_handlers:
            operation = handler.opt.get(OPERATION)
            if operation is not None:
                yield route.path_format, next(iter(handler.http_methods)), handler, operation


def document(title: str, routes: Iterable[BaseRoute]) -> bytes:
    found = sorted(declared(routes), key=lambda entry: entry[:2])
    kinds = [Problem, *(kind for *_, operation in found for kind in _kinds(operation))]
    refs, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schemas = dict(zip(map(_key, kinds), refs, strict=True))
    paths: dict[str, Json] = {}
    for path, method, handler, operation in found:
        paths.setdefault(path, {})[method.lower()] = _operation(path, handler, operation, schemas)
    used = {operation.identity for *_, operation in found} & _SCHEMES.keys()
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


def _operation(path: str, handler: HTTPRouteHandler, operation: Operation, schemas: dict[str, Json]) -> Json:
    summary = (handler.fn.__doc__ or "").strip().split("\n")[0]
    described: Json = {"operationId": handler.handler_name, "summary": summary, "responses": {}}
    for status, kind in operation.answers.items():
        described["responses"][str(status)] = {
            "description": _WORDS[status],
            "content": _content(kind, schemas),
        }
    for status in _refusals(path, operation):
        content = {MEDIA_TYPE: {"schema": schemas[_key(Problem)]}}
        described["responses"][str(status)] = {"description": _WORDS[status], "content": content}
    if operation.identity in _SCHEMES:
        described["security"] = [{operation.identity.value: []}]
    if operation.body is not None:
        content = _content(operation.body, schemas)
        described["requestBody"] = {"required": operation.body_required, "content": content}
    if parameters := [*_path_parameters(path), *_query_parameters(operation)]:
        described["parameters"] = parameters
    return described


def _content(kind: Any, schemas: dict[str, Json]) -> Json:
    forms = _forms(kind)
    content: Json = {form: {"schema": {"type": "string"}} for form in forms if isinstance(form, str)}
    found = [schemas[_key(form)] for form in forms if _is_json(form)]
    if found:
        content["application/json"] = {"schema": found[0] if len(found) == 1 else {"anyOf": found}}
    return content


def _refusals(path: str, operation: Operation) -> list[int]:
    statuses = {*operation.refusals, 503}
    if operation.identity is not Identity.NOBODY:
        statuses.add(401)
    if operation.body is not None:
        statuses |= {400, 413, 422}
    if operation.query is not None:
        statuses |= {400, 422}
    if _PARAMETER.search(path):
        statuses |= {404, 422}
    return sorted(statuses)


def _path_parameters(path: str) -> Iterator[Json]:
    for found in _PARAMETER.finditer(path):
        name = found["name"]
        yield {"name": name, "in": "path", "required": True, "schema": _PATH_SCHEMAS.get(name, _NAME)}


def _query_parameters(operation: Operation) -> Iterator[Json]:
    if operation.query is None:
        return
    _, components = msgspec.json.schema_components([operation.query], ref_template=_REF)
    shape = components[operation.query.__name__]
    for name, schema in shape["properties"].items():
        yield {"name": name, "in": "query", "required": name in shape["required"], "schema": schema}


def _plain_patterns(value: Any) -> Any:
    """JSON Schema's regular expressions are ECMA's, which know no ``\\A`` and ``\\Z``."""
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
