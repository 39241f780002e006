"""Errors as problem details (RFC 9457): one table from what was raised to what is answered.

``reason`` is the word that clients switch on. A message is shown only when the platform wrote it on purpose;
of anything unexpected the caller learns nothing, and the log everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException, MethodNotAllowedException

from tracelake.domain.buffer_records import BadRecords, RecordProblem
from tracelake.domain.errors import Invalid, InvalidDag, TracelakeError, Unauthenticated
from tracelake.serving.answer import Answer
from tracelake.serving.identity import CHALLENGES, IDENTITY, Identity

MEDIA_TYPE = "application/problem+json"

log = structlog.get_logger(__name__)

_FRAMEWORK_REASONS = {
    HTTPStatus.BAD_REQUEST: "BadRequest",
    HTTPStatus.NOT_FOUND: "NotFound",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowed",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "TooLarge",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "UnsupportedMediaType",
}


class FieldProblem(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is wrong with one field; ``line`` and ``column`` are there when the request was a file."""

    field: str
    message: str
    line: int | None = None
    column: int | None = None


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A refused request. ``reason`` is stable, ``detail`` is for people and may change."""

    type: str
    title: str
    status: int
    detail: str
    reason: str
    errors: list[FieldProblem] | None = None


class InvalidRequest(Invalid):
    """A request whose shape is wrong, field by field."""

    def __init__(self, errors: Sequence[FieldProblem]) -> None:
        first = errors[0]
        super().__init__("InvalidRequest", f"{first.field or 'the request'}: {first.message}")
        self.errors = list(errors)


def problem(status: int, reason: str, detail: str, errors: list[FieldProblem] | None = None) -> Problem:
    title = HTTPStatus(status).phrase
    return Problem(f"urn:tracelake:problem:{reason}", title, status, detail, reason, errors)


def problem_of(error: Exception) -> Problem:
    match error:
        case InvalidDag():
            places = [FieldProblem(p.field, p.message, p.line, p.column) for p in error.problems]
            return problem(error.status, error.reason, error.message, places)
        case InvalidRequest():
            return problem(error.status, error.reason, error.message, error.errors)
        case BadRecords():
            found = [FieldProblem(_record_field(each), each.message) for each in error.problems]
            return problem(error.status, error.reason, error.message, found)
        case RecursionError():
            # Only what was sent decides how deep a request goes.
            return problem(422, "TooDeep", "what was sent is nested too deeply")
        case TracelakeError() if error.status < 500 or error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            return problem(error.status, error.reason, error.message)
        case HTTPException() if error.status_code < 500:
            reason = _FRAMEWORK_REASONS.get(HTTPStatus(error.status_code), "BadRequest")
            return problem(error.status_code, reason, error.detail)
        case _:
            return problem(500, "Internal", "something went wrong inside; the log knows more")


def _record_field(found: RecordProblem) -> str:
    place = "records" if found.record is None else f"records[{found.record}]"
    return place if found.field is None else f"{place}.{found.field}"


def problem_answer(found: Problem, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Answer:
    body = msgspec.json.encode(found)
    return Answer(body, status=found.status, media_type=MEDIA_TYPE.encode(), headers=headers)


def refusal(error: Exception, identity: Identity, method: str, path: str) -> Answer:
    """The answer to a request on which a route raised; ``identity`` is what the route asks for."""
    found = problem_of(error)
    if found.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        log.error("request_failed", method=method, path=path, exc_info=error)
    if isinstance(error, Unauthenticated):
        return problem_answer(found, ((b"www-authenticate", CHALLENGES[identity].encode()),))
    if isinstance(error, MethodNotAllowedException):
        methods = (error.headers or {}).get("allow", "").split(", ")
        allowed = ", ".join(sorted(method for method in methods if method != "OPTIONS"))
        return problem_answer(found, ((b"allow", allowed.encode()),))
    return problem_answer(found)


def framework_refusal(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The same for what the framework serves; it wants a response of its own kind."""
    handler = request.scope.get("route_handler")
    identity = handler.opt.get(IDENTITY, Identity.NOBODY) if handler else Identity.NOBODY
    answer = refusal(error, identity, request.method, request.scope["path"])
    return Response(
        answer.body,
        status_code=answer.status,
        media_type=MEDIA_TYPE,
        headers={name.decode(): value.decode() for name, value in answer.headers},
    )
