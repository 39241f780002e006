"""What passes through a gateway: requests whose meaning can't be read in two ways.

A request is taken apart and written anew, never copied: only a plain path counts (no escapes, no dots, no empty
parts, no other host), only headers on a list go on, and one that matters may be said once. So nobody behind the
gateway sees bytes that the sandbox chose outside of a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus

import h11

from tracelake.domain.errors import BadRequest, NotFound, TracelakeError

METHODS = frozenset({"GET", "POST"})
CAPABILITY_HEADER = "x-trace-task-capability"
FORWARDED_HEADERS = ("accept", "content-type", CAPABILITY_HEADER)
RETURNED_HEADERS = (
    "content-type",
    "retry-after",
    "x-trace-query-id",
    "x-trace-row-count",
    "x-trace-truncated",
)
_HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"}
    | {"te", "trailer", "transfer-encoding", "upgrade"}
)
_NEVER_HEARD = frozenset({"authorization", "cookie", "x-trace-worker-token"})
_STATUSES = {"MethodNotAllowed": 405, "RequestTimeout": 408, "HeadTooLarge": 431, "InternalError": 500}
"""Of what only a gateway has to say."""
_PATH = re.compile(r"(?:/[A-Za-z0-9_~$-][A-Za-z0-9._~$-]*)+")
_QUERY = re.compile(r"[A-Za-z0-9._~!$'()*+,;=:@/?&%-]*")


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """``path`` is canonical; header names are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes = field(repr=False)

    def __repr__(self) -> str:
        return f"GatewayRequest({self.method} {self.path})"


@dataclass(frozen=True, slots=True)
class GatewayResponse:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def parse(event: h11.Request, body: bytes) -> GatewayRequest:
    if event.http_version not in (b"1.0", b"1.1"):
        raise BadRequest("BadRequest", "only HTTP/1.1 is spoken here")
    framing = {name for name, _ in event.headers} & {b"content-length", b"transfer-encoding"}
    if len(framing) == 2:
        raise BadRequest("BadRequest", "a request has a length or is sent in chunks, not both")
    method = event.method.decode("ascii")
    if method not in METHODS:
        raise BadRequest("MethodNotAllowed", "only GET and POST pass here")
    path, _, query = event.target.decode("latin-1").partition("?")
    if _PATH.fullmatch(path) is None or _QUERY.fullmatch(query) is None:
        raise NotFound("NotFound", "there is nothing here")
    return GatewayRequest(method, path, query, _headers(event), body)


def _headers(event: h11.Request) -> dict[str, str]:
    named_hops = {
        name.strip().lower()
        for key, value in event.headers
        if key == b"connection"
        for name in value.decode("latin-1").split(",")
    }
    headers: dict[str, str] = {}
    for key, value in event.headers:
        name = key.decode("ascii")
        if name in _HOP_BY_HOP or name in _NEVER_HEARD or name in named_hops:
            continue
        if name in headers:
            if name in FORWARDED_HEADERS:
                raise BadRequest("BadRequest", f"{name} is given twice")
            continue
        headers[name] = value.decode("latin-1")
    return headers


def problem(error: TracelakeError) -> GatewayResponse:
    status = _STATUSES.get(error.reason, error.status)
    said = {
        "type": f"urn:tracelake:problem:{error.reason}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": error.message,
        "reason": error.reason,
    }
    return GatewayResponse(status, {"content-type": "application/problem+json"}, json.dumps(said).encode())
