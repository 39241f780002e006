"""``docs/http.md``: the calls of the three ports, made from the OpenAPI documents that they serve.

Calls are grouped by the clients that may make them. The types of requests and answers are links to one table of
fields each, since many calls share them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.reference.markdown import cell, json_type, table
from tracelake.contracts.headers import CAPABILITY_HEADER, WORKER_HEADER
from tracelake.dispatcher.api.apps import INTERNAL_ROUTES, USER_ROUTES
from tracelake.dispatcher.api.apps import describe as describe_dispatcher
from tracelake.query.api import describe as describe_query

Json = dict[str, Any]

_INTRODUCTION = f"""\
# HTTP reference

Made from the OpenAPI documents by `python -m scripts.reference`; each port serves its own at `/openapi.json`.
[The walk](walk.md) says what the calls do, [workers](workers.md) how a worker uses them, [queries](query.md) what
one may ask.

| port | of | for |
|---|---|---|
| user | Dispatcher | people, the command line, CI; the one to open to others |
| internal | Dispatcher | workers and tasks; never reachable from elsewhere |
| query | Query Service | tasks, and the user port, which passes `/v1/query` on |

| who | shows |
|---|---|
| worker | `{WORKER_HEADER}`: a line of the file `worker_tokens` |
| task | `{CAPABILITY_HEADER}`: the token that came with the claim, for its own attempt only |
| user | `Authorization: Bearer`: a user's token |
| none | no credential |

Bodies and answers are JSON unless something else is named. Unknown fields in a body are refused; answers may gain
fields. Lists are pages: pass `next` as `after`. A path that a port doesn't have is 404 there, whatever the
credential. Query parameters are written as `?name`, optional ones in brackets.
"""
_REFUSALS = """\
## Refusals

A refusal is `application/problem+json` with the fields of [Problem](#problem); `reason` is the word to switch on.
Calls name those that are their own. Besides, every call may be refused with 503, every call that needs a
credential with 401, and every body with 400, 413 and 422.

"""
_COMMON = {"401", "503"}
_OF_BODIES = {"400", "413", "422"}
_ASKED_BY = {"user": "By users", "worker": "By workers", "task": "By tasks", "none": "No credential"}


@dataclass(frozen=True, slots=True)
class Call:
    method: str
    path: str
    who: str
    operation: Json


def http_page() -> str:
    documents = {
        "User port": _read(describe_dispatcher("user", USER_ROUTES)),
        "Internal port": _read(describe_dispatcher("internal", INTERNAL_ROUTES)),
        "Query Service": _read(describe_query()),
    }
    by_port = {title: list(calls(document)) for title, document in documents.items()}
    everywhere = set.intersection(*({call.path for call in found} for found in by_port.values() if found))
    shared = {call.path: call for found in by_port.values() for call in found if call.who == "none"}
    parts = [_INTRODUCTION]
    for title, found in by_port.items():
        parts.append(f"## {title}\n")
        parts.extend(_port([call for call in found if call.path not in everywhere]))
    parts.append("## Every port\n")
    parts.extend(_port([call for path, call in shared.items() if path in everywhere]))
    parts.append(_REFUSALS + table(("status", "means"), _statuses(documents.values())))
    parts.append("## Bodies and answers\n")
    parts.extend(_schema(name, schema) for name, schema in _schemas(documents.values()))
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def calls(document: Json) -> Iterator[Call]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            schemes = [name for entry in operation.get("security", ()) for name in entry]
            yield Call(method.upper(), path, schemes[0] if schemes else "none", operation)


def _read(document: bytes) -> Json:
    read: Json = json.loads(document)
    return read


def _port(found: list[Call]) -> Iterator[str]:
    for who in _ASKED_BY:
        rows = [_row(call) for call in found if call.who == who]
        if rows:
            yield f"{_ASKED_BY[who]}:\n"
            yield table(("call", "what it does", "takes", "answers", "refuses"), rows)


def _row(call: Call) -> tuple[str, ...]:
    operation = call.operation
    answers = {code: each for code, each in operation["responses"].items() if code < "400"}
    known = _COMMON | (_OF_BODIES if "requestBody" in operation else set())
    refusals = [code for code in operation["responses"] if code >= "400" and code not in known]
    return (
        f"`{call.method} {call.path}`",
        cell(operation["summary"]),
        _takes(operation),
        ", ".join(f"{code} {_content(each['content'])}".strip() for code, each in answers.items()),
        ", ".join(refusals),
    )


def _takes(operation: Json) -> str:
    asked = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
    taken = [_optional(f"`?{each['name']}`", each["required"]) for each in asked]
    if body := operation.get("requestBody"):
        taken.append(_optional(_content(body["content"]), body["required"]))
    return ", ".join(taken)


def _optional(text: str, required: bool) -> str:
    return text if required else f"({text})"


def _content(content: Json) -> str:
    shown = []
    for media, form in content.items():
        shown.append(json_type(form["schema"]) if media == "application/json" else f"`{media}`")
    return " or ".join(shown)


def _statuses(documents: Iterable[Json]) -> Sequence[tuple[str, str]]:
    found = {
        code: response["description"]
        for document in documents
        for call in calls(document)
        for code, response in call.operation["responses"].items()
        if code >= "400"
    }
    return sorted(found.items())


def _schemas(documents: Iterable[Json]) -> list[tuple[str, Json]]:
    found: dict[str, Json] = {}
    for document in documents:
        for name, schema in document["components"]["schemas"].items():
            if found.setdefault(name, schema) != schema:
                raise ValueError(f"two ports mean different things by {name}")
    return sorted(found.items(), key=lambda entry: entry[0].lower())


def _schema(name: str, schema: Json) -> str:
    about = cell(schema.get("description", "")).replace("``", "`")
    head = f"### {name}\n\n" + (f"{about}\n\n" if about else "")
    if "enum" in schema:
        return head + ", ".join(f"`{value}`" for value in schema["enum"]) + "\n"
    required = schema.get("required", ())
    rows = [
        (f"`{field}`", json_type(inner), "required" if field in required else _default(inner))
        for field, inner in schema.get("properties", {}).items()
    ]
    return head + (table(("field", "type", "default"), rows) if rows else "No fields.\n")


def _default(schema: Json) -> str:
    return f"`{json.dumps(schema['default'])}`" if "default" in schema else ""
